"""GradScaler's contract, clipping by the global norm, and the tables behind the launches."""

import pytest
import torch

from tilestack import optim
from tilestack.optim.multi_tensor import KeptTables

MAKERS = [
    lambda params: optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3),
    lambda params: optim.AdamW(params, amsgrad=True),
    lambda params: optim.AdamW8bit(params, min_8bit_size=64),
]


def snapshot(params, optimizer):
    states = [value.clone() for p in params for value in optimizer.state[p].values()]
    return [p.detach().clone() for p in params] + states


@pytest.mark.parametrize("make", MAKERS)
def test_a_found_infinity_skips_the_step_entirely(path, run, make):
    params, optimizer = run(make, torch.float32, 1, small=True)
    before = snapshot(params, optimizer)
    for param in params:
        param.grad = torch.full_like(param, torch.inf)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(4.0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(params, optimizer), strict=True))


def test_a_skipped_first_step_leaves_momentum_to_the_next(path):
    results = []
    for skip_first in (True, False):
        weight = torch.nn.Parameter(torch.ones(5))
        optimizer = optim.SGD([weight], lr=0.1, momentum=0.9, dampening=0.3)
        for skip in (True, False, False)[0 if skip_first else 1 :]:
            weight.grad = torch.full((5,), torch.nan if skip else 1.0)
            optimizer.found_inf = torch.tensor(float(skip))
            optimizer.step()
        results.append(weight.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("make", MAKERS)
def test_a_loss_scale_is_taken_out_of_the_gradients(path, run, make):
    params, plain = run(make, torch.float32, 0, small=True)
    twins, scaled = run(make, torch.float32, 0, small=True)
    for a, b in zip(params, twins, strict=True):
        a.grad = torch.ones_like(a) / 3
        b.grad = a.grad * 1024
    plain.step()
    scaled.grad_scale, scaled.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    scaled.step()
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


def test_gradscaler_drives_a_step(path):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([weight], lr=0.1, weight_decay=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor, expected in ((torch.inf, 1.0), (1.0, 0.9)):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(weight.detach(), torch.full((3,), expected))
    assert scaler.get_scale() == 4.0  # halved once


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_clipping_is_torchs(path, awkward, dtype, max_norm):
    ours, theirs = awkward(dtype), awkward(dtype)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if number != 3:
            a.grad, b.grad = a.detach().clone(), b.detach().clone()
    ours[5].grad = torch.empty(10, 6, dtype=dtype)[::2, ::2].copy_(ours[5].detach())  # a gradient with gaps
    norm = optim.clip_grad_norm_(ours, max_norm)
    truth = torch.cat([b.grad.double().flatten() for b in theirs if b.grad is not None]).norm()
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert (norm.shape, norm.dtype) == ((), torch.promote_types(dtype, torch.float32))
    # 2048 squares and their root, in at least float32
    assert abs(norm - truth) <= 16 * torch.finfo(norm.dtype).eps * truth
    assert abs(expected - truth) <= 16 * torch.finfo(dtype).eps * truth
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert bool(((a.grad - b.grad).abs() <= 4 * torch.finfo(dtype).eps * b.grad.abs()).all())


def test_clipping_other_norms_empty_lists_and_nonfinite_gradients(path):
    weight = torch.nn.Parameter(torch.ones(3))
    assert float(optim.clip_grad_norm_([weight], 1.0)) == 0
    weight.grad = torch.tensor([1.0, -4.0, 2.0])
    assert float(optim.clip_grad_norm_(weight, 2.0, norm_type=torch.inf)) == 4
    assert weight.grad.tolist() == pytest.approx([0.5, -2.0, 1.0])
    weight.grad[0] = torch.inf
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        optim.clip_grad_norm_(weight, 1.0, error_if_nonfinite=True)
    assert float(optim.clip_grad_norm_(weight, 1.0)) == torch.inf


@pytest.mark.parametrize("scale", [None, 64.0])
def test_clipping_inside_the_step_equals_clipping_before(path, awkward, scale):
    ours, theirs = awkward(torch.float64), awkward(torch.float64)
    clipping, plain = optim.AdamW(ours, clip_norm=0.5), torch.optim.AdamW(theirs)
    for a, b in zip(ours, theirs, strict=True):
        a.grad, b.grad = a.detach() * (scale or 1), b.detach().clone()
    if scale:
        clipping.grad_scale = torch.tensor(scale)
    kept = [a.grad.clone() for a in ours]
    clipping.step()
    norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    plain.step()
    torch.testing.assert_close(clipping.grad_norm, norm, rtol=1e-13, atol=0)
    for a, b, grad in zip(ours, theirs, kept, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
        assert torch.equal(a.grad, grad)


def test_the_norm_is_the_same_bits_in_every_run(path, awkward):
    params = awkward(torch.float32)
    for param in params:
        param.grad = param.detach().clone()
    assert len({float(optim.clip_grad_norm_(params, 1e9)) for _ in range(3)}) == 1


def test_tables_that_are_kept_follow_new_gradients_and_clip_alike(path, awkward):
    """As a loop does that clips in every step: the same tables, other gradients in other memory."""
    tables, held = KeptTables("the test"), []
    for step in range(3):
        kept, fresh = awkward(torch.float32), awkward(torch.float32)
        for params in (kept, fresh):
            for param in params:
                param.grad = param.detach() * (step + 1)
        assert torch.equal(optim.clip_grad_norm_(kept, 0.5, tables=tables), optim.clip_grad_norm_(fresh, 0.5))
        for a, b in zip(kept, fresh, strict=True):
            assert torch.equal(a.grad, b.grad)
        held.append([*tables.kept.values()])
    assert held[0] == held[1] == held[2]  # the very same


def test_a_table_is_copied_only_where_it_changed():
    multi_tensor = pytest.importorskip("tilestack.kernels.optim.multi_tensor")
    first, second = [torch.zeros(5), torch.zeros(0)], [torch.ones(5), torch.ones(0)]
    table = multi_tensor.Table([5, 0], 2, 4, torch.device("cpu"))
    table.point(first, second)
    assert table.blocks.tolist() == [[0, 0], [0, 1]]
    assert table.entries.tolist() == [[5, 0], *([t.data_ptr() for t in row] for row in (first, second))]
    table.entries[1:] = -1
    moved = [torch.ones(5), torch.ones(0)]
    table.point(first, moved)
    assert table.entries.tolist()[1:] == [[-1, -1], [t.data_ptr() for t in moved]]
    assert table.names(first, moved)
    assert not table.names(first, second)
