"""What an operator is, what an implementation of it promises, and the machinery that turns both into a fast call."""

from tilestack.contract.backends import BackendError, backend, configure_backend, register_backend
from tilestack.contract.cases import Case
from tilestack.contract.implementation import AUTOGRAD, Ahead, Implementation, Keeping
from tilestack.contract.operator import Cost, Operator, implements, operator
from tilestack.contract.registry import operator_named, operators

__all__ = [
    "AUTOGRAD",
    "Ahead",
    "BackendError",
    "Case",
    "Cost",
    "Implementation",
    "Keeping",
    "Operator",
    "backend",
    "configure_backend",
    "implements",
    "operator",
    "operator_named",
    "operators",
    "register_backend",
]
