"""Who our kernels are measured against, found at run time.

    aten            PyTorch's own function, where it has one (registered as a backend, see kernels/aten.py)
    eager           what people write in PyTorch where the definition is not it (idioms.py)
    compile         torch.compile of the definition
    eager-compile   torch.compile of what people write
    …-max           the two above in the mode max-autotune-no-cudagraphs
    liger           Liger-Kernel, when it is importable
    aten-rowwise    PyTorch's grouped product of fp8, whose scales are coarser than the operator's (aten_rowwise.py)

To add a library's function for an operator, add a line to that library's dictionary below: a function that names the
operator's arguments it wants and returns the result, or NotImplemented for arguments the library does not take. What a
library's users prepare once is not timed (`Prepared`). Some libraries write gradients over their inputs; each peer has
copies of its own, so that this disturbs no one else.

A folder `peers/` at the top of the checkout, if there is one, is searched for libraries that are not installed.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilestack.contract import Operator
from tilestack.contract.named import parameters_of
from tilestack.lab.bench import aten_rowwise
from tilestack.lab.bench.idioms import IDIOMS, Prepared

FOLDER = Path(__file__).resolve().parents[3] / "peers"


class Module:
    """A module imported when an attribute of it is first wanted."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)
        return found


liger = Module("liger_kernel.ops")


def liger_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    # In place is Liger's default for the gradient; it moves the same bytes, but on the next call the arriving gradient
    # would be the last result, which soon fades to zeros.
    return liger.LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


def liger_angles(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> tuple[Tensor, ...]:
    """What a model makes once for all its layers: the angles of its tokens, each twice."""
    if interleaved or positions is None or 2 * cos.shape[1] != q.shape[3]:
        raise NotImplementedError("it has no rope for these arguments")
    return q, k, *(torch.cat((table[positions],) * 2, -1) for table in (cos, sin))


def liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    turned = liger.LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return tuple(t.transpose(1, 2) for t in turned)


LIGER: dict[str, Callable | Prepared] = {
    "rms_norm": liger_rms_norm,
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
    "rope": Prepared(liger_angles, liger_rope),
    "rope_": Prepared(liger_angles, liger_rope),  # it writes over what is in one piece
    "qk_norm_rope": Prepared(
        lambda q, k, q_weight, k_weight, cos, sin, positions, interleaved, eps: (
            *liger_angles(q, k, cos, sin, positions, interleaved), q_weight, k_weight, eps,
        ),
        lambda q, k, cos, sin, q_weight, k_weight, eps: liger_rope(
            liger_rms_norm(q, q_weight, eps), liger_rms_norm(k, k_weight, eps), cos, sin
        ),
    ),
}  # fmt: skip

ROWWISE: dict[str, Callable | Prepared] = {
    "grouped_linear_fp8": Prepared(aten_rowwise.linear_operands, aten_rowwise.grouped_product),
    "grouped_outer_fp8": Prepared(aten_rowwise.outer_operands, aten_rowwise.grouped_product),
}

LIBRARIES: dict[str, tuple[str, dict[str, Callable | Prepared]]] = {
    "liger": ("liger_kernel", LIGER),
    "aten-rowwise": ("torch", ROWWISE),
}
MODES: dict[str, dict[str, Any]] = {"": {}, "-max": {"mode": "max-autotune-no-cudagraphs"}}  # of torch.compile
COMPILED = [f"{name}{suffix}" for name in ("compile", "eager-compile") for suffix in MODES]

# Whose best time a ratio is taken against: of operators, of torch.optim's steps, of whole training steps, and of engines.
OF_OPERATORS = ("aten", *COMPILED, "eager", *LIBRARIES)
OF_OPTIMIZERS = ("fused", "foreach", "torch.optim")
OF_TRAINING = ("plain", "plain-compile", "transformers", "transformers-compile", "transformers-liger")
IN_FP8 = ("tilestack-fp8", "tilestack-fp8-head")  # training steps of ours in another precision than any peer's
OF_SERVING = ("vllm", "transformers")
PEERS = (*OF_OPERATORS, *OF_OPTIMIZERS, *OF_TRAINING, *OF_SERVING)

# Where a backend of ours ran another's kernel, there is nothing to win against it: (operator, backend, direction) of rows that
# do not say whose kernel they measured.
BORROWED = {("attention", "gluon", "forward"): "cuDNN"}


def is_peer(backend: str) -> bool:
    return backend in PEERS


def usual_code_tried(op: str, names: Iterable[str]) -> bool:
    """Whether what people write for an operator is among backends and peers, where that is not its definition."""
    return op not in IDIOMS or any(name.startswith("eager") for name in names)


def our_backends(operator: Operator) -> list[str]:
    """The backends of an operator that are to be proved: neither its definition nor another library."""
    return [name for name in operator.implementations if name != "torch" and not is_peer(name)]


@dataclass(frozen=True)
class Peer:
    """Another way to run an operator: `run` takes what `setup` makes of the operator's arguments, inside `scope()`."""

    run: Callable
    scope: Callable[[], AbstractContextManager] = nullcontext
    setup: Callable[..., tuple] = lambda *values: values  # by position; not timed


def search_peers() -> None:
    """Let libraries be found that are not installed but lie beside the checkout."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


@functools.cache
def importable(module: str) -> bool:
    search_peers()
    return importlib.util.find_spec(module) is not None


def peers_of(operator: Operator) -> dict[str, Peer]:
    """The peers of an operator beyond its registered backends, by name; what is compiled is so afresh each time."""
    found = compiled("compile", operator.definition)
    if idiom := IDIOMS.get(operator.name):
        found["eager"] = peer_of(operator, idiom)
        if not isinstance(idiom, Prepared):  # which are a library's own functions: there is nothing to compile
            found |= compiled("eager-compile", found["eager"].run)
    for name, (module, functions) in LIBRARIES.items():
        if operator.name in functions and importable(module):
            found[name] = peer_of(operator, functions[operator.name])
    return found


def peer_of(operator: Operator, function: Callable | Prepared) -> Peer:
    if isinstance(function, Prepared):
        return Peer(function.run, setup=by_position(operator, function.setup))
    return Peer(by_position(operator, function))


def compiled(name: str, function: Callable) -> dict[str, Peer]:
    """A function under torch.compile, as it is by default and with every configuration tried."""
    import torch._functorch.config as functorch

    # A donated buffer may be overwritten by the backward, which then could not be timed more than once.
    keeping_buffers = lambda: functorch.patch(donated_buffer=False)
    return {
        f"{name}{suffix}": Peer(torch.compile(function, dynamic=False, **options), keeping_buffers)
        for suffix, options in MODES.items()
    }


def by_position(operator: Operator, function: Callable) -> Callable:
    """A function that names some of an operator's arguments, as one that takes them all by position."""
    places = [operator.parameters.index(name) for name in parameters_of(function)]

    def run(*values: Any) -> Any:
        out = function(*(values[place] for place in places))
        if out is NotImplemented:
            raise NotImplementedError(f"it has no {operator.name} for these arguments")
        return out

    return run
