"""The proof harness catches what is planted wrong, where it is wrong, and accepts what is right."""

import re
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from tilestack import contract, ops
from tilestack.contract.launch import launch
from tilestack.contract.workspace import workspace
from tilestack.lab.proof import memory_guards
from tilestack.lab.proof.claims import WITHOUT_EXTRAS, Claim, claims
from tilestack.lab.proof.verify import prove

CPU = torch.device("cpu")


def proofs_of(described, name, cases=None):
    found = claims([described], CPU, only={described.name: name})
    return [prove(claim) for claim in found if cases is None or claim.case.name in cases]


def wrong(proofs):
    return [p for p in proofs if p.ok is False]


@triton.jit
def planted_axpy_kernel(x_ptr, y_ptr, out_ptr, n, alpha, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if FAULT == "off-by-one mask":
        inside = offsets < n - 1
    elif FAULT == "beyond the end":
        inside = offsets < n + 1
    elif FAULT == "unwritten tail":
        inside = (tl.program_id(0) + 1) * BLOCK <= n
    else:
        inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=offsets < n + 1 if FAULT == "reads beyond the end" else offsets < n, other=0)
    y = tl.load(y_ptr + offsets, mask=offsets < n, other=0)
    if FAULT == "dropped scale":
        out = x + y
    elif FAULT == "swallowed NaN":
        out = alpha * tl.where(x == x, x, 0.0) + y
    elif FAULT == "NaN loses to a number":
        out = tl.maximum(alpha * x + y, -3.0e38)
    elif FAULT == "wraps around":
        out = alpha * x + y + (x.to(tl.float32) * 0 + 512).to(tl.int8)
    else:
        out = alpha * x + y
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


def axpy_with(fault="none", backward=lambda grad, alpha: (grad * alpha, grad), before=lambda *tensors: tensors):
    """A Triton axpy as someone outside would write it, with a fault."""

    def forward(x, y, alpha):
        x, y = before(x.contiguous(), y.contiguous())
        out = torch.empty_like(x)
        launch(
            planted_axpy_kernel, (triton.cdiv(x.numel(), 1024),), x, y, out, x.numel(), alpha, FAULT=fault, BLOCK=1024
        )
        return out

    return ops.axpy, forward, backward


def counting_and_leaving_it(x, y):
    workspace("planted", (1,), torch.int32, x.device).add_(1)
    return x, y


@triton.jit
def planted_row_sums_kernel(x_ptr, out_ptr, columns, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0) * columns
    total = tl.zeros([BLOCK], x_ptr.dtype.element_ty if NARROW else tl.float64)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < columns, other=0).to(total.dtype)
        total += x * x
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def rms_norm_with(narrow):
    """RMSNorm on a Triton sum of squares, in the dtype of x or wide enough."""

    def forward(x, weight, eps):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        squares = torch.empty(rows.shape[0], dtype=torch.float64)
        launch(planted_row_sums_kernel, (rows.shape[0],), rows, squares, rows.shape[1], NARROW=narrow, BLOCK=64)
        scale = torch.rsqrt(squares / max(rows.shape[1], 1) + eps).to(torch.promote_types(x.dtype, torch.float32))
        out = (x * scale.view(*x.shape[:-1], 1)).to(x.dtype)
        return out if weight is None else out * weight

    return ops.rms_norm, forward, None


def softmax_with(fault="none"):
    def forward(x, dim):
        wide = x.double() if x.dtype == torch.float64 else x.float()
        if fault == "overflow":
            return (wide.exp() / wide.exp().sum(dim, keepdim=True)).to(x.dtype)
        if fault == "into an input":
            x.data.sub_(x.amax(dim, keepdim=True) if x.numel() else 0)  # as a kernel would, unseen by autograd
        if fault == "non-contiguous":
            flat = torch.as_strided(x, x.shape, torch.empty(x.shape).stride())
            return torch.softmax(flat, dim)
        out = torch.softmax(wide, dim).to(x.dtype)
        return {
            "wrong dtype": lambda: out.float() if x.dtype == torch.float16 else out,
            "wrong shape": lambda: out.squeeze(0),
            "exception": lambda: 1 / 0,
            "other strides": lambda: out.mT.contiguous().mT,
            "random": lambda: out * (1 + torch.rand_like(out) * torch.finfo(out.dtype).eps),
        }.get(fault, lambda: out)()

    def backward(grad, out, dim):
        if fault == "into what arrives":
            return grad.mul_(out).sub_(out * grad.sum(dim, keepdim=True))
        if fault == "another's stride":
            grad = torch.as_strided(grad, out.shape, out.stride())
        inner = 0 if fault == "missing term" else (grad * out).sum(dim, keepdim=True)
        return out * (grad - inner)

    return ops.softmax, forward, backward


def stale_from_the_third_call():
    """An addition that from its third call on reads the memory of the first again."""
    given = []

    def forward(x, y):
        given.append(x)
        return (given[0] if len(given) > 2 else x) + y

    return ops.add, forward, None


def linear_losing_a_row(grad, x, weight, bias, needs):
    rows = grad.reshape(-1, weight.shape[0])
    dweight = rows.T @ x.reshape(-1, weight.shape[1])
    dweight[-1:] = 0
    return grad @ weight, dweight, None if bias is None else rows.sum(0)


def counting_what_is_not_there(x, y):
    """As a kernel that takes another way where what it counted on was not written, the largest number among it."""
    counts = torch.empty(1, dtype=torch.int32)
    return x + y if counts.item() > 256 else x.clone()


def unaligned_off_by_one(x, y):
    return (x, y) if x.data_ptr() % 16 == 0 else (x.roll(1), y)


WRONG = {
    # fault: (operator, forward, backward), where the harness must see it
    "off-by-one mask": (axpy_with("off-by-one mask"), dict(direction="forward", variant="plain", case="33")),
    "dropped scale": (axpy_with("dropped scale"), dict(direction="forward", variant="plain", case="33")),
    "unwritten tail": (axpy_with("unwritten tail"), dict(direction="forward", variant="plain", case="4x1025")),
    "swallowed NaN": (axpy_with("swallowed NaN"), dict(direction="forward", variant="nan", case="33")),
    "NaN loses to a number": (axpy_with("NaN loses to a number"), dict(direction="forward", variant="nan", case="33")),
    "unaligned": (axpy_with(before=unaligned_off_by_one), dict(direction="forward", variant="offset", case="33")),
    "unscaled gradient": (
        axpy_with(backward=lambda grad: (grad, grad)),
        dict(direction="backward", variant="plain", case="33"),
    ),
    "narrow sum": (rms_norm_with(narrow=True), dict(direction="forward", dtype="float16", case="5x1000")),
    "missing term": (softmax_with("missing term"), dict(direction="gradcheck", variant="plain", case="3x33x-1")),
    "overflow": (softmax_with("overflow"), dict(direction="forward", variant="large", case="3x33x-1")),
    "non-contiguous": (softmax_with("non-contiguous"), dict(direction="forward", variant="transposed", case="3x33x-1")),
    "wrong dtype": (softmax_with("wrong dtype"), dict(direction="forward", dtype="float16", case="3x33x-1")),
    "wrong shape": (softmax_with("wrong shape"), dict(direction="forward", case="1x1x-1")),
    "exception": (softmax_with("exception"), dict(direction="forward", case="3x33x-1")),
    "random": (softmax_with("random"), dict(direction="forward", variant="plain", dtype="float32", case="5x1000x-1")),
    "beyond the end": (axpy_with("beyond the end"), dict(direction="forward", variant="plain", case="33")),
    "reads beyond the end": (
        axpy_with("reads beyond the end"),
        dict(direction="forward", variant="plain", case="33"),
    ),
    "reads beyond a copy": (
        axpy_with("reads beyond the end"),
        dict(direction="forward", variant="strided", case="33"),
    ),
    "wraps around": (axpy_with("wraps around"), dict(direction="forward", variant="plain", case="33")),
    "into an input": (softmax_with("into an input"), dict(direction="forward", variant="plain", case="3x33x-1")),
    "into what arrives": (softmax_with("into what arrives"), dict(direction="backward", variant="plain", case="3x33x-1")),
    "another's stride": (softmax_with("another's stride"), dict(direction="backward", variant="padded", case="3x33x-1")),
    "other strides": (softmax_with("other strides"), dict(direction="forward", variant="plain", case="3x33x-1")),
    "reads what is not there": (
        (ops.add, counting_what_is_not_there, None),
        dict(direction="forward", variant="plain", dtype="float32", case="33"),
    ),
    "spoilt workspace": (axpy_with(before=counting_and_leaving_it), dict(direction="forward", variant="plain", case="33")),
    "lost row": ((ops.linear, torch.nn.functional.linear, linear_losing_a_row), dict(direction="backward", case="5x17x33")),
}  # fmt: skip
MESSAGES = {
    "unwritten tail": "elements are NaN in one of kernel and definition only",
    "swallowed NaN": "elements are NaN in one of kernel and definition only",
    "NaN loses to a number": "elements are NaN in one of kernel and definition only",
    "overflow": "elements are NaN in one of kernel and definition only",
    "beyond the end": "it writes before or beyond the memory that it allocated",
    "reads beyond the end": "it reads before or beyond a tensor",
    "reads beyond a copy": "it reads before or beyond a tensor",
    "into an input": "it writes into x, which is only to be read",
    "into what arrives": "it writes into a gradient that arrives",
    "other strides": r"strides \(1, 3\), neither contiguous nor the definition's \(33, 1\)",
    "lost row": "gradient of weight: ",
    "unscaled gradient": "gradient of x: ",
    "wrong dtype": "dtype torch.float32 instead of torch.float16",
    "wrong shape": r"shape \(1,\) instead of \(1, 1\)",
    "exception": "ZeroDivisionError: division by zero",
    "reads what is not there": "call 2 on the same arguments differs",
    "random": "call 2 on the same arguments differs from the first",
    "spoilt workspace": "it leaves other than zeros in the workspace of planted",
}
NOT_CONTIGUOUS = ("padded", "ragged", "strided", "transposed", "expanded")
# Faults that show themselves only where they should: the rest of the proofs stands.
ELSEWHERE_RIGHT = {
    "swallowed NaN": lambda p: p.variant == "nan",
    "NaN loses to a number": lambda p: p.variant == "nan",
    "unaligned": lambda p: p.variant == "offset",
    "unscaled gradient": lambda p: p.direction != "forward",
    "narrow sum": lambda p: p.dtype == "float16",
    "missing term": lambda p: p.direction != "forward",
    "overflow": lambda p: p.variant == "large",
    "non-contiguous": lambda p: p.variant in NOT_CONTIGUOUS,
    "wrong dtype": lambda p: p.dtype == "float16",
    "another's stride": lambda p: p.direction == "backward" and p.variant in NOT_CONTIGUOUS,
    "wrong shape": lambda p: p.case.startswith("1x1"),
    "lost row": lambda p: p.direction != "forward",
}


A_FEW_CASES = ("33", "0", "3x33", "5x1000", "3x33x-1", "0x16x-1")


def plant(fault_or_right, **options):
    described, forward, backward = fault_or_right
    contract.implements(described, backend="planted", backward=backward, **options)(forward)
    return described


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("fault", WRONG)
def test_the_harness_catches(fault, recwarn):
    planted, where = WRONG[fault]
    refuted = wrong(proofs_of(plant(planted), "planted", {where["case"], *A_FEW_CASES}))
    seen = [p for p in refuted if all(getattr(p, field) == value for field, value in where.items())]
    assert seen, f"caught only {refuted[:3]}"
    assert all(p.message for p in refuted)
    if fault in MESSAGES:
        assert any(re.search(MESSAGES[fault], p.message) for p in seen), seen
    if fault in ELSEWHERE_RIGHT:
        assert not [p for p in refuted if not ELSEWHERE_RIGHT[fault](p)]


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("right", [axpy_with(), rms_norm_with(narrow=False), softmax_with()], ids=lambda r: r[0].name)
def test_the_harness_accepts_a_right_kernel_from_outside(right):
    proofs = proofs_of(plant(right), "planted", A_FEW_CASES)
    assert not wrong(proofs)
    assert {"forward", "backward"} <= {p.direction for p in proofs if p.ok} or right[2] is None


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("reads", [True, False])
def test_a_result_of_zeros_alone_proves_nothing(reads):
    """A kernel that reads nothing would pass."""
    forward = torch.relu if reads else torch.zeros_like
    contract.implements(ops.relu, backend="planted", backward=lambda grad, out: grad.masked_fill(out <= 0, 0))(forward)
    claim = next(
        claim
        for claim in claims([ops.relu], CPU, only={"relu": "planted"}, dtypes=[torch.float32])
        if (claim.variant, claim.direction) == ("plain", "forward") and claim.case.kind == "check"
    )
    below_zero = Claim(**vars(claim) | dict(case=replace(claim.case, build=lambda make: {"x": -torch.rand(5) - 1})))
    assert prove(claim).ok is reads
    assert prove(below_zero).ok is None
    assert "says nothing" in prove(below_zero).message


@pytest.mark.usefixtures("outside")
def test_other_bits_in_every_run_are_accepted_of_what_promises_none():
    random = plant(WRONG["random"][0], deterministic=False)
    assert not [p for p in wrong(proofs_of(random, "planted", A_FEW_CASES)) if "call 2" in p.message]


@pytest.mark.usefixtures("outside")
def test_a_call_that_reads_the_memory_of_an_earlier_one_is_caught(monkeypatch):
    """On a GPU, the third call of a signature is the first that a repetition may answer."""
    (claim,) = (
        claim
        for claim in claims([plant(stale_from_the_third_call())], CPU, only={"add": "planted"}, dtypes=[torch.float32])
        if (claim.case.name, claim.variant, claim.direction) == ("33", "plain", "forward")
    )
    assert claim.calls == 2
    assert Claim(**vars(claim) | dict(device=torch.device("cuda"))).calls > 3
    monkeypatch.setattr(Claim, "calls", 4)
    assert prove(claim).message == "out: call 3 on the same arguments differs from the first"


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("factor", [1, 2])
def test_a_backward_that_gets_no_extras_is_proved_too(factor):
    """In every call that is made as a user would, the extras hide it."""
    extras = contract.Extras(
        lambda x: (x.relu(), x <= 0), lambda grad, off: grad.masked_fill(off, 0), when=lambda x: True
    )
    contract.implements(
        ops.relu, backend="handing", backward=lambda grad, out: factor * grad.masked_fill(out <= 0, 0), extras=extras
    )(torch.relu)
    refuted = wrong(proofs_of(ops.relu, "handing", ["33"]))
    assert {proof.variant for proof in refuted} == ({WITHOUT_EXTRAS} if factor > 1 else set())


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("factor", [1, 1.5])
def test_a_forward_that_hands_something_on_is_proved_too(factor):
    """Its gradients are right, and so is the other forward; what it returns is not."""
    extras = contract.Extras(
        lambda x: (factor * x.relu(), x <= 0), lambda grad, off: grad.masked_fill(off, 0), when=lambda x: True
    )
    contract.implements(
        ops.relu, backend="handing", backward=lambda grad, out: grad.masked_fill(out <= 0, 0), extras=extras
    )(torch.relu)
    refuted = wrong(proofs_of(ops.relu, "handing", {"33"}))
    assert bool(refuted) == (factor > 1)
    assert {proof.direction for proof in refuted} <= {"backward", "gradcheck"}
    assert all(WITHOUT_EXTRAS not in proof.variant for proof in refuted)
    judged = [proof for proof in refuted if proof.direction == "backward"]
    assert all(proof.message.startswith("out where a gradient is wanted: ") for proof in judged)
    assert {"plain", "transposed", "large"} <= {proof.variant for proof in judged} or factor == 1


def test_guards_of_bools_are_compared_as_they_lie():
    """An uninitialised bool is any byte, and a copy of it may be another that is as true."""
    guarded = memory_guards.GuardedMemory()
    with guarded:
        for _ in range(50):
            dirty = torch.randint(2, 256, (4096,), dtype=torch.uint8)
            del dirty
            torch.zeros(4, 12, dtype=torch.bool).clone()
    guarded.check()
