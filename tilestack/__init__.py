"""tilestack: an LLM stack built tile by tile. Definitions in plain PyTorch, kernels that replace them, proof and figures for both."""

import importlib
from typing import Any

from tilestack.contract import BackendError, backend, batch_invariant, configure_backend, implements, operator

__version__ = "0.1.0"
__all__ = [
    "BackendError",
    "backend",
    "batch_invariant",
    "configure_backend",
    "contract",
    "implements",
    "nn",
    "operator",
    "ops",
    "patch",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    # The layers above the operators load when first used, so that `import tilestack` stays light.
    if name in ("contract", "nn", "ops"):
        return importlib.import_module(f"tilestack.{name}")
    if name in ("patch", "unpatch"):
        return getattr(importlib.import_module("tilestack.nn.patch"), name)
    raise AttributeError(f"module 'tilestack' has no attribute {name!r}")
