"""Cases that are too large for the interpreter are claimed where there is a GPU, and there like any other."""

import pytest
import torch

from tilestack.contract import BackendError, implements, operator
from tilestack.contract.cases import cases
from tilestack.lab.proof.claims import chosen_backends, claims


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


def test_a_backend_of_halves_alone_can_be_named_and_one_that_takes_nothing_says_why(outside):
    @operator(cases=cases(lambda make, *shape: dict(x=make.normal(*shape)), check=[(3,)]))
    def quadrupled(x: torch.Tensor) -> torch.Tensor:
        """4 x."""
        return 4 * x

    implements(quadrupled, backend="halves", dtypes=(torch.bfloat16,))(lambda x: 4 * x)
    implements(quadrupled, backend="never", when=lambda x: "it is asleep")(lambda x: 4 * x)
    cpu = torch.device("cpu")
    assert chosen_backends([quadrupled], cpu, "halves") == dict(quadrupled="halves")
    with pytest.raises(BackendError, match="it is asleep"):
        chosen_backends([quadrupled], cpu, "never")
