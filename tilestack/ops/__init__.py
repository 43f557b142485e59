"""What each operator is. Call them as functions; choose their backend with `tilestack.backend`.

A file here is a family of operators, and every operator defined in one is found: `__init__.pyi` lists them for people
and type checkers, and `make docs` writes it.
"""

import difflib
import gc
import importlib
import pkgutil

from tilestack.contract import Operator
from tilestack.contract.registry import operator_named, operators

__all__ = ["operator_named", "operators"]

_collected = gc.isenabled()
gc.disable()  # declaring makes many objects and no garbage, and a collection walks all of PyTorch's
for _family in pkgutil.iter_modules(__path__):
    _found = vars(importlib.import_module(f"{__name__}.{_family.name}")).values()
    for _operator in [value for value in _found if isinstance(value, Operator)]:
        globals()[_operator.name] = _operator
        __all__.append(_operator.name)
if _collected:
    gc.enable()

__all__ = sorted(set(__all__))


def __getattr__(name: str) -> Operator:
    """For a name that is none, an error that knows what was meant."""
    close = difflib.get_close_matches(name, __all__, n=1)
    raise AttributeError(f"tilestack.ops has no {name}" + (f"; did you mean {close[0]}?" if close else ""))
