"""Cases that are too large for the interpreter are claimed where there is a GPU, and there like any other."""

import torch

from tilestack.contract import operator
from tilestack.contract.cases import cases
from tilestack.lab.verify import claims


def claimed(operators, device, **options):
    found = claims(operators, torch.device(device), dtypes=[torch.float32], **options)
    return {(claim.case.name, claim.variant) for claim in found}


def test_a_gpus_cases_are_claimed_there_alone_and_in_every_variant(outside):
    build = lambda make, *shape: dict(x=make.normal(*shape))

    @operator(cases=cases(build, check=[(3,)], gpu=[(5,)], bench=[(7,)]))
    def tripled(x: torch.Tensor) -> torch.Tensor:
        """3 x."""
        return 3 * x

    assert {name for name, _ in claimed([tripled], "cpu")} == {"3"}
    on_gpu = claimed([tripled], "cuda")
    variants = [{variant for name, variant in on_gpu if name == case} for case in ("3", "5")]
    assert variants[0] == variants[1] >= {"plain", "large", "strided"}
    assert {name for name, _ in claimed([tripled], "cuda", kinds=("bench",))} == {"7"}
