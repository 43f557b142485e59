"""What a decoder is made of, in our words and in those of a Hugging Face config.json."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tilestack.models import families
from tilestack.models.keys import KINDS, OBJECT, ROPE_KINDS, ConfigError, check_kinds, check_size, shown

MOST_KEYS = 1000
ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}  # ours, and Hugging Face's names
# The ways to scale RoPE, and what each has to say.
SCALINGS = dict(
    default=(),
    linear=("factor",),
    dynamic=("factor",),
    yarn=("factor",),
    llama3=("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    longrope=("short_factor", "long_factor"),
)
SIZES = ("vocabulary", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "positions")
EXPERT_SIZES = ("experts", "top_k", "expert_intermediate")
LATENT_SIZES = ("kv_rank", "nope_dim", "rope_dim", "value_dim")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: everything that its families differ in.

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
    local_rope_base: float | None = None  # of layers with a window, which are then not scaled; None: as all others
    rotary_factor: float = 1.0  # the share of a head that is turned
    rotary_interleaved: bool = False  # pairs are neighbours, not halves
    windows: tuple[int | None, ...] = ()  # how far each layer looks back; none does where it is empty
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to the weights of norms
    pre_norms: bool = True  # of what attention and feed-forward read
    post_norms: bool = False  # of what they add
    qk_norm: str | None = None  # "head": of every query and key; "projection": of all queries and all keys of a token
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"  # of the feed-forward's gate, or gelu_tanh
    tied: bool = False  # the head's weight is the embedding's
    initial_std: float = 0.02

    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add
    attention_scale: float | None = None  # of scores; None: 1 / √head_dim
    attention_softcap: float | None = None
    logit_divisor: float = 1.0
    logit_softcap: float | None = None

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
        check_rotary(self)
        if self.qk_norm not in (None, "head", "projection"):
            raise ConfigError(f"qk_norm must be None, head or projection, not {shown(self.qk_norm)}")
        if self.activation not in ACTIVATIONS or (self.experts and self.activation != "silu"):
            raise ConfigError(f"activation must be one of {', '.join(ACTIVATIONS)}, and silu in experts")
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
        return self.rope_dim if self.kv_rank else int(self.head_dim * self.rotary_factor)

    @property
    def cached_shapes(self) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """What a layer remembers of a token, as [heads, dim]: its keys and its values. With MLA, the latent that both are
        made from and the rotary key, as one."""
        if self.kv_rank:
            return (1, self.kv_rank + self.rope_dim), None
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
            hint = families.HINTS.get(name, f"there are {', '.join(families.FAMILIES)}")
            raise ConfigError(f"model_type {shown(name)} is not read; {hint}")
        refuse_misspelt(given, family, strict)
        refuse_unsupported(given, family)
        found = {field: given[key] for field, key in family.keys.items() if given.get(key) is not None}
        if missing := [family.keys[field] for field in families.REQUIRED if field not in found]:
            raise ConfigError(f"the config of a {name} model lacks {', '.join(missing)}")
        found = {**family.defaults, **found}
        for field in sorted(found.keys() & {*SIZES, *EXPERT_SIZES, *LATENT_SIZES}):
            check_size(family.keys.get(field, field), found[field], field)
        found.setdefault("kv_heads", found["heads"])
        found.setdefault("head_dim", found["hidden"] // found["heads"])
        found |= rope_of(given, found, family) | {"eos": listed(given.get("eos_token_id"))}
        return cls(family=name, **found | family.read(given, found))

    def to_hf(self) -> dict[str, Any]:
        """The contents of a config.json that transformers and `from_hf` read as this, or an error where there is none."""
        family = families.FAMILIES[self.family]
        described = {
            "model_type": self.family,
            "architectures": [family.architecture],
            "hidden_act": ACTIVATIONS[self.activation][0],
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


def check_rotary(config: ModelConfig) -> None:
    """Raise where heads and the scaling of RoPE do not go together."""
    pairs, scaling = config.rotary_dim // 2, config.rope_scaling or {}
    if config.rotary_dim % 2 or not pairs or not 0 < config.rotary_factor <= 1:
        raise ConfigError(
            f"RoPE turns pairs of elements, so {config.spelt('head_dim')} must be even, and so must the part of it that "
            "partial_rotary_factor takes"
        )
    if scaling.get("rope_type") == "dynamic" and pairs == 1:
        raise ConfigError("dynamic RoPE stretches the pairs after the first, and here is one alone")
    for key in ("short_factor", "long_factor") if scaling.get("rope_type") == "longrope" else ():
        if len(scaling[key]) != pairs:
            raise ConfigError(f"{key} must hold a factor for each of the {pairs} pairs, not {len(scaling[key])}")


def rope_of(given: Mapping[str, Any], fields: Mapping[str, Any], family: families.Family) -> dict[str, Any]:
    """Base and scaling of RoPE, from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    described = given.get("rope_parameters") or given.get("rope_scaling") or {}
    found: dict[str, Any] = {}
    if "full_attention" in described:  # one for each kind of layer
        local = described.get("sliding_attention") or {}
        check_kinds(described, dict(full_attention=OBJECT, sliding_attention=OBJECT))
        check_kinds(local, ROPE_KINDS)
        if "local_rope_base" not in family.keys or local.get("rope_type", "default") != "default":
            raise ConfigError("rope_parameters by kinds of layers are read for gemma3_text, unscaled where they slide")
        found |= {"local_rope_base": float(local.get("rope_theta", fields["local_rope_base"]))}
        described = described["full_attention"] or {}
    check_kinds(described, ROPE_KINDS)
    described = {key: value for key, value in described.items() if value is not None}
    base = described.pop("rope_theta", given.get("rope_theta"))
    for each in filter(None, (base, found.get("local_rope_base"), fields.get("local_rope_base"))):
        if each <= 1:
            raise ConfigError(f"the base of RoPE must be more than 1, not {shown(each)}")
    found |= {} if base is None else {"rope_base": float(base)}
    factor = described.pop("partial_rotary_factor", given.get("partial_rotary_factor"))
    if "rotary_factor" in family.keys:
        found |= {} if factor is None else {"rotary_factor": float(factor)}
    elif factor not in (1, None):
        raise ConfigError("partial_rotary_factor must be 1: heads of this family are turned whole")
    kind = described.pop("type", None)
    kind = described.pop("rope_type", kind) or "default"
    return found | {"rope_scaling": scaling_of("longrope" if kind == "su" else kind, described, given, fields)}


def scaling_of(
    kind: str, described: dict[str, Any], given: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any] | None:
    """How RoPE is stretched, complete, or None where it is as it is."""
    if kind not in SCALINGS:
        raise ConfigError(f"rope_type must be one of {', '.join(SCALINGS)}, not {shown(kind)}")
    if kind == "default":
        return None
    if kind in ("yarn", "longrope"):
        trained = given.get("original_max_position_embeddings") or fields.get("positions", 2048)
        described.setdefault("original_max_position_embeddings", trained)
    for key in SCALINGS[kind]:
        if key not in described:
            raise ConfigError(f"rope scaling of the type {kind} lacks {key}")
    if kind == "llama3" and described["high_freq_factor"] <= described["low_freq_factor"]:
        raise ConfigError("high_freq_factor must be more than low_freq_factor")
    if kind == "longrope" and described["original_max_position_embeddings"] < 2:
        raise ConfigError("original_max_position_embeddings must be more than 1")
    return {"rope_type": kind, **described}


def refuse_misspelt(given: Mapping[str, Any], family: families.Family, strict: bool) -> None:
    """A key that is almost one that a decoder needs is a mistake, and with `strict` every other that it does not."""
    known = {*family.keys.values(), *family.other_keys, *families.COMMON_KEYS}
    for key in (key for key in given if key not in known):
        close = difflib.get_close_matches(key, known - given.keys(), n=1, cutoff=0.5 if strict else 0.9)
        if close or strict:
            hint = f"; did you mean {close[0]!r}?" if close else f"; it may have {', '.join(sorted(known))}"
            raise ConfigError(f"the config has {shown(key)}{hint}")


def refuse_unsupported(given: Mapping[str, Any], family: families.Family) -> None:
    names = ACTIVATIONS[family.defaults.get("activation", "silu")]
    for key in ("hidden_act", "hidden_activation"):
        if given.get(key) is not None and given[key] not in names:
            raise ConfigError(f"{key} must be {names[0]}, not {shown(given[key])}")
