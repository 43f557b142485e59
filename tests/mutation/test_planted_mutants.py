"""Bugs that audits planted and the suite of their day let live: the harness catches each, by the claim that shows it."""

import pytest
import torch

from tilestack import ops
from tilestack.lab.mutation.mutants import Mutant
from tilestack.lab.mutation.suite import CPU, Suite
from tilestack.lab.proof.claims import claims

# file: what was planted, and the claim that catches it; a constant is lowered where no small case crosses it
PLANTED = {
    "linear_cross_entropy takes the wrong part of what arrives": (
        "loss.linear_cross_entropy",
        [("else scale[part]", "else scale[: len(rows[part])]"), ("CHUNK_BYTES = 192 << 20", "CHUNK_BYTES = 520"), ("MANY = 13", "MANY = 1"), ("ROW_MULTIPLE = 128", "ROW_MULTIPLE = 1")],
        dict(operator="linear_cross_entropy", case="5x8x65xnone", direction="backward"),
    ),
    "norm's backward reads what arrives by the stride of x": (
        "norm.rows",
        [("grad_ptr + row * grad_stride + column", "grad_ptr + row * x_stride + column")],
        dict(operator="rms_norm", case="3x33", direction="backward", variant="padded"),
    ),
    "softmax's backward reads its output by the stride of what arrives": (
        "softmax.rows",
        [("y_ptr + row * y_stride + column", "y_ptr + row * grad_stride + column")],
        dict(operator="softmax", case="3x33x-1", direction="backward", variant="padded"),
    ),
    "cross_entropy ignores the stride of its rows": (
        "loss.cross_entropy",
        [("logits_ptr += row * logits_stride", "logits_ptr += row * columns")],
        dict(operator="cross_entropy", case="4x33", variant="padded"),
    ),
    "cross_entropy compares labels with -100": (
        "loss.cross_entropy",
        [("if label == ignore_index:", "if label == -100:")],
        dict(operator="cross_entropy", case="11x33xunknown"),
    ),
    "the gradient of a bias is lost in wide rows": (
        "norm.rows",
        [("sum_columns(arriving[None], weight.dtype)[0]", "0 * sum_columns(arriving[None], weight.dtype)[0]")],
        dict(operator="layer_norm", case="1x12001", direction="backward"),
    ),
    "softmax of halves does not subtract the maximum": (
        "softmax.rows",
        [("x = x - tl.max(x, 1, keep_dims=True)", "x = x - (0 if HALF else 1) * tl.max(x, 1, keep_dims=True)")],
        dict(operator="softmax", case="3x33x-1", variant="large", dtype=torch.float16),
    ),
    "the bound on what top_p keeps is too high": (
        "sampling.bound",
        [("share = tl.maximum(share, (1 - p) / vocabulary)", "share = tl.maximum(share, (1 - p) * 0.02)")],
        dict(operator="sample", case="8x5000xtail"),
    ),
    "the mass outside a nucleus is taken for more": (
        "sampling.depths",
        [("0.999 * (1 - p)", "1.999 * (1 - p)")],
        dict(operator="sample", case="8x5000xtail"),
    ),
    "norm's backward writes over what arrives": (
        "norm.rows",
        [("    dx = torch.empty_like(x, memory_format=torch.contiguous_format)\n    tensors = arriving", "    dx = grad if grad.is_contiguous() and grad.dtype == x.dtype else torch.empty_like(x)\n    tensors = arriving")],
        dict(operator="rms_norm", case="3x33", direction="backward"),
    ),
    "relu writes over its input": (
        "elementwise.activation",
        [("    (x,) = flat(x)\n    out = torch.empty_like(x)\n", "    (x,) = flat(x)\n    out = x if kind == 'relu' else torch.empty_like(x)\n")],
        dict(operator="relu", case="33"),
    ),
    "a part of K begins where it would if columns lay side by side": (
        "matmul.gated_split_k",
        [("x_ptr + first * x_stride_k", "x_ptr + first")],
        dict(operator="linear_swiglu", case="5x9x200", variant="strided", backend="triton_split_k", config="64x64x4"),
    ),
    "an expert that is not there may be chosen": (
        "routing",
        [("open = tl.broadcast_to(expert < experts", "open = tl.broadcast_to(expert <= experts")],
        dict(operator="route", case="5x5x5xsigmoidxbias+below+normalise"),
    ),
    "a part of a text's keys that is not there is merged with the others": (
        "attention.parts",
        [("there = (number < parts)", "there = (number <= parts)")],
        dict(operator="paged_attention", case="unevenx16x2x1x16x16"),
    ),
    "parts of the sums of several matrices lie over each other": (
        "memory.columns",
        [("(tl.program_id(1).to(tl.int64) * matrices + matrix)", "(tl.program_id(1).to(tl.int64) + matrix)")],
        dict(operator="reduce_sum", case="2x1025x37x1"),
    ),
    "taps that lie side by side are all where the first of them is": (
        "conv.implicit_gemm",
        [("w[:, None] + ((first + c) // pixel_channels)[None, :]", "w[:, None] + 0 * ((first + c) // pixel_channels)[None, :]")],
        dict(operator="conv2d", case="1x3x6x36x3x2x1x1x1xnhwc"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_what_once_survived_is_caught(what):
    file, changes, where = PLANTED[what]
    wanted = dict(direction="forward", variant="plain", dtype=torch.float32, backend="triton", config="") | where
    operator = ops.operator_named(wanted.pop("operator"))
    suite = Suite(f"tilestack.kernels.{file}", tried=[operator])
    held = [
        claim
        for claim in claims([operator], CPU, only={operator.name: wanted["backend"]}, dtypes=[wanted["dtype"]])
        if all(getattr(claim, name) == wanted[name] for name in ("direction", "variant", "config"))
        and claim.case.name == wanted["case"]
    ]
    assert len(held) == 1
    source = suite.path.read_text()
    for old, new in changes:
        assert old in source
        source = source.replace(old, new, 1)
    outcome = suite.against(held, Mutant(suite.module, "", "", "", "", 1, 0, source))
    assert outcome.caught
    assert "ReadOutside" in outcome.message or "Error" not in outcome.message, "it must be refuted, not broken"
    lowered = suite.path.read_text()
    for old, new in changes[1:]:
        lowered = lowered.replace(old, new, 1)
    within = suite.against(held, Mutant(suite.module, "", "", "", "", 1, 0, lowered))
    assert not within.message, "without it all is well"
