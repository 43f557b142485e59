"""Putting the keys and values of new tokens into the pages that `paged_attention` reads (`ops/paged.py`): as they are, or
straight from the projection, normalised and turned on the way.

A slot is a token's place in the pages: page number · tokens of a page + place in the page. Padding has a negative one.

Keys of real models stand away from zero, some channels far, in every token alike, and a scale that reaches them leaves few
codes for what tells keys apart. `key_offset` is what is taken off every key before it becomes codes. Any vector will do, as
long as it stays: all scores of a query are less by the same number, which softmax does not see.
"""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import wide
from tilestack.ops.paged import INTEGERS, caches_agree
from tilestack.ops.quantised import quantised
from tilestack.ops.rope import qk_norm_rope, qkv_case, qkv_takes, rope


def rows_fit(name: str, new: Tensor, pages: Tensor, slots: Tensor) -> bool | str:
    return new.shape == (slots.shape[0], *pages.shape[2:]) or (
        f"{name} must be [{slots.shape[0]} tokens, {pages.shape[2]} heads, {pages.shape[3]}] for these slots and pages, "
        f"not {tuple(new.shape)}"
    )


def offset_fits(keys: Tensor, values: Tensor | None, key_scale: Tensor | None, key_offset: Tensor | None) -> bool | str:
    if key_offset is None:
        return True
    if key_scale is None or values is None:
        held = f"these of {keys.dtype}" if key_scale is None else "these, which are values too,"
        return f"key_offset is taken off keys that become codes; {held} are kept as they are"
    return (key_offset.shape, key_offset.dtype) == (keys.shape[2:], torch.float32) or (
        f"key_offset must be float32 of shape {tuple(keys.shape[2:])}, what every key of a head loses, not "
        f"{key_offset.dtype} {tuple(key_offset.shape)}"
    )


def kv_write_takes(
    k: Tensor,
    v: Tensor | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    key_offset: Tensor | None,
) -> bool | str:
    if (reason := caches_agree(keys, values, key_scale, value_scale)) is not True:
        return reason
    if (reason := offset_fits(keys, values, key_scale, key_offset)) is not True:
        return reason
    if slots.ndim != 1 or slots.dtype not in INTEGERS:
        return f"slots must be a vector of int32 or int64, not {slots.dtype} {tuple(slots.shape)}"
    if values is None or v is None:
        return rows_fit("k", k, keys, slots) if values is v else "v and values go together"
    if v.dtype != k.dtype:
        return f"k and v must have one dtype, not {k.dtype} and {v.dtype}"
    return reason if (reason := rows_fit("k", k, keys, slots)) is not True else rows_fit("v", v, values, slots)


def slots_are_apart(keys: Tensor, slots: Tensor) -> bool | str:
    """Slots exist, and no two tokens have the same."""
    taken, room = slots[slots >= 0], keys.shape[0] * keys.shape[1]
    if bool((taken >= room).any()):
        return f"slot {int(taken.max())} names none of the {room} places in {keys.shape[0]} pages"
    return taken.unique().numel() == taken.numel() or "two tokens have the same slot; give padding a negative one"


def kv_write_case(make, tokens, pages, page, heads, dim, value_dim, cache="same", offset="no offset"):
    places = torch.randperm(pages * page, generator=torch.Generator().manual_seed(0))[:tokens]
    places[1::4] = -1  # padding
    dtype = make.dtype if cache == "same" else getattr(torch, cache)
    room = lambda width: torch.zeros(pages, page, heads, width, dtype=dtype, device=make.device)
    scale = lambda: None if cache == "same" else make.normal(pages, page, heads, dtype=torch.float32)
    latent = value_dim == 0
    new = lambda width: make.normal(tokens, heads, width, scale=0.25)  # below 1, so that nothing else is the largest
    return dict(
        k=new(dim),
        v=None if latent else new(value_dim),
        slots=places.to(make.device),
        keys=room(dim),
        values=None if latent else room(value_dim),
        key_scale=scale(),
        value_scale=None if latent else scale(),
        key_offset=make.normal(heads, dim, dtype=torch.float32, scale=0.25) if offset == "offset" else None,
    )


def kv_write_cost(
    k: Tensor,
    v: Tensor | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> Cost:
    rows = lambda pages: None if pages is None else pages.new_empty((len(slots), *pages.shape[2:]), device="meta")
    return Cost(read=[slots, k, v], write=[rows(pages) for pages in (keys, values, key_scale, value_scale)])


def nothing_returned(*_: object, **__: object) -> None:
    return None


@operator(
    cases=cases(
        kv_write_case,
        check=[  # tokens, pages, page, heads, dim, dim of v (0: none), what pages hold
            (1, 2, 4, 1, 8, 8),
            (9, 3, 16, 3, 24, 16),
            (6, 2, 4, 1, 40, 0),
            (7, 2, 32, 2, 16, 80, "int8"),
            (5, 4, 16, 2, 64, 64, "float8_e4m3fn"),
            (3, 2, 8, 1, 40, 0, "int8"),
            (9, 2, 16, 3, 24, 16, "int8", "offset"),
            (5, 4, 16, 2, 40, 64, "float8_e4m3fn", "offset"),
            (0, 2, 4, 1, 8, 8),
        ],
        bench=[
            (256, 4096, 16, 8, 128, 128),
            (8192, 4096, 16, 8, 128, 128),
            (8192, 4096, 16, 8, 128, 128, "float8_e4m3fn"),
            (8192, 1024, 64, 1, 576, 0),  # DeepSeek's latents
        ],
    ),
    cost=kv_write_cost,
    check=kv_write_takes,
    check_values=slots_are_apart,
    mutates=("keys", "values", "key_scale", "value_scale"),
    dtypes=dict(keys=(), values=()),
    fake=nothing_returned,
)
def kv_write(
    k: Tensor,
    v: Tensor | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor | None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_offset: Tensor | None = None,
) -> None:
    """Store tokens k and v, [T, kv_heads, dim], in their slots of keys and values, [pages, page, kv_heads, dim].

    In pages of int8 or float8_e4m3fn a token's head becomes codes and a scale, its largest magnitude on the largest
    code, keys less `key_offset`, [kv_heads, dim] in float32; others hold what they are given, rounded to their dtype. A token
    with a negative slot is stored nowhere.
    """
    there = slots >= 0
    page = keys.shape[1]
    places = slots[there] // page, slots[there] % page
    for pages, scale, new, offset in ((keys, key_scale, k, key_offset), (values, value_scale, v, None)):
        if pages is None or new is None:
            continue
        rows = new[there]
        if scale is not None:
            less = wide(rows) if offset is None else wide(rows) - offset
            # Codes of the oracle, in float64, stay unrounded; integers cannot.
            codes, largest = quantised(less, torch.float8_e4m3fn if pages.is_floating_point() else torch.int8)
            scale[places] = largest.to(scale.dtype)
            rows = codes if pages.is_floating_point() else codes.round()
        pages[places] = rows.to(pages.dtype)


def qkv_write_case(
    make, tokens, q_heads, k_heads, dim, rotary, kind, interleaved=False, cache="same", offset="no offset"
):
    turned = qkv_case(make, 1, tokens, q_heads, k_heads, dim, rotary, "batch", kind)
    pages = kv_write_case(make, tokens, 2 * tokens + 1, 4, k_heads, dim, dim, cache, offset)
    names = "q_weight", "k_weight", "cos", "sin", "q_heads"
    return dict(
        heads=turned["heads"][0],
        positions=turned["positions"][0],
        interleaved=interleaved,
        **{name: turned[name] for name in names},
        **{name: pages[name] for name in ("slots", "keys", "values", "key_scale", "value_scale", "key_offset")},
    )


def qkv_write_takes(
    heads: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    q_heads: int,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    key_offset: Tensor | None,
) -> bool | str:
    if heads.ndim != 3 or keys.ndim != 4 or heads.shape[1] != q_heads + 2 * keys.shape[2]:
        return f"heads must be [tokens, {q_heads} + 2 · {keys.shape[-2]} heads, dim] for these pages, not {tuple(heads.shape)}"
    k_heads = keys.shape[2]
    reason = qkv_takes(heads[None], q_weight, k_weight, cos, sin, positions[None], q_heads, k_heads)
    if reason is not True:
        return reason
    k, v = heads[:, q_heads:].split(k_heads, 1)
    return kv_write_takes(k, v, slots, keys, values, key_scale, value_scale, key_offset)


def qkv_write_cost(
    heads: Tensor, q_heads: int, slots: Tensor, keys: Tensor, values: Tensor, key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> Cost:  # fmt: skip
    k, v = heads[:, q_heads:].split(keys.shape[2], 1)
    pages = kv_write_cost(k, v, slots, keys, values, key_scale, value_scale)
    q = heads[:, :q_heads]
    return Cost(7 * heads.numel(), read=[heads, slots], write=[q, *(pages.write or ())])


def turned_queries(
    heads: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor,
    slots: Tensor, keys: Tensor, values: Tensor, q_heads: int, *_: object, **__: object,
) -> Tensor:  # fmt: skip
    return heads.new_empty(heads.shape[0], q_heads, heads.shape[2])


@operator(
    cases=cases(
        qkv_write_case,
        check=[  # tokens, query heads, kv heads, head_dim, rotary dimension, norms or not, interleaved, what pages hold
            (5, 4, 2, 16, 16, "norm"),
            (3, 3, 1, 24, 10, "plain"),
            (6, 2, 2, 20, 12, "norm", True),
            (4, 4, 2, 32, 32, "norm", False, "float8_e4m3fn"),
            (3, 4, 2, 20, 12, "plain", False, "int8"),
            (5, 4, 2, 20, 12, "norm", True, "int8", "offset"),
            (4, 4, 2, 32, 32, "norm", False, "int8", "offset"),
            (0, 4, 2, 16, 16, "plain"),
        ],
        bench=[
            (256, 16, 8, 128, 128, "norm"),  # Qwen3-0.6B decoding
            (8192, 16, 8, 128, 128, "norm"),
            (8192, 32, 8, 128, 128, "plain", False, "float8_e4m3fn"),
        ],
    ),
    cost=qkv_write_cost,
    check=qkv_write_takes,
    check_values=slots_are_apart,
    mutates=("keys", "values", "key_scale", "value_scale"),
    dtypes=dict(keys=(), values=()),
    fake=turned_queries,
)
def qkv_rope_write(
    heads: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    q_heads: int,
    interleaved: bool = False,
    eps: float = 1e-6,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_offset: Tensor | None = None,
) -> Tensor:
    """Turned queries [T, q_heads, dim] out of one projection, [T, q + k + v heads, dim]; keys and values go to their pages.

    `rope` of queries and keys, after their norms where there are weights (`qk_norm_rope`), then `kv_write`, in one.
    """
    q, k, v = heads.split((q_heads, keys.shape[2], keys.shape[2]), 1)
    angles = cos, sin, positions[None], interleaved
    if q_weight is None or k_weight is None:
        q, k = rope.definition(q[None], k[None], *angles)
    else:
        q, k = qk_norm_rope.definition(q[None], k[None], q_weight, k_weight, *angles, eps)
    kv_write.definition(k[0], v, slots, keys, values, key_scale, value_scale, key_offset)
    return q[0]
