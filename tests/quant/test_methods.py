"""The methods that choose codes, against their mathematics: GPTQ against the update it is derived from, and all on inputs
that are dead, constant or alone in their group."""

import dataclasses

import pytest
import torch

from tilestack.ops import linear_weight_only
from tilestack.quant import SCHEMES, Codes, Scheme
from tilestack.quant.awq import awq_scale, output_error
from tilestack.quant.clipping import clipped_grid, group_errors
from tilestack.quant.gptq import gptq
from tilestack.quant.grid import grid_of
from tilestack.quant.methods import METHODS, default_method, refuse_method
from tilestack.quant.smooth import smooth_scale
from tilestack.quant.statistics import InputStatistics, scaled_statistics, shrunk

INTEGERS = [
    Scheme("int4", group=32),
    Scheme("int4", group=32, symmetric=False),
    Scheme("int8"),
    Scheme("int8", group=16, symmetric=False),
]
EVERY = [*INTEGERS, Scheme("fp8")]
NAMED = dict(ids=lambda scheme: f"{scheme.weights}-{scheme.group}-{'s' if scheme.symmetric else 'a'}")


def numbers_of(codes: Codes, inner: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The weight that codes stand for, by the operator that reads them."""
    scale = codes.scale.to(dtype)
    return linear_weight_only(torch.eye(inner, dtype=dtype), codes.codes, scale, codes.zero).T


def correlated(tokens: int, inner: int) -> torch.Tensor:
    """Inputs with a few directions that are much larger than the others, as hidden states have."""
    few = torch.randn(tokens, 6, dtype=torch.float64) @ torch.randn(6, inner, dtype=torch.float64)
    return few + 0.1 * torch.randn(tokens, inner, dtype=torch.float64)


def moments_of(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.T @ inputs / len(inputs)


def textbook_gptq(weight, moments, grid, damping):
    """The update as it is derived, with a new inverse of what is left of H for each column; no factor and no blocks."""
    weight, inner = weight.clone(), weight.shape[1]
    damped = moments + damping * moments.diagonal().mean() * torch.eye(inner, dtype=torch.float64)
    free = sorted(range(inner), key=lambda column: -float(moments[column, column]))
    while free:
        inverse = torch.linalg.inv(damped[free][:, free])
        column = free[0]
        rounded = grid.nearest_in_column(weight[:, column], column, inner)
        error = (weight[:, column] - rounded) / inverse[0, 0]
        for place, other in enumerate(free[1:], 1):
            weight[:, other] -= error * inverse[0, place]
        weight[:, column] = rounded
        free = free[1:]
    return weight


@pytest.mark.parametrize("damping", [0.01, 0.3])
@pytest.mark.parametrize("scheme", INTEGERS, **NAMED)
def test_gptq_is_its_derivation_whatever_the_block(scheme, damping):
    weight, inputs = torch.randn(7, 96, dtype=torch.float64), correlated(200, 96)
    inputs[:, 40:60] = 0  # of which the mean of the diagonal is less
    moments = moments_of(inputs)
    grid = clipped_grid(weight, scheme, moments.diagonal())
    expected = textbook_gptq(weight, moments, grid, damping)
    for block in (96, 40, 1):
        found = numbers_of(gptq(weight, moments, scheme, damping=damping, block=block), 96)
        assert torch.allclose(found, expected, rtol=0, atol=1e-9)
    assert not torch.allclose(expected, grid.nearest(weight))


@pytest.mark.parametrize("scheme", EVERY, **NAMED)
def test_gptq_of_inputs_that_do_not_go_together_rounds_to_nearest(scheme):
    weight = torch.randn(5, 64)
    codes = gptq(weight, torch.eye(64), scheme)
    expected = clipped_grid(weight, scheme, torch.ones(64)).encode(weight)
    assert torch.equal(codes.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(codes.scale, expected.scale)


@pytest.mark.parametrize("scheme", EVERY, **NAMED)
def test_every_method_is_better_than_nearest_at_what_it_minimises(scheme):
    weight, moments = torch.randn(24, 128), moments_of(correlated(400, 128)).float()
    weight[:, ::32] *= 4  # what stretches grids
    error = lambda codes: output_error(numbers_of(codes, 128, torch.float32) - weight, moments)
    nearest, clipped = (error(METHODS[m].round(weight, moments.diagonal(), scheme)) for m in ("nearest", "clip"))
    by_gptq = error(gptq(weight, moments, scheme))
    assert by_gptq < 0.7 * nearest
    assert by_gptq < clipped
    scale = awq_scale(weight, moments, scheme)
    scaled = weight * scale
    assert output_error(grid_of(scaled, scheme).nearest(scaled) / scale - weight, moments) <= nearest * 1.0001


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_grid_that_reaches_half_as_far_has_steps_half_as_large(weights, symmetric):
    scheme, weight = Scheme(weights, symmetric=symmetric), torch.linspace(-1, 2, 64)[None]
    whole, half = (grid_of(weight, scheme, reach) for reach in (1.0, 0.5))
    assert torch.equal(half.scale, whole.scale / 2)
    inside = (weight >= -0.5) & (weight <= 1)
    errors = (half.nearest(weight) - weight).abs()
    assert errors[inside].max() <= half.scale
    assert errors.max() > 4 * half.scale, "what lies outside is clipped"


@pytest.mark.parametrize("scheme", EVERY, **NAMED)
def test_clipping_is_the_best_of_its_reaches_in_every_group(scheme):
    weight, squares = torch.randn(6, 64), torch.rand(64)
    weight[:, 3], squares[3] = 8.0, 0.0  # far out, and never met: not worth a step
    found = group_errors(clipped_grid(weight, scheme, squares), weight, squares)
    tried = torch.stack([group_errors(grid_of(weight, scheme, 1 - 0.025 * n), weight, squares) for n in range(21)])
    assert torch.equal(found, tried.amin(0))
    if scheme.weights != "fp8":
        assert (found < tried[0]).any()
    assert not torch.equal(
        clipped_grid(weight, scheme, squares).scale, clipped_grid(weight, scheme, squares.flip(0)).scale
    )


@pytest.mark.parametrize("scheme", EVERY, **NAMED)
def test_a_grid_encodes_as_the_scheme_rounds(scheme):
    weight = torch.randn(9, 64).to(torch.bfloat16)
    mine, theirs = grid_of(weight, scheme).encode(weight), scheme.round_to_nearest(weight)
    assert torch.equal(mine.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    assert torch.equal(mine.scale, theirs.scale)
    assert (mine.zero is None) == (theirs.zero is None)
    assert mine.zero is None or torch.equal(mine.zero, theirs.zero)
    assert torch.equal(numbers_of(mine, 64, torch.float32), grid_of(weight, scheme).nearest(weight))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scheme", [*EVERY, Scheme("int8", group=1)], **NAMED)
def test_dead_inputs_and_constant_weights_stay_finite_and_near(scheme, method):
    weight, inputs = torch.randn(8, 64), correlated(100, 64).float()
    inputs[:, 10:20] = 0
    weight[2], weight[3], weight[:, 5] = 0.0, 0.25, 0.0
    way = METHODS[method]
    statistics = InputStatistics(way.statistics or "largest")
    statistics.add(inputs)
    found, scale = statistics.result("layer"), torch.ones(64)
    if way.scale:
        scale = way.scale(weight, found, scheme, lambda squares: squares)
        found = found / scale if found.ndim == 1 else found / torch.outer(scale, scale)
    codes = way.round(weight * scale, found, scheme)
    assert torch.isfinite(codes.scale).all()
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    numbers = numbers_of(codes, 64, torch.float32) / scale
    assert torch.isfinite(numbers).all()
    assert torch.equal(numbers[2], torch.zeros(64))
    if method == "gptq":  # what no input ever met is rounded to nearest, and makes up for nothing
        expected = clipped_grid(weight, scheme, found.diagonal()).nearest(weight)
        assert torch.equal(numbers[:, 10:20], expected[:, 10:20])


def test_all_inputs_dead_rounds_to_nearest():
    weight, scheme = torch.randn(4, 64), SCHEMES["w4a16"]
    nothing = torch.zeros(64, 64)
    assert torch.equal(
        gptq(weight, nothing, scheme).codes, clipped_grid(weight, scheme, nothing[0]).encode(weight).codes
    )
    assert torch.equal(awq_scale(weight, nothing, scheme), torch.ones(64))
    assert torch.equal(smooth_scale(weight, nothing[0]), torch.ones(64))


def test_smooth_scales_make_inputs_and_weights_equally_large():
    weight, largest = torch.randn(16, 32, dtype=torch.float64), torch.rand(32, dtype=torch.float64) * 100 + 1
    scale = smooth_scale(weight, largest)
    assert torch.allclose(largest / scale, (weight * scale).abs().amax(0))
    assert torch.allclose(smooth_scale(weight, largest, alpha=1.0), largest)


def test_awq_scales_follow_inputs_that_must_share_one():
    weight, inputs = torch.randn(16, 64), torch.randn(200, 64)
    inputs[:, 7] *= 50
    moments = moments_of(inputs)
    scale = awq_scale(weight, moments, Scheme("int4", group=32))
    assert scale.argmax() == 7
    assert scale.max() / scale.median() > 2
    shared = awq_scale(
        weight,
        moments,
        Scheme("int4", group=32),
        lambda squares: squares.view(2, 32).mean(0).repeat(2),
    )
    assert torch.equal(shared[:32], shared[32:])
    assert shared[7] == shared.max()


@pytest.mark.parametrize("seed", range(4))
def test_awq_scales_are_the_best_powers_of_the_root_mean_squares(seed):
    torch.manual_seed(seed)
    scheme, weight = Scheme("int4", group=32), torch.randn(8, 64, dtype=torch.float64)
    moments = moments_of(correlated(200, 64) * torch.rand(64, dtype=torch.float64).mul(3).exp())
    tried = [moments.diagonal().sqrt() ** (step / 20) for step in range(21)]
    tried = [scale / (scale.max() * scale.min()).sqrt() for scale in tried]
    errors = [output_error(weight - grid_of(weight * s, scheme).nearest(weight * s) / s, moments) for s in tried]
    assert torch.allclose(awq_scale(weight, moments, scheme), tried[errors.index(min(errors))])


@pytest.mark.parametrize("scheme", INTEGERS[:2], **NAMED)
def test_after_awq_grids_reach_as_far_as_is_best_for_what_is_read(scheme):
    """As those of clip do, whose inputs do not count alike either."""
    weight, moments = torch.randn(24, 64), moments_of(correlated(200, 64)).float()
    weight[:, ::16] *= 4
    alike, best = (clipped_grid(weight, scheme, squares) for squares in (None, moments.diagonal()))
    assert not torch.equal(alike.scale, best.scale)
    for method, told in (("awq", moments), ("clip", moments.diagonal())):
        assert torch.equal(METHODS[method].round(weight, told, scheme).scale, best.scale)


def test_what_is_known_of_inputs_is_divided_with_them():
    inputs, scale = torch.randn(50, 6, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.5
    largest = lambda x: x.abs().amax(0)
    for of in (largest, moments_of):
        assert torch.allclose(scaled_statistics(of(inputs), scale), of(inputs / scale))


@pytest.mark.parametrize("rows", [4, 60])
def test_moments_of_few_rows_are_believed_as_far_as_these_go(rows):
    moments = moments_of(torch.randn(rows, 12, dtype=torch.float64))
    found = shrunk(moments, rows)
    assert torch.equal(found.diagonal(), moments.diagonal())
    others = ~torch.eye(12, dtype=torch.bool)
    assert torch.allclose(found[others], moments[others] * rows / (rows + 12))
    assert torch.equal(shrunk(moments[0], rows), moments[0])


@pytest.mark.parametrize("kind", ["largest", "squares", "moments"])
def test_statistics_are_of_all_rows_whatever_the_batches(kind):
    inputs = torch.randn(60, 5)
    whole, parts = InputStatistics(kind), InputStatistics(kind)
    whole.add(inputs)
    for part in inputs.flip(0).view(4, 3, 5, 5):
        parts.add(part)
    expected = dict(largest=inputs.abs().amax(0), squares=(inputs**2).mean(0), moments=inputs.T @ inputs / 60)[kind]
    assert torch.allclose(whole.result("x").float(), expected, atol=1e-5)
    assert torch.allclose(parts.result("x"), whole.result("x"), rtol=1e-5, atol=1e-6)


def test_statistics_that_say_nothing_are_refused():
    nothing, infinite = InputStatistics("moments"), InputStatistics("squares")
    with pytest.raises(ValueError, match=r"layers.1.mlp.down saw no input"):
        nothing.result("layers.1.mlp.down")
    infinite.add(torch.tensor([[1.0, torch.inf]]))
    with pytest.raises(ValueError, match=r"inputs of layers.1.mlp.down are not finite"):
        infinite.result("layers.1.mlp.down")


def test_singular_moments_are_damped_until_they_can_be_inverted():
    weight, one = torch.randn(4, 64, dtype=torch.float64), torch.randn(1, 64, dtype=torch.float64)
    codes = gptq(weight, 1e20 * one.T @ one, Scheme("int8"), damping=0.0)
    assert torch.isfinite(codes.scale).all()
    assert (numbers_of(codes, 64) - weight).abs().max() < 1


def test_methods_are_refused_where_they_do_nothing():
    assert {name: default_method(scheme) for name, scheme in SCHEMES.items()} == dict(
        fp8="nearest", w8a8="smooth", w8a16="nearest", w4a16="gptq"
    )
    with pytest.raises(ValueError, match="no method 'best'; choose from nearest, clip"):
        refuse_method("best", SCHEMES["fp8"])
    with pytest.raises(ValueError, match="blocks of fp8 are rounded to nearest"):
        refuse_method("gptq", Scheme("fp8", group=128, blocks=True))
    with pytest.raises(ValueError, match="smooth is for schemes whose inputs become codes"):
        refuse_method("smooth", dataclasses.replace(SCHEMES["w8a8"], activations=None))


def test_what_is_no_second_moment_is_refused():
    with pytest.raises(ValueError, match="these are no second moments"):
        gptq(torch.randn(4, 32), torch.full((32, 32), torch.nan), Scheme("int8"))
