"""What an operator is, what an implementation of it promises, and the machinery that turns both into a fast call.

    what people write     operator.py, implementation.py, cases.py, labels.py (a case in words), named.py
    who runs a call       backends.py (the choices), registry.py (the rule), recompute.py (checkpointing keeps a choice)
    how it runs           call.py (signature), plan.py (its plan), into.py (out=), autograd.py (gradients), library.py (compiled)
    how kernels run       launch.py (a launch), descriptors.py (TMA), workspace.py (counters and partial sums),
                          repeat.py (the same call again)
    the code they write   source.py

docs/a-call.md walks one call through these files.
"""

from tilestack.contract.backends import (
    BackendError,
    backend,
    batch_invariant,
    check_values,
    configure_backend,
    register_backend,
)
from tilestack.contract.cases import Case
from tilestack.contract.implementation import AUTOGRAD, Extras, Implementation, implements
from tilestack.contract.operator import Cost, Operator, operator
from tilestack.contract.recompute import keep_choices
from tilestack.contract.registry import operator_named, operators
from tilestack.contract.source import source_of

__all__ = [
    "AUTOGRAD",
    "BackendError",
    "Case",
    "Cost",
    "Extras",
    "Implementation",
    "Operator",
    "backend",
    "batch_invariant",
    "check_values",
    "configure_backend",
    "implements",
    "operator",
    "operator_named",
    "operators",
    "register_backend",
    "source_of",
]

keep_choices()
