"""SFT, DPO, KTO and GRPO on several processes compute, step for step, what one process does that has all examples."""

import pytest
import torch
from aligned_steps import CASES, alone, in_two_processes, reference, reference_in_two_processes
from ranks import run_ranks

from tilestack.parallel.mesh import Mesh

# What float64 may lose: a few thousand additions in another order, each off by half a unit in the last place at most.
SLACK = 2**12 * torch.finfo(torch.float64).eps
SINGLE = 2**4 * torch.finfo(torch.float32).eps  # in which figures are kept and added up


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(in_two_processes, 2, folder, folder)


@pytest.mark.parametrize("name", CASES)
def test_processes_align_as_one(ranks, name):
    expected = alone(name)
    first, second = ({what.removeprefix(f"{name}: "): x for what, x in rank.items() if what.startswith(f"{name}: ")} for rank in ranks)  # fmt: skip
    assert first.keys() == expected.keys()
    for what, x in expected.items():
        own, slack = (0, SINGLE) if what in ("figures", "evaluation") else (None, SLACK)  # each figure by itself
        error = (first[what] - x).abs().amax(own) / x.abs().amax(own).clamp(min=1e-30)
        assert (error < slack).all(), f"{what} differs by {error.tolist()}"
    for what in ("figures", "evaluation"):
        assert torch.equal(second[what], first[what])
    assert float(expected["figures"][:, 0].std()) > 1e-4  # it has learned, or there would be nothing to compare


def test_processes_share_what_the_reference_is_asked_and_all_know_it(tmp_path):
    expected = reference(Mesh(), shard=False)
    assert len(set(expected.tolist())) == 5
    for rank in run_ranks(reference_in_two_processes, 2, tmp_path):
        for found in rank.values():
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
