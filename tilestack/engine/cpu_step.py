"""A step on a CPU as one C++ call, where the model allows it and there is a compiler; else operator by operator.

A step of a few tokens, such as a token for each of a few sequences or a token with guesses behind it, takes as long as the
weights take to be read. Operator by operator it takes longer, for what Python and PyTorch do around each, and so does a
prompt. Steps of many tokens are left to the operators on CPUs that have no instructions for products of bfloat16.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tilestack.engine.cpu_weights import CodedLinear, Int8Linear
from tilestack.engine.plain_decoder import linears_of, norms_of, not_plain
from tilestack.kernels.cpu.build import missing_compiler
from tilestack.kernels.cpu.decode_step import PLAIN, DecodeStep, LayerWeights, Matrix, sizes_refused
from tilestack.kernels.cuda.build import BuildError
from tilestack.models import Decoder, PagedBatch, PagedCache
from tilestack.nn.mlp import is_untouched

log = logging.getLogger(__name__)

FEW = 16  # tokens of a step, beside which what PyTorch does is little


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Inside, PyTorch wakes no other thread: after each operator these stay awake for milliseconds, waiting for the next, and
    take the CPU from those of the step, which then takes twice as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_step(decoder: Decoder, cache: PagedCache) -> "CPUStep | None":
    """The step of a decoder, or None; why there is none is logged, with a warning where one could be had."""
    if reason := why_not(decoder):
        log.info("decoding operator by operator: %s", reason)
        return None
    weight = decoder.embedding.weight
    if cache.keys.dtype != weight.dtype:
        kept, own = (str(dtype).removeprefix("torch.") for dtype in (cache.keys.dtype, weight.dtype))
        why = f"keys and values are kept in {kept}; leave kv_dtype out to keep them in {own}"
        log.warning("decoding operator by operator, which is slower: %s", why)
        return None
    try:
        return CPUStep(decoder, cache)
    except BuildError as problem:
        log.warning("decoding operator by operator, which is slower: %s", problem.in_short())
        return None


def why_not(decoder: Decoder) -> str:
    """Why a decoder cannot be stepped in one call; empty when it can."""
    config, weight = decoder.config, decoder.embedding.weight
    if reason := not_plain(decoder):
        return reason
    if weight.dtype not in PLAIN:
        return f"weights of {weight.dtype}; they must be float32 or bfloat16"
    linears, head = [each for layer in decoder.layers for each in linears_of(layer)], decoder.head
    coded = lambda each: type(each) in (Int8Linear, CodedLinear)
    alike = all(map(is_untouched, linears)) or (
        all(map(coded, linears)) and len({each.codes.dtype for each in linears}) == 1
    )
    if not alike or not (head is None or is_untouched(head) or coded(head)):
        return "linear layers of the model are adapted, packed or listened to"
    plain = [each for each in decoder.parameters() if not each.is_meta]
    if any(each.dtype != weight.dtype or not each.is_contiguous() for each in plain):
        return "weights must lie contiguously and have one dtype"
    sizes = dict(hidden=config.hidden, intermediate=config.intermediate, head_dim=config.head_dim)
    return sizes_refused(**sizes) or missing_compiler()


def matrix_of(linear: torch.nn.Module) -> Matrix:
    if isinstance(linear, CodedLinear):
        return Matrix(*linear.kept)
    return Matrix(linear.codes, linear.code_scale) if isinstance(linear, Int8Linear) else Matrix(linear.weight.detach())  # type: ignore


class CPUStep:
    def __init__(self, decoder: Decoder, cache: PagedCache):
        assert cache.values is not None  # latents are not plain
        config, self.decoder = decoder.config, decoder
        weight_of = lambda norm: None if norm is None else norm.weight.detach()
        layers = [
            LayerWeights([*map(matrix_of, linears_of(layer))], [*map(weight_of, norms_of(layer))])
            for layer in decoder.layers
        ]
        self.step = DecodeStep(
            layers,
            decoder.norm.weight.detach(),
            Matrix(decoder.head_weight.detach()) if decoder.head is None else matrix_of(decoder.head),
            cache.keys,
            cache.values,
            heads=config.heads,
            intermediate=config.intermediate,
            eps=config.norm_eps,
            scale=config.attention_scale or config.head_dim**-0.5,
        )
        self.most = self.step.most  # tokens of a step

    def hidden(self, ids: Tensor, batch: PagedBatch) -> Tensor:
        """Normed hidden states [T, hidden] of the tokens of a batch, in float32."""
        (cos, sin), _ = self.decoder.rotary(batch.longest)
        with torch_on_one_thread():
            x = self.decoder.embedding.weight[ids]
            return self.step(x, batch.positions, batch.slots, batch.sequences, batch.block_tables, cos, sin)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's scores [D, V], in float32."""
        return self.step.logits(hidden)

    def draw(self, logits: Tensor, seeds: Tensor, temperature: Tensor) -> Tensor:
        """A token [D] for each of logits [D, V] in float32, without filters."""
        return self.step.draw(logits, seeds, temperature)
