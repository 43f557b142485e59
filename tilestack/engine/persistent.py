"""A batch of one decoded by a single persistent kernel, where the model and the GPU allow it.

The kernel (kernels/cuda/decode_step.py) takes a token and a page table and gives logits; which token comes next is drawn as
everywhere else. It is made for dense decoders in bfloat16, whose layers may be of fp8 codes: what a model has that the
kernel does not is a reason to go on as usual, and the reason is told.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilestack.engine.plain_decoder import linears_of, norms_of, not_plain
from tilestack.kernels.cuda.decode_step import DecoderShape, DecodeStep, device_refused, shape_refused
from tilestack.models import Decoder, ModelConfig, PagedCache
from tilestack.nn.mlp import is_untouched
from tilestack.quant import QuantisedLinear

if TYPE_CHECKING:
    from tilestack.engine.runner import Runner


def shape_of(config: ModelConfig, codes: bool = False) -> DecoderShape:
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary")
    return DecoderShape(
        qk_norm=config.qk_norm == "head", codes=codes, **{name: getattr(config, name) for name in sizes}
    )


def why_not(decoder: Decoder, cache: PagedCache) -> str:
    """Why a decoder cannot be stepped by one kernel; empty when it can."""
    config, weight = decoder.config, decoder.embedding.weight
    if reason := not_plain(decoder):
        return reason
    if any(each.dtype != torch.bfloat16 for each in (*decoder.parameters(), *cache.tensors())):
        return "weights, keys and values must all be bfloat16"
    if any(not each.is_contiguous() or each.data_ptr() % 16 for each in decoder.parameters()):
        return "weights must lie contiguously, on 16 bytes"
    linears = [each for layer in decoder.layers for each in linears_of(layer)]
    if decoder.head is not None and not is_untouched(decoder.head):
        return "the model's head is adapted, quantised or listened to"
    codes = any(isinstance(each, QuantisedLinear) for each in linears)
    if reason := next(filter(None, map(not_fp8, linears)), "") if codes else "":
        return reason
    if not codes and not all(map(is_untouched, linears)):
        return "linear layers of the model are adapted, quantised or listened to"
    return shape_refused(shape_of(config, codes)) or device_refused(weight.device)


def not_fp8(layer: torch.nn.Module) -> str:
    """Why a layer of a model of codes is not read by the kernel; empty when it is."""
    if type(layer) is not QuantisedLinear:
        return "some linear layers of the model are quantised, and others are not"
    codes, scale, zero = layer.kept
    if codes.dtype != torch.float8_e4m3fn or zero is not None or scale.shape[1] != 1 or scale.dtype != torch.float32:
        return "linear layers of the model are of other codes than fp8 with a scale for each output"
    if any(not each.is_contiguous() or each.data_ptr() % 16 for each in (codes, scale)):
        return "codes and scales must lie contiguously, on 16 bytes"
    return ""


def served_beside(runner: "Runner") -> str:
    """What a runner serves that the kernel has no code for; empty when nothing."""
    if runner.adapters is not None:
        return "adapters are served"
    return "a smaller model drafts, and has to read every token too" if runner.draft is not None else ""


class PersistentStep:
    """The step of a runner's decoder; raises ValueError where there is none."""

    def __init__(self, runner: "Runner"):
        decoder, config = runner.decoder, runner.decoder.config
        if reason := why_not(decoder, runner.cache) or served_beside(runner):
            raise ValueError(reason)
        self.runner = runner
        self.step = DecodeStep(
            shape_of(config, codes=isinstance(linears_of(decoder.layers[0])[0], QuantisedLinear)),
            [weights_of(layer) for layer in decoder.layers],
            decoder.embedding.weight,
            decoder.head_weight,
            decoder.norm.weight,
            eps=config.norm_eps,
            scale=config.attention_scale or config.head_dim**-0.5,
        )

    def logits(self, ids: Tensor, length: Tensor, pages: Tensor) -> Tensor:
        """Logits [1, V] after the one token of `ids`, the last of `length`, whose sequence has `pages` [1, blocks]."""
        cache = self.runner.cache
        (cos, sin), _ = self.runner.decoder.rotary(cache.longest or pages.shape[1] * cache.page)
        assert cache.values is not None
        return self.step(ids, length, pages[0], cache.keys, cache.values, cos, sin)


def weights_of(layer: torch.nn.Module) -> list[Tensor | None]:
    """As `DecodeStep` takes them."""
    norms = [None if each is None else each.weight for each in norms_of(layer)]
    linears = linears_of(layer)
    if not isinstance(linears[0], QuantisedLinear):
        return [each.weight for each in linears] + norms  # type: ignore
    return [each.codes for each in linears] + norms + [each.code_scale for each in linears]  # type: ignore
