"""tilestack: an LLM stack built tile by tile. Definitions in plain PyTorch, kernels that replace them, proof and figures for both."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilestack import contract, data, engine, models, nn, ops, optim, train
    from tilestack.contract import BackendError, backend, batch_invariant, configure_backend, implements, operator
    from tilestack.engine import LLM, SamplingParams
    from tilestack.nn.patch import patch, unpatch

__version__ = "0.1.0"
__all__ = [
    "LLM", "BackendError", "SamplingParams", "backend", "batch_invariant", "configure_backend", "contract", "data", "engine", "implements", "models", "nn", "operator", "ops",
    "optim", "patch", "train", "unpatch",
]  # fmt: skip

# Where each name lives. All of them load when first used, so that the command line answers `--help` without PyTorch.
_HOMES = {
    "LLM": "tilestack.engine",
    "BackendError": "tilestack.contract",
    "SamplingParams": "tilestack.engine",
    "backend": "tilestack.contract",
    "batch_invariant": "tilestack.contract",
    "configure_backend": "tilestack.contract",
    "implements": "tilestack.contract",
    "operator": "tilestack.contract",
    "patch": "tilestack.nn.patch",
    "unpatch": "tilestack.nn.patch",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tilestack' has no attribute {name!r}")
    home = importlib.import_module(_HOMES.get(name, f"tilestack.{name}"))
    globals()[name] = getattr(home, name) if name in _HOMES else home
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
