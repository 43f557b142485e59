"""Who our kernels are measured against, found at run time.

    aten      PyTorch's own function, where it has one (registered as a backend, see kernels/aten.py)
    eager     what people write in PyTorch where it has no such function
    compile   torch.compile of the definition
    liger     Liger-Kernel, when it is importable

To add a library's function for an operator, add a line to that library's dictionary below: a function that names the
operator's arguments it wants and returns the result, or NotImplemented for arguments the library does not take. Some
libraries write gradients over their inputs; each peer has copies of its own, so that this disturbs no one else.

A folder `peers/` at the top of the checkout, if there is one, is searched for libraries that are not installed.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tilestack.contract import Operator
from tilestack.contract.named import parameters_of

FOLDER = Path(__file__).resolve().parents[2] / "peers"


class Module:
    """A module imported when an attribute of it is first wanted."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)
        return found


liger = Module("liger_kernel.ops")

# In place is Liger's default for the gradient of rms_norm; it moves the same bytes, but on the next call the arriving
# gradient would be the last result, which soon fades to zeros.
LIGER: dict[str, Callable] = {
    "rms_norm": lambda x, weight, eps: liger.LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False),
    "layer_norm": lambda x, weight, bias, eps: (
        NotImplemented if bias is None else liger.LigerLayerNormFunction.apply(x, weight, bias, eps)
    ),
    "silu_mul": lambda gate, up: liger.LigerSiLUMulFunction.apply(gate, up),
    "gelu_mul": lambda gate, up, approximate: (
        NotImplemented if approximate != "tanh" else liger.LigerGELUMulFunction.apply(gate, up)
    ),
    "swiglu": lambda x, interleaved: NotImplemented if interleaved else liger.LigerFusedGateUpSiLUMulFunction.apply(x),
    "add_rms_norm": lambda x, residual, weight, eps: (
        NotImplemented if weight is None else liger.LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps)
    ),
    "group_norm": lambda x, groups, weight, bias, eps: (
        NotImplemented if bias is None else liger.LigerGroupNormFunction.apply(x, weight, bias, x.shape[1], groups, eps)
    ),
    "softmax": lambda x, dim: NotImplemented if dim not in (-1, x.ndim - 1) else liger.LigerSoftmaxFunction.apply(x),
    "cross_entropy": lambda logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction: (
        liger.LigerCrossEntropyFunction.apply(
            logits.flatten(0, -2),
            labels.flatten(),
            None,
            ignore_index,
            z_loss,
            label_smoothing,
            reduction,
            softcap or None,
        )[0]
    ),
    "linear_cross_entropy": lambda x, weight, labels, ignore_index, label_smoothing, z_loss, softcap, reduction: (
        liger.LigerFusedLinearCrossEntropyFunction.apply(
            x.flatten(0, -2),
            weight,
            labels.flatten(),
            None,
            None,
            ignore_index,
            z_loss,
            label_smoothing,
            reduction,
            softcap or None,
        )[0]
    ),
    "rope": lambda q, k, cos, sin, positions, interleaved: (
        NotImplemented
        if interleaved or positions is None or 2 * cos.shape[1] != q.shape[3]
        else tuple(
            t.transpose(1, 2)
            for t in liger.LigerRopeFunction.apply(
                q.transpose(1, 2), k.transpose(1, 2), *(torch.cat((t[positions],) * 2, -1) for t in (cos, sin))
            )
        )
    ),
}

# PyTorch's own way to write what has no single function with our options, so no backend: eager, as people write it.
EAGER: dict[str, Callable] = {
    "cross_entropy": lambda logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction: (
        NotImplemented
        if z_loss or softcap
        else F.cross_entropy(
            logits.flatten(0, -2),
            labels.flatten(),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    ),
    "linear_cross_entropy": lambda x, weight, labels, ignore_index, label_smoothing, z_loss, softcap, reduction: (
        NotImplemented
        if z_loss or softcap
        else F.cross_entropy(
            F.linear(x, weight).flatten(0, -2),
            labels.flatten(),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    ),
    "dropout": lambda x, p: F.dropout(x, p),
    "embedding": lambda ids, weight: F.embedding(ids, weight),
    "argmax": lambda logits: logits.argmax(-1),
    "topk": lambda logits, k: torch.topk(logits, k),
}

LIBRARIES: dict[str, tuple[str, dict[str, Callable]]] = {"eager": ("torch", EAGER), "liger": ("liger_kernel", LIGER)}

# Whose best time a ratio is taken against; the last two are torch.optim's ways to step.
PEERS = ("aten", "compile", *LIBRARIES, "fused", "foreach")


@dataclass(frozen=True)
class Peer:
    """Another way to run an operator: `run` takes the operator's arguments by position, inside `scope()`."""

    run: Callable
    scope: Callable[[], AbstractContextManager] = nullcontext


@functools.cache
def importable(module: str) -> bool:
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.util.find_spec(module) is not None


def peers_of(described: Operator) -> dict[str, Peer]:
    """The peers of an operator beyond its registered backends, by name; what is compiled is so afresh each time."""
    found = {"compile": compiled_definition(described)}
    for name, (module, functions) in LIBRARIES.items():
        if described.name in functions and importable(module):
            found[name] = Peer(by_position(described, functions[described.name]))
    return found


def compiled_definition(described: Operator) -> Peer:
    import torch._functorch.config as functorch

    # A donated buffer may be overwritten by the backward, which then could not be timed more than once.
    keeping_buffers = lambda: functorch.patch(donated_buffer=False)
    return Peer(torch.compile(described.definition, dynamic=False), keeping_buffers)


def by_position(described: Operator, function: Callable) -> Callable:
    """A function that names some of an operator's arguments, as one that takes them all by position."""
    places = [described.parameters.index(name) for name in parameters_of(function)]

    def run(*values: Any) -> Any:
        out = function(*(values[place] for place in places))
        if out is NotImplemented:
            raise NotImplementedError(f"it has no {described.name} for these arguments")
        return out

    return run
