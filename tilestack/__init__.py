"""tilestack: an LLM stack built tile by tile. Definitions in plain PyTorch, kernels that replace them, proof and figures for both."""

import importlib
from typing import Any

from tilestack.contract.backends import BackendError, backend, configure_backend
from tilestack.contract.operator import implements, operator

__version__ = "0.1.0"
__all__ = ["BackendError", "backend", "configure_backend", "implements", "nn", "operator", "ops", "patch", "unpatch"]


def __getattr__(name: str) -> Any:
    # The layers above the operators load when first used, so that `import tilestack` stays light.
    if name in ("nn", "ops"):
        return importlib.import_module(f"tilestack.{name}")
    if name in ("patch", "unpatch"):
        return getattr(importlib.import_module("tilestack.nn.patch"), name)
    raise AttributeError(f"module 'tilestack' has no attribute {name!r}")
