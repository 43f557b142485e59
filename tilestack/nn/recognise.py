"""What a module of someone else's model computes, and which of ours may stand in for it.

PyTorch's modules are known by the forward they run: a subclass that keeps it is the same module, one that overrides it
is not. The norms and activations of transformers, of which every model brings its own, are known by their values: a
familiar name makes a stand-in a candidate, and it is taken only if it agrees with the module on random inputs and random
weights, in values and in result dtypes. So LlamaRMSNorm is recognised, and GemmaRMSNorm, which multiplies by
1 + weight, is not. The trial runs on a copy with weights of its own on the CPU, so it works for models on any device,
`meta` too, and touches neither the model nor the global random state.
"""

import copy
import inspect
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from tilestack import contract, nn, ops
from tilestack.nn.autocast import lowered


class RootMeanSquareNorm:
    """An RMSNorm in the manner of Llama: the result has the wider of the input's and the weight's dtype."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps  # type: ignore[attr-defined]
        return ops.rms_norm(hidden_states, getattr(self, "weight", None), eps)


class RootMeanSquareNormLikeInput(RootMeanSquareNorm):
    """An RMSNorm in the manner of OLMo 2: the result has the input's dtype."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return RootMeanSquareNorm.forward(self, hidden_states).to(hidden_states.dtype)


class RootMeanSquareNormLikeWeight(RootMeanSquareNorm):
    """An RMSNorm in the manner of T5: the result has the weight's dtype."""

    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        return RootMeanSquareNorm.forward(self, hidden_states).to(self.weight.dtype)


class ExactGELU:
    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input)


class TanhGELU:
    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input, "tanh")


class Swish:
    def forward(self, input: Tensor) -> Tensor:
        return ops.silu(input)


class TransposedLinear:
    """A linear layer that keeps its weight as [in, out], as GPT-2's Conv1D does."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(*lowered(x, self.weight.T, self.bias))


OPERATORS: dict[type, str] = {
    nn.Linear: "linear",
    nn.Conv2d: "conv2d",
    nn.RMSNorm: "rms_norm",
    nn.LayerNorm: "layer_norm",
    nn.GroupNorm: "group_norm",
    nn.Softmax: "softmax",
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    RootMeanSquareNorm: "rms_norm",
    RootMeanSquareNormLikeInput: "rms_norm",
    RootMeanSquareNormLikeWeight: "rms_norm",
    ExactGELU: "gelu",
    TanhGELU: "gelu",
    Swish: "silu",
    TransposedLinear: "linear",
}
KNOWN: dict[type[torch.nn.Module], type] = {
    getattr(torch.nn, ours.__name__): ours for ours in OPERATORS if issubclass(ours, torch.nn.Module)
}
FORWARDS = ("forward", "_conv_forward")  # what a module computes is in these
KNOWN_BY_NAME = {"transformers.pytorch_utils.Conv1D": TransposedLinear}

NORMS = (RootMeanSquareNorm, RootMeanSquareNormLikeInput, RootMeanSquareNormLikeWeight)
CANDIDATES: dict[str, tuple[type, ...]] = {  # by how a class's name ends
    "RMSNorm": NORMS,
    "T5LayerNorm": NORMS,
    "GELU": (ExactGELU, TanhGELU),
    "GELUTanh": (ExactGELU, TanhGELU),
    "GELUActivation": (ExactGELU, TanhGELU),
    "SiLU": (Swish,),
    "SiLUActivation": (Swish,),
}


@dataclass(frozen=True)
class Match:
    """The operator a module is an instance of, and our class whose forward replaces its own."""

    operator: str
    ours: type


def recognise(module: torch.nn.Module) -> Match | str | None:
    """Our match for a module; why there is none although it looks familiar; None for all other modules."""
    kind = type(module)
    if issubclass(kind, tuple(OPERATORS)):
        return None
    base = next((known for known in KNOWN if issubclass(kind, known)), None)
    ours = KNOWN[base] if base else KNOWN_BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
    ending = next((ending for ending in CANDIDATES if kind.__name__.endswith(ending)), None)
    if ours is None and (ending is None or kind.__module__.startswith("torch.")):
        return None
    if reason := unusual(module):
        return reason
    if base is not None and any(
        getattr(kind, name) is not getattr(base, name) for name in FORWARDS if hasattr(base, name)
    ):
        return f"it overrides the forward of torch.nn.{base.__name__}"
    return Match(OPERATORS[ours], ours) if ours else tried_out(module, CANDIDATES[ending or ""])


def unusual(module: torch.nn.Module) -> str:
    """Why the module is not run as its class says, whatever that is; empty when it is."""
    if isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "torch.nn.MultiheadAttention reads its weight and never calls it"
    if "forward" in vars(module):
        return "its forward has been replaced on the instance"
    if parametrize.is_parametrized(module):
        return "it is parametrised"
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"its {name} is a {type(tensor).__name__}, not a plain tensor"
    return ""


def tried_out(module: torch.nn.Module, candidates: tuple[type, ...]) -> Match | str:
    """The first candidate that computes what the module does, or what speaks against the likeliest."""
    operator = OPERATORS[candidates[0]]
    if list(module.children()) or len(inspect.signature(type(module).forward).parameters) != 2:
        return f"it is not a function of one tensor, as {operator} is"
    try:
        match = next((ours for ours in candidates if agrees(module, ours)), None)
    except Exception as error:  # whatever a stranger's forward may raise
        return f"trying it out as {operator} raised {type(error).__name__}: {error}"
    return Match(operator, match) if match else f"its values or result dtypes are not those of {operator}"


def agrees(module: torch.nn.Module, ours: type) -> bool:
    """Whether the module's forward and ours give the same values in float32, and the same dtypes in any mixture."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, device="cpu")
    weights = {name: draw(*tensor.shape) for name, tensor in module.named_parameters()}
    width = weights["weight"].shape[-1] if "weight" in weights else 64
    # Small rows show how eps enters, large ones where a curve is clipped.
    x = draw(4, width) * torch.tensor([[1], [1e-3], [1e-6], [10]], device="cpu")
    for x_dtype, weight_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        trial = copy.copy(module)
        vars(trial)["_parameters"] = {name: weight.to(weight_dtype) for name, weight in weights.items()}
        with torch.no_grad(), torch.autocast("cpu", enabled=False), contract.backend("torch"):
            expected = type(module).forward(trial, x.to(x_dtype))
            found = ours.forward(trial, x.to(x_dtype))  # type: ignore[attr-defined]
        if found.dtype != expected.dtype or found.shape != expected.shape:
            return False
        if x_dtype == weight_dtype == torch.float32 and not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
            return False
    return True
