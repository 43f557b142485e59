"""What the keys of a config.json may hold: a broken or hostile file is one error that names the key, before it is used."""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class ConfigError(ValueError):
    """A configuration that no decoder can be built from; the message names the key."""


# The largest sizes, by field of ModelConfig: far beyond any model, and small enough that their products stay numbers.
LARGEST = dict(
    vocabulary=2**24,
    hidden=2**20,
    intermediate=2**22,
    layers=4096,
    heads=2**14,
    kv_heads=2**14,
    head_dim=2**14,
    positions=2**24,
    experts=4096,
    top_k=4096,
    expert_intermediate=2**22,
    shared_intermediate=2**22,
    nope_dim=2**14,
    rope_dim=2**14,
    value_dim=2**14,
    kv_rank=2**20,
    q_rank=2**20,
)


@dataclass(frozen=True)
class Kind:
    """A kind of value: what it is called in a message, and whether something is one."""

    words: str
    holds: Callable[[Any], bool]


def is_token(value: Any) -> bool:
    """-1 too, which some files have for none."""
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 2**31


def is_whole(value: Any) -> bool:
    return is_token(value) and value >= 0


def is_number(value: Any) -> bool:
    """Finite, and so are its products: JSON has 1e999 and whole numbers of any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2.0**63


def list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(holds, value))


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
WHOLE = Kind("a whole number", is_whole)
COUNT = Kind("a positive whole number", lambda value: is_whole(value) and value > 0)
AMOUNT = Kind("a number that is not negative", lambda value: is_number(value) and value >= 0)
POSITIVE = Kind("a positive number", lambda value: is_number(value) and value > 0)
NUMBERS = Kind("a list of positive numbers", list_of(POSITIVE.holds))
NAME = Kind("a text", lambda value: isinstance(value, str))
NAMES = Kind("a list of texts", list_of(NAME.holds))
WHOLES = Kind("a list of whole numbers", list_of(is_whole))
TOKEN = Kind("a token's number", is_token)
TOKENS = Kind("a token's number or a list of them", lambda value: is_token(value) or list_of(is_token)(value))
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))

KINDS: dict[str, Kind] = dict(
    model_type=NAME,
    hidden_act=NAME,
    hidden_activation=NAME,
    quantization_config=OBJECT,
    rms_norm_eps=AMOUNT,
    initializer_range=AMOUNT,
    tie_word_embeddings=FLAG,
    attention_bias=FLAG,
    mlp_bias=FLAG,
    bos_token_id=TOKEN,
    pad_token_id=TOKEN,
    eos_token_id=TOKENS,
    rope_theta=POSITIVE,
    rope_scaling=OBJECT,
    rope_parameters=OBJECT,
    rope_local_base_freq=POSITIVE,
    original_max_position_embeddings=COUNT,
    partial_rotary_factor=POSITIVE,
    sliding_window=WHOLE,
    sliding_window_pattern=COUNT,
    use_sliding_window=FLAG,
    max_window_layers=WHOLE,
    layer_types=NAMES,
    num_experts=COUNT,
    num_local_experts=COUNT,
    n_routed_experts=COUNT,
    decoder_sparse_step=COUNT,
    mlp_only_layers=WHOLES,
    norm_topk_prob=FLAG,
    routed_scaling_factor=AMOUNT,
    kv_lora_rank=COUNT,
    q_lora_rank=WHOLE,
    n_shared_experts=WHOLE,
    first_k_dense_replace=WHOLE,
    topk_method=NAME,
    scoring_func=NAME,
    n_group=COUNT,
    topk_group=COUNT,
    query_pre_attn_scalar=POSITIVE,
    attn_logit_softcapping=POSITIVE,
    final_logit_softcapping=POSITIVE,
    use_bidirectional_attention=FLAG,
    embedding_multiplier=POSITIVE,
    residual_multiplier=POSITIVE,
    attention_multiplier=POSITIVE,
    logits_scaling=POSITIVE,
)
ROPE_KINDS: dict[str, Kind] = dict(
    rope_type=NAME,
    type=NAME,
    rope_theta=POSITIVE,
    factor=POSITIVE,
    partial_rotary_factor=POSITIVE,
    attention_factor=POSITIVE,
    beta_fast=POSITIVE,
    beta_slow=POSITIVE,
    mscale=AMOUNT,
    mscale_all_dim=AMOUNT,
    truncate=FLAG,
    low_freq_factor=POSITIVE,
    high_freq_factor=POSITIVE,
    original_max_position_embeddings=COUNT,
    short_factor=NUMBERS,
    long_factor=NUMBERS,
)


def check_kinds(given: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Raise for the first key whose value is not of its kind; null stands for a key that is not there."""
    for key, kind in kinds.items():
        if given.get(key) is not None and not kind.holds(given[key]):
            raise ConfigError(f"{key} must be {kind.words}, not {shown(given[key])}")


def check_size(name: str, value: Any, field: str) -> None:
    """Raise unless a field's size, which messages call `name`, is a positive whole number that is not absurd."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a positive whole number, not {shown(value)}")
    if value > LARGEST[field]:
        raise ConfigError(f"{name} must be at most {LARGEST[field]}, not {shown(value)}")


def shown(value: Any) -> str:
    """A value for a message: on one line, and short whatever it holds."""
    return reprlib.repr(value)
