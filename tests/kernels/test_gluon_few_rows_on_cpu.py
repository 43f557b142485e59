"""Products of few rows for Hopper proved on a CPU, by an emulation of Gluon: tiles, parts, rings, and what is kept."""

import gluon_emulation
import pytest
import torch
from gluon_emulation import emulate

from tilestack import ops
from tilestack.contract.workspace import workspace
from tilestack.kernels.hopper import few_rows
from tilestack.kernels.hopper.few_rows import CONFIGS, Config, few_rows_product, takes
from tilestack.lab.proof.oracle import judge, own_error

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def multiprocessors(monkeypatch):
    """Kernels run in the emulation, on as many multiprocessors as a test says."""
    count = [8]
    monkeypatch.setattr(few_rows, "launch", emulate)
    monkeypatch.setattr(few_rows, "multiprocessors", lambda device: count[0])
    torch.manual_seed(0)
    return lambda number: count.__setitem__(0, number)


def check(M, N, K, config, bias=False):
    x, weight = torch.randn(M, K).half(), torch.randn(N, K).half() / K**0.5
    bias = torch.randn(N).half() if bias else None
    found = few_rows_product(x, weight.T, bias, config)
    reference = ops.linear.definition(x, weight, bias)
    truth = ops.linear.definition(x.double(), weight.double(), None if bias is None else bias.double())
    assert not (message := judge(found, reference, truth, own_error(reference, truth)).message), message
    assert not workspace("few_rows_counts", (64,), torch.int32, CPU).any()
    return found


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shape", [(1, 200, 520), (13, 136, 1048), (64, 130, 256)], ids=str)
def test_every_configuration(config, shape):
    check(*shape, CONFIGS[config])


@pytest.mark.parametrize("shape", [(3, 70, 8), (16, 8, 1000), (150, 70, 200), (300, 64, 72), (1, 1, 64)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_rows_columns_and_sums_that_end_anywhere(shape, bias):
    check(*shape, Config(128, resident=2), bias)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("config", "few"), [("64x256", 8), ("64x256", 1), ("64x128 kept", 1)])
def test_in_whatever_order_things_happen(seed, config, few, monkeypatch, multiprocessors):
    monkeypatch.setattr(
        gluon_emulation.emulate, "__kwdefaults__", gluon_emulation.emulate.__kwdefaults__ | dict(seed=seed)
    )
    monkeypatch.setattr(few_rows, "MOST_SLOTS", 2 + seed % 3)
    multiprocessors(few)
    check(20, 330, 1100, CONFIGS[config], bias=True)


def test_parts_are_added_in_their_order_whoever_comes_last(monkeypatch):
    found = []
    for seed in range(4):
        torch.manual_seed(0)
        monkeypatch.setattr(
            gluon_emulation.emulate, "__kwdefaults__", gluon_emulation.emulate.__kwdefaults__ | dict(seed=seed)
        )
        found.append(check(5, 64, 1024, Config(64, resident=1)))
    assert all(torch.equal(found[0], again) for again in found)


@pytest.mark.parametrize("M", [1, 8, 16, 40, 64, 128, 300])
@pytest.mark.parametrize("layer", [(4096, 4096), (14336, 4096), (4096, 14336), (151936, 1024), (1024, 2048), (72, 40)])
@pytest.mark.parametrize("config", CONFIGS)
def test_plans_cover_the_product_once(M, layer, config):
    (N, K), config = layer, CONFIGS[config]
    plan = config.plan(M, N, K, 132)
    assert (plan.parts - 1) * plan.steps * plan.k < K <= plan.parts * plan.steps * plan.k
    assert plan.programs <= 132 * config.resident
    assert plan.parts == 1 or plan.programs == plan.tiles * plan.parts  # a part's others do not wait for a second turn
    assert plan.slots >= (2 if plan.refills else 1)
    assert plan.refills == (plan.slots < plan.steps * -(-plan.tiles * plan.parts // plan.programs))


def test_what_is_asked_for_early_is_what_the_first_steps_read(monkeypatch):
    asked = []
    monkeypatch.setattr(
        gluon_emulation.LANGUAGE,
        "inline_asm_elementwise",
        lambda text, constraints, arguments, **_: asked.extend(
            zip(arguments[0].places.tolist(), arguments[1].tolist(), strict=True)
        ),
        raising=False,
    )
    N, K, first, k, length = 100, 72, 64, 64, 128
    weight = torch.zeros(N, K).half()
    pointer = gluon_emulation.Pointer(weight)
    gluon_emulation.emulated(few_rows.fetch_weights)(pointer, first, k, N, K, K, length, 64, 4)
    touched = torch.zeros(N, K, dtype=torch.int32)
    for place, size in asked:
        assert place * 2 % 16 == size % 16 == 0
        touched.view(-1)[place : place + size // 2] += 1
    assert (touched[first:, k:] >= 1).all()
    assert not touched[:first].any()
    assert not touched[:, :k].any()
    assert (touched[first : N - 1] <= 1).all()


@pytest.mark.parametrize(
    ("rows", "weight", "reason"),
    [
        (65, torch.empty(8, 16).half(), "1 to 64 rows"),
        (0, torch.empty(8, 16).half(), "1 to 64 rows"),
        (4, torch.empty(16, 8).half().T, "start on 16 bytes"),
        (4, torch.empty(8, 15).half(), "start on 16 bytes"),
        (4, torch.empty(0, 16).half(), "empty"),
    ],
)
def test_what_others_take(rows, weight, reason):
    assert reason in takes(torch.empty(rows, weight.shape[1]).half(), weight)
