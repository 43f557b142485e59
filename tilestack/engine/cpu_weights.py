"""Weights laid out for a CPU. Decoding reads every weight for every token, so how they lie in memory decides its speed.

    int8       codes of 8 bits and a scale for each output; activations stay as they are (in W8A8 checkpoints too)
    other      codes of a checkpoint, as they are, for the compiled step (cpu_step.py); where a model is computed operator by
    codes      operator, the same C++ multiplies with them
    bfloat16   in the blocks that oneDNN's kernels read, where no compiled step reads them as they are

Codes of experts are read as they are too, of those alone that tokens of a step go to. Without a compiler, codes other than
int8 of layers are made numbers once, and are then as fast and as large as plain weights.

The head is packed too, beside the embedding that it may share its numbers with; beside codes from a checkpoint it stays as it
is. What is packed is for inference: a layer keeps the shape of its weight and no longer the weight.
"""

import logging

import torch
from torch import Tensor

from tilestack.kernels.cpu.build import missing_compiler
from tilestack.kernels.cpu.decode_step import Matrix, groups_refused, matrix_product
from tilestack.kernels.cuda.build import BuildError
from tilestack.models import Decoder
from tilestack.nn import Linear, MoE
from tilestack.ops.grouped import sizes_of
from tilestack.ops.quantised import quantised
from tilestack.quant import SCHEMES, Codes, QuantisedLinear
from tilestack.quant.experts import QuantisedMoE, quantise_experts
from tilestack.quant.linear import drop_weight

log = logging.getLogger(__name__)

FEW = 8  # rows for which PyTorch's kernel for codes is faster than to make numbers of them first
WHOLE = 64  # it leaves out what is no multiple of this in a row


class BlockedLinear(Linear):
    """A bfloat16 layer whose weight lies in blocks."""

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")


class Int8Linear(Linear):
    """A layer with weights of 8 bits."""

    codes: Tensor  # [out, in]
    code_scale: Tensor  # [out], float32

    def forward(self, input: Tensor) -> Tensor:
        rows, dtype = input.flatten(0, -2), input.dtype
        if dtype == torch.bfloat16 and len(rows) <= FEW and not self.in_features % WHOLE:
            out = torch._weight_int8pack_mm(rows.contiguous(), self.codes, self.code_scale.to(dtype))
        else:
            out = torch.nn.functional.linear(rows, self.codes.to(dtype)) * self.code_scale.to(dtype)
        return (out if self.bias is None else out + self.bias).unflatten(0, input.shape[:-1])


class CodedLinear(QuantisedLinear):
    """A layer of codes that C++ multiplies with. Activations stay as they are, whatever the scheme says."""

    def forward(self, input: Tensor) -> Tensor:
        codes = Codes(self.codes, self.code_scale, self.code_zero)  # not `kept`, which a layer with adapters has not
        out = product_of_codes(codes, input.flatten(0, -2))
        out = out if self.bias is None else out + self.bias.float()
        return out.to(input.dtype).unflatten(0, input.shape[:-1])


class CodedMoE(QuantisedMoE):
    """A mixture whose experts' codes C++ multiplies with, expert by expert: on a CPU, asking where they end takes no time."""

    def base_product(self, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        stack = self.stacks.get("gate_up" if weight is self.gate_up else "down")
        if stack is None:
            return MoE.base_product(self, rows, weight, offsets)
        out = rows.new_zeros(len(rows), weight.shape[1])
        sizes = sizes_of(offsets, len(rows))
        for expert, (mine, place) in enumerate(zip(rows.split(sizes), out.split(sizes), strict=True)):
            if len(mine) and expert < len(offsets):
                place.copy_(product_of_codes(stack.each(lambda codes, expert=expert: codes[expert]), mine))  # type: ignore[misc]
        return out


def product_of_codes(codes: Codes, rows: Tensor) -> Tensor:
    """Rows times the matrix of some codes, in float32."""
    matrix = Matrix(*codes)
    functions = matrix.functions(torch.bfloat16 if rows.dtype == torch.bfloat16 else torch.float32)
    return matrix_product(matrix, rows, functions, torch.get_num_threads())


@torch.no_grad()
def pack_for_cpu(decoder: Decoder, weights: str) -> None:
    """Pack a decoder's linear layers and its head: bfloat16 in blocks, or int8."""
    if decoder.head is None:
        head = Linear(decoder.config.hidden, decoder.config.vocabulary, bias=False, device="meta")
        head.weight = torch.nn.Parameter(decoder.embedding.weight, requires_grad=False)
        decoder.head = head
    for layer in decoder.modules():
        if type(layer) is Linear:
            pack_blocked(layer) if weights == "bfloat16" else pack_int8(layer)
        elif type(layer) is MoE and weights == "int8":
            quantise_experts(layer, SCHEMES["w8a16"])


def pack_blocked(layer: Linear) -> None:
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), 1)
    layer.__class__ = BlockedLinear
    layer.packed = packed  # type: ignore[assignment]
    drop_weight(layer)


def pack_int8(layer: Linear) -> None:
    codes, scale = quantised(layer.weight.detach().float(), torch.int8)
    layer.__class__ = Int8Linear
    layer.codes, layer.code_scale = codes, scale  # type: ignore[assignment]
    drop_weight(layer)


def take_int8(decoder: Decoder) -> None:
    """Let layers of int8 codes be those that the compiled step reads, where an output has one scale and no zero point."""
    for layer in decoder.modules():
        if not isinstance(layer, QuantisedLinear) or layer.codes.dtype != torch.int8:
            continue
        if layer.code_zero is None and layer.code_scale.shape[1] == 1:
            layer.__class__ = Int8Linear  # type: ignore[assignment]
            layer.code_scale = layer.code_scale[:, 0].contiguous()


def take_codes(decoder: Decoder) -> None:
    """Let the other layers of codes, and experts, be read by C++ as they are, where it can be compiled and their groups are
    whole vectors."""
    dtype = decoder.embedding.weight.dtype
    as_read = lambda codes: codes._replace(scale=codes.scale.float().contiguous())
    for path, layer in decoder.named_modules():
        if isinstance(layer, QuantisedLinear) and not why_unpacked(path, layer.kept, dtype):
            layer.codes, layer.code_scale, layer.code_zero = as_read(layer.kept)
            layer.__class__ = CodedLinear  # type: ignore[assignment]
        if isinstance(layer, QuantisedMoE) and not why_experts_unpacked(path, layer, dtype):
            layer.stacks = {name: as_read(stack) for name, stack in layer.stacks.items()}
            layer.__class__ = CodedMoE  # type: ignore[assignment]


def why_unpacked(path: str, codes: Codes, dtype: torch.dtype) -> str:
    """Why C++ is not to read the codes of a layer, for inputs of a dtype; empty when it is."""
    if path.endswith(".kv_up"):
        return "attention over latents takes the whole matrix in every step"
    matrix = Matrix(*codes)
    if reason := missing_compiler() or groups_refused(matrix.columns, codes.scale.shape[1]):
        return reason
    try:
        matrix.functions(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    except BuildError as problem:
        return problem.in_short()
    return ""


def why_experts_unpacked(path: str, mixture: QuantisedMoE, dtype: torch.dtype) -> str:
    reasons = (why_unpacked(path, stack.each(lambda codes: codes[0]), dtype) for stack in mixture.stacks.values())
    return next(filter(None, reasons), "")


@torch.no_grad()
def unpack_codes(decoder: Decoder) -> None:
    """Make plain layers, in the decoder's dtype, of codes that cannot be read here: to make numbers of them in every step
    takes far longer than to read numbers. A layer keeps its `scheme`, and a mixture its `schemes`, to tell what it was."""
    dtype = decoder.embedding.weight.dtype
    unpacked = set()
    plain = lambda numbers: torch.nn.Parameter(numbers.to(dtype), requires_grad=False)
    for path, layer in decoder.named_modules():
        if isinstance(layer, QuantisedLinear) and not isinstance(layer, CodedLinear):
            unpacked.add((layer.scheme.weights, why_unpacked(path, layer.kept, dtype)))
            layer.weight = plain(layer.kept.numbers())
            layer.codes = layer.code_scale = layer.code_zero = layer.product_scale = None  # type: ignore[assignment]
            layer.__class__ = Linear  # type: ignore[assignment]
        if isinstance(layer, QuantisedMoE) and not isinstance(layer, CodedMoE):
            why = why_experts_unpacked(path, layer, dtype)
            for name, stack in layer.stacks.items():
                unpacked.add((layer.schemes[name].weights, why))
                numbers = torch.empty(getattr(layer, name).shape, dtype=dtype)
                for expert, place in enumerate(numbers):
                    place.copy_(stack.each(lambda codes, expert=expert: codes[expert]).numbers())  # type: ignore[misc]
                setattr(layer, name, plain(numbers))
            layer.stacks = {}
            layer.__class__ = MoE  # type: ignore[assignment]
    for weights, reason in sorted(unpacked):
        log.warning(
            "codes of %s are unpacked to %s, which takes the memory of a model that is not quantised: %s",
            weights,
            str(dtype).removeprefix("torch."),
            reason,
        )


def can_block() -> bool:
    """Whether this CPU and this PyTorch have the kernels for bfloat16 in blocks."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
