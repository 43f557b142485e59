"""Weights laid out for a CPU. Decoding reads every weight for every token, so how they lie in memory decides its speed.

    bfloat16   in the blocks that oneDNN's kernels read; the same numbers
    int8       a scale for each output, and activations rounded to 8 bits as they come, by PyTorch's packed kernels

The head is packed too, beside the embedding that it may share its numbers with. What is packed is for inference: a layer
keeps the shape of its weight and no longer the weight.
"""

import warnings

import torch
from torch import Tensor

from tilestack.models import Decoder
from tilestack.nn import Linear


class BlockedLinear(Linear):
    """A bfloat16 layer whose weight lies in blocks."""

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")


class Int8Linear(Linear):
    """A layer with weights of 8 bits."""

    packed: torch.ScriptObject

    def forward(self, input: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(input.float(), self.packed).to(input.dtype)


def packing_of(weights: str | None, adapted: bool, dtype: torch.dtype, device: torch.device) -> str | None:
    """How a model's weights are to be packed: as asked, or bfloat16 in blocks where the CPU can; None: not at all."""
    if weights is None:
        blocks = device.type == "cpu" and dtype == torch.bfloat16 and can_block() and not adapted
        return "bfloat16" if blocks else None
    if weights != "int8":
        raise ValueError(f"no weights {weights!r}; int8 is what there is, and leaving it out keeps those of the model")
    if device.type != "cpu":
        raise ValueError("weights of int8 are for CPUs so far; leave them out on a GPU")
    if adapted:
        raise ValueError("adapters need plain weights, so weights of int8 cannot be had with them")
    return weights


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
    replace_weight(layer, packed)


def pack_int8(layer: Linear) -> None:
    weight = layer.weight.detach().float()
    scales = weight.abs().amax(1).clamp(min=1e-12).double() / 127
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch means to replace these kernels, and has not yet
        rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(rounded, None if layer.bias is None else layer.bias.detach().float())
    layer.__class__ = Int8Linear
    replace_weight(layer, packed)


def replace_weight(layer: Linear, packed: object) -> None:
    layer.packed = packed  # type: ignore[assignment]
    layer.weight = torch.nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)


def can_block() -> bool:
    """Whether this CPU and this PyTorch have the kernels for bfloat16 in blocks."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
