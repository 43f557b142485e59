"""What a decoder is made of, in our words and in those of a Hugging Face config.json."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tilestack.models import families
from tilestack.models.keys import KINDS, ROPE_KINDS, ConfigError, check_kinds, check_size, shown

MOST_KEYS = 1000
SIZES = ("vocabulary", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "positions")
EXPERT_SIZES = ("experts", "top_k", "expert_intermediate")
LATENT_SIZES = ("kv_rank", "nope_dim", "rope_dim", "value_dim")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama kind: everything that its families differ in.

    Sizes are of one token: `hidden` of the residual stream, `intermediate` of a feed-forward layer, `head_dim` of a
    query. With `experts`, every layer not in `dense_layers` is a mixture of them. With `kv_rank`, keys and values are
    made from a latent of that size (DeepSeek's MLA), and a query's head is `nope_dim` + `rope_dim` long.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    family: str = "llama"  # a Hugging Face model_type
    positions: int = 2048  # the longest text, in tokens
    rope_base: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # in Hugging Face's words, see ops.rope.frequencies
    windows: tuple[int | None, ...] = ()  # how far each layer looks back; none does where it is empty
    norm_eps: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False  # the head's weight is the embedding's
    initial_std: float = 0.02

    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    normalise: bool = True  # the weights of a token's experts add up to one
    expert_scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    dense_layers: tuple[int, ...] = ()

    kv_rank: int = 0
    q_rank: int = 0  # 0: queries are made from the hidden state directly
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None

    def __post_init__(self) -> None:
        if self.family not in families.FAMILIES:
            raise ConfigError(f"model_type must be one of {', '.join(families.FAMILIES)}, not {self.family!r}")
        sizes = SIZES + EXPERT_SIZES * bool(self.experts) + LATENT_SIZES * bool(self.kv_rank)
        sizes += tuple(name for name in ("shared_intermediate", "q_rank") if getattr(self, name))
        for name in sizes:
            check_size(self.spelt(name), getattr(self, name), name)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.spelt('heads')}, {self.heads}, must be a multiple of {self.spelt('kv_heads')}, {self.kv_heads}"
            )
        if self.rotary_dim % 2:
            raise ConfigError(f"RoPE turns pairs of elements, so {self.spelt('head_dim')} must be even")
        if self.rotary_dim == 2 and (self.rope_scaling or {}).get("rope_type") == "dynamic":
            raise ConfigError("dynamic RoPE stretches the pairs after the first, and here is one alone")
        if self.windows and len(self.windows) != self.layers:
            raise ConfigError(f"windows must name one for each of the {self.layers} layers, not {len(self.windows)}")
        if self.experts and self.top_k > self.experts:
            raise ConfigError(
                f"{self.spelt('top_k')} is {self.top_k}, more than the {self.experts} of {self.spelt('experts')}"
            )
        if self.experts and (self.experts % self.groups or not 1 <= self.top_groups <= self.groups):
            raise ConfigError(f"the best {self.top_groups} of {self.groups} groups of {self.experts} experts are none")
        if self.experts and self.top_k * self.groups > self.top_groups * self.experts:
            raise ConfigError(f"{self.spelt('top_k')} is {self.top_k}, more than the experts of the best groups")

    @property
    def rotary_dim(self) -> int:
        """How many elements of a head are turned by its position."""
        return self.rope_dim if self.kv_rank else self.head_dim

    @property
    def cached_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """What a layer remembers of a token, as [heads, dim] twice: its key and value, or the latent they are made from."""
        if self.kv_rank:
            return (1, self.kv_rank), (1, self.rope_dim)
        return (self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def sparse(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return bool(self.experts) and layer not in self.dense_layers

    def spelt(self, name: str) -> str:
        """A field as config.json spells it, for messages."""
        return families.FAMILIES[self.family].keys.get(name, name)

    @classmethod
    def from_hf(cls, given: Mapping[str, Any], *, strict: bool = False) -> "ModelConfig":
        """From the contents of a Hugging Face config.json; without a model_type it is a Llama.

        Files carry much that a decoder does not need, which is passed over; `strict` refuses it, for a configuration
        written by hand.
        """
        if len(given) > MOST_KEYS:
            raise ConfigError(f"the config has {len(given)} keys, more than any model's")
        check_kinds(given, KINDS)
        name = given.get("model_type") or "llama"
        family = families.FAMILIES.get(name)
        if family is None:
            raise ConfigError(f"model_type {shown(name)} is not read; there are {', '.join(families.FAMILIES)}")
        refuse_misspelt(given, family, strict)
        refuse_unsupported(given)
        found = {field: given[key] for field, key in family.keys.items() if given.get(key) is not None}
        if missing := [family.keys[field] for field in families.REQUIRED if field not in found]:
            raise ConfigError(f"the config of a {name} model lacks {', '.join(missing)}")
        found = {**family.defaults, **found}
        for field in sorted(found.keys() & {*SIZES, *EXPERT_SIZES, *LATENT_SIZES}):
            check_size(family.keys.get(field, field), found[field], field)
        found.setdefault("kv_heads", found["heads"])
        found.setdefault("head_dim", found["hidden"] // found["heads"])
        found |= rope_of(given, found) | {"eos": listed(given.get("eos_token_id"))}
        return cls(family=name, **found | family.read(given, found))

    def to_hf(self) -> dict[str, Any]:
        """The contents of a config.json that transformers and `from_hf` read as this, or an error where there is none."""
        family = families.FAMILIES[self.family]
        described = {
            "model_type": self.family,
            "architectures": [family.architecture],
            "hidden_act": "silu",
            **{key: getattr(self, field) for field, key in family.keys.items()},
            "rope_theta": self.rope_base,
            "rope_scaling": self.rope_scaling,
            "eos_token_id": self.eos[0] if len(self.eos) == 1 else list(self.eos) or None,
            **family.write(self),
        }
        read = ModelConfig.from_hf(described)
        if lost := [field.name for field in fields(self) if getattr(read, field.name) != getattr(self, field.name)]:
            raise ConfigError(f"the config.json of a {self.family} model has no words for this: {', '.join(lost)}")
        return described


def listed(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


def rope_of(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Base and scaling of RoPE, from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    described = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
    check_kinds(described, ROPE_KINDS)
    described = {key: value for key, value in described.items() if value is not None}
    base = described.pop("rope_theta", given.get("rope_theta"))
    kind = described.pop("type", None)
    kind = described.setdefault("rope_type", kind or "default")
    kinds = ("default", "linear", "dynamic", "yarn", "llama3")
    if kind not in kinds:
        raise ConfigError(f"rope_type must be one of {', '.join(kinds)}, not {shown(kind)}")
    if described.pop("partial_rotary_factor", given.get("partial_rotary_factor", 1.0)) not in (1, None):
        raise ConfigError("partial_rotary_factor must be 1: heads are turned whole")
    needed = {"llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
    for key in ("factor", *needed.get(kind, ())) if kind != "default" else ():
        if key not in described:
            raise ConfigError(f"rope scaling of the type {kind} lacks {key}")
    if kind == "yarn":
        described.setdefault("original_max_position_embeddings", fields.get("positions", 2048))
    if kind == "llama3" and described["high_freq_factor"] <= described["low_freq_factor"]:
        raise ConfigError("high_freq_factor must be more than low_freq_factor")
    if base is not None and base <= 1:
        raise ConfigError(f"rope_theta must be more than 1, not {shown(base)}")
    scaling = None if kind == "default" else described
    return {"rope_scaling": scaling} | ({} if base is None else {"rope_base": float(base)})


def refuse_misspelt(given: Mapping[str, Any], family: families.Family, strict: bool) -> None:
    """A key that is almost one that a decoder needs is a mistake, and with `strict` every other that it does not."""
    known = {*family.keys.values(), *family.other_keys, *families.COMMON_KEYS}
    for key in (key for key in given if key not in known):
        close = difflib.get_close_matches(key, known - given.keys(), n=1, cutoff=0.5 if strict else 0.9)
        if close or strict:
            hint = f"; did you mean {close[0]!r}?" if close else f"; it may have {', '.join(sorted(known))}"
            raise ConfigError(f"the config has {shown(key)}{hint}")


def refuse_unsupported(given: Mapping[str, Any]) -> None:
    if given.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"hidden_act must be silu, not {shown(given['hidden_act'])}")
    if given.get("quantization_config"):
        kind = shown(given["quantization_config"].get("quant_method", "unknown"))
        raise ConfigError(f"the weights are quantised (quantization_config, {kind}); take the unquantised model")
