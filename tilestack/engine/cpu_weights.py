"""Weights laid out for a CPU. Decoding reads every weight for every token, so how they lie in memory decides its speed.

    int8       codes of 8 bits and a scale for each output; activations stay as they are (in W8A8 checkpoints too)
    bfloat16   in the blocks that oneDNN's kernels read, where no compiled step (cpu_step.py) reads them as they are

The head is packed too, beside the embedding that it may share its numbers with; beside codes from a checkpoint it stays as it
is. What is packed is for inference: a layer keeps the shape of its weight and no longer the weight.
"""

import torch
from torch import Tensor

from tilestack.models import Decoder
from tilestack.nn import Linear
from tilestack.ops.quantised import quantised
from tilestack.quant import QuantisedLinear
from tilestack.quant.linear import drop_weight

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
        if isinstance(layer, QuantisedLinear) and layer.codes.dtype == torch.int8:
            if layer.code_zero is None and layer.code_scale.shape[1] == 1:
                layer.__class__ = Int8Linear  # type: ignore[assignment]
                layer.code_scale = layer.code_scale[:, 0].contiguous()


def can_block() -> bool:
    """Whether this CPU and this PyTorch have the kernels for bfloat16 in blocks."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
