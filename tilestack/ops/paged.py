"""Attention over keys and values that lie in pages, and what puts them there: the two operators of a server's cache.

    block_tables [S, blocks]          keys, values [pages, page, kv_heads, dim]
      sequence 0   7 2 9 ·              page 7 holds tokens 0 … page - 1 of sequence 0, page 2 the next, …
      sequence 1   4 · · ·

A batch is flat: the new tokens of every sequence one after the other, a chunk of a prompt here and one token of decoding
there, cu_queries[s] to cu_queries[s + 1] those of sequence s. Where they stand is in device tensors; what the host knows
are shapes and a bound, so that a CUDA graph can replay a call with other contents.

Pages may hold codes of 8 bits (int8 or float8_e4m3fn), with a float32 scale for each token and head: a key is code · scale.
Here such numbers meet queries as they are; paged_codes.py makes codes of queries too, and multiplies codes.

Shapes: T tokens, S sequences, L = blocks · page.
"""

from typing import Any

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.attention import attention
from tilestack.ops.numerics import wide
from tilestack.ops.quantised import LARGEST_CODE, quantised

INTEGERS = (torch.int32, torch.int64)
CODES = tuple(LARGEST_CODE)


def pages_agree(name: str, pages: Tensor, scale: Tensor | None) -> bool | str:
    if pages.ndim != 4:
        return f"{name} must be [pages, page, kv_heads, dim], not {tuple(pages.shape)}"
    if (scale is not None) != (pages.dtype in CODES):
        return (
            f"{name} of {pages.dtype} {'need' if scale is None else 'have no'} a scale; int8 and float8_e4m3fn have one"
        )
    if scale is not None and (scale.shape != pages.shape[:3] or scale.dtype != torch.float32):
        return (
            f"the scale of {name} must be float32 of shape {tuple(pages.shape[:3])}, one for each token and head, "
            f"not {scale.dtype} {tuple(scale.shape)}"
        )
    return True


def caches_agree(
    keys: Tensor, values: Tensor | None, key_scale: Tensor | None, value_scale: Tensor | None
) -> bool | str:
    """Whether keys and values are one cache; without values, the first elements of the keys are."""
    if (reason := pages_agree("keys", keys, key_scale)) is not True:
        return reason
    if values is None:
        return value_scale is None or "value_scale needs values"
    if (reason := pages_agree("values", values, value_scale)) is not True:
        return reason
    return (keys.shape[:3], keys.dtype) == (values.shape[:3], values.dtype) or (
        f"keys and values must differ in dim alone, but they are {keys.dtype} {tuple(keys.shape)} and "
        f"{values.dtype} {tuple(values.shape)}"
    )


def paged_takes(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    cu_queries: Tensor,
    most_queries: int,
    value_dim: int | None,
    window: int | None,
    softcap: float | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> bool | str:
    if (reason := caches_agree(keys, values, key_scale, value_scale)) is not True:
        return reason
    if q.ndim != 3 or q.shape[2] != keys.shape[3] or not keys.shape[2] or q.shape[1] % keys.shape[2]:
        return (
            f"q must be [tokens, heads, {keys.shape[3]}] with a multiple of {keys.shape[2]} heads for these keys, "
            f"not {tuple(q.shape)}"
        )
    if (value_dim is None) != (values is not None) or not 0 < (value_dim or 1) <= keys.shape[3]:
        return f"value_dim says how much of the keys are the values where there are none, not {value_dim}"
    indices = dict(block_tables=block_tables, lengths=lengths, cu_queries=cu_queries)
    if wrong := [name for name, tensor in indices.items() if tensor.dtype not in INTEGERS]:
        return f"{wrong[0]} must be int32 or int64, not {indices[wrong[0]].dtype}"
    shapes = tuple(tuple(tensor.shape) for tensor in indices.values())
    count = lengths.shape[0] if lengths.ndim else 0
    if block_tables.ndim != 2 or shapes != ((count, block_tables.shape[-1]), (count,), (count + 1,)):
        return f"block_tables, lengths and cu_queries must be [S, blocks], [S] and [S + 1], not {shapes}"
    if most_queries < 0:
        return f"most_queries bounds the new tokens of a sequence, and cannot be {most_queries}"
    if window is not None and window < 1:
        return f"a window holds at least the token itself, so it must be 1 or more, not {window}"
    return softcap is None or softcap > 0 or f"softcap must be positive, or None, not {softcap}"


def paged_values_hold(
    q: Tensor, keys: Tensor, block_tables: Tensor, lengths: Tensor, cu_queries: Tensor, most_queries: int
) -> bool | str:
    ends, new, page = cu_queries.tolist(), cu_queries.diff(), keys.shape[1]
    if ends[0] or ends != sorted(ends) or ends[-1] > q.shape[0]:
        return f"cu_queries must rise from 0 to at most the {q.shape[0]} tokens, but are {ends}"
    longest = block_tables.shape[1] * page
    fits = (new <= most_queries) & (new <= lengths) & (lengths <= longest)
    if not bool(fits.all()):
        wrong = int(fits.logical_not().nonzero()[0])
        return (
            f"sequence {wrong} has {int(new[wrong])} new tokens and {int(lengths[wrong])} in all, but most_queries is "
            f"{most_queries} and its block table holds {longest}"
        )
    used = torch.arange(block_tables.shape[1], device=lengths.device) * page < lengths[:, None]
    strays = used & ((block_tables < 0) | (block_tables >= keys.shape[0]))
    return not bool(strays.any()) or f"block_tables{strays.nonzero()[0].tolist()} names none of {keys.shape[0]} pages"


def tokens_read(lengths: Tensor, cu_queries: Tensor, longest: int, window: int | None) -> list[tuple[int, int]]:
    """(new tokens, tokens that any of them sees) of each sequence; the most there can be where values are not known."""
    if lengths.is_meta:
        return [(1, min(longest, window or longest))] * lengths.shape[0]
    spans = zip(cu_queries.diff().tolist(), lengths.tolist(), strict=True)
    return [(new, min(length, (window or length) + new - 1)) for new, length in spans if new]


def paged_cost(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    cu_queries: Tensor,
    value_dim: int | None,
    window: int | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> Cost:
    read = tokens_read(lengths, cu_queries, block_tables.shape[1] * keys.shape[1], window)
    tokens, dim, value_dim = sum(seen for _, seen in read), keys.shape[3], value_dim or values.shape[3]  # type: ignore[union-attr]
    pairs = sum(new * seen - new * (new - 1) // 2 for new, seen in read) * q.shape[1]
    rows = [
        pages.new_empty((tokens, *pages.shape[2:]), device="meta")
        for pages in (keys, values, key_scale, value_scale)
        if pages is not None
    ]
    return Cost(flops=2 * pairs * (dim + value_dim), read=[q, block_tables, lengths, cu_queries, *rows])


def paged_key(
    q: Tensor, keys: Tensor, block_tables: Tensor, most_queries: int, value_dim: int | None, window: int | None
) -> tuple[int | str, ...]:
    words = (
        str(keys.dtype).removeprefix("torch."),
        "" if value_dim is None else "latent",
        "" if window is None else "window",
    )
    return (
        q.shape[0] * q.shape[1],
        block_tables.shape[1] * keys.shape[1],
        keys.shape[2],
        keys.shape[3],
        most_queries,
        *words,
    )


MIXES: dict[str, list[tuple[int, int]]] = dict(  # for each sequence, its new tokens and how many it has with them
    decode=[(1, 1), (1, 37), (1, 16)],
    mixed=[(5, 5), (1, 33), (0, 0), (17, 40), (0, 9)],
    prompt=[(33, 33)],
    chunk=[(18, 150)],
    uneven=[(1, 300)],  # where keys are split, into a number of parts that is no power of two
    nothing=[(0, 0), (0, 5)],
    many=[(1, 1 + 37 * number % 150) for number in range(80)],
) | {f"{count}x{length}": [(1, length)] * count for count in (1, 16, 64, 256) for length in (1024, 4096, 8192)}
MIXES["several"] = [(70, 200), (1, 333), (0, 40), (130, 130), (9, 257)]
MIXES["chunked"] = [(1, 1024)] * 63 + [(512, 1024)]
MIXES["reading"] = [(2048, 16384)]  # a chunk of a long prompt

PAGED_RULES: dict[str, dict[str, Any]] = dict(
    plain={}, long={}, window=dict(window=20), capped=dict(softcap=2.0), scaled=dict(scale=0.3)
)


def slots_of(block_tables: Tensor, lengths: Tensor, page: int) -> Tensor:
    """The places in the pages that hold a token."""
    position = torch.arange(block_tables.shape[1] * page, device=lengths.device)
    places = block_tables[:, position // page] * page + position % page
    return places[position < lengths[:, None]]


def drawn_pages(make, shape, live, cache):
    """Pages of a cache and their scale, with NaN where no token lives, so that reading there is seen."""
    drawn = make.normal(*shape, dtype=None if cache == "same" else torch.float32)
    pages, scale = (drawn, None) if cache == "same" else quantised(drawn, getattr(torch, cache))
    if live is not None:
        dead = torch.ones(shape[0] * shape[1], dtype=torch.bool, device=make.device).index_fill_(0, live, False)
        (pages if scale is None else scale)[dead.view(shape[:2])] = torch.nan
    return pages, scale


def paged_case(make, mix, page, heads, kv_heads, dim, value_dim, cache="same", rule="plain"):
    new, total = zip(*MIXES[mix], strict=True)
    blocks = [-(-length // page) for length in total]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)) + 1
    rows = [torch.nn.functional.pad(part, (0, max(blocks) + 1 - len(part))) for part in order.split(blocks)]
    integer = torch.int64 if rule == "long" else torch.int32
    tables = torch.stack(rows).to(integer)
    lengths = torch.tensor(total, dtype=integer)
    ends = torch.tensor([0, *new]).cumsum(0).to(integer)
    live = None if make.device.type == "meta" else slots_of(tables.long(), lengths, page).to(make.device)
    shape = sum(blocks) + 1, page, kv_heads
    keys, key_scale = drawn_pages(make, (*shape, dim), live, cache)
    values, value_scale = drawn_pages(make, (*shape, value_dim), live, cache) if "latent" not in rule else (None, None)
    return dict(
        q=make.normal(sum(new) + 3 * (mix == "mixed"), heads, dim),
        keys=keys,
        values=values,
        block_tables=tables.to(make.device),
        lengths=lengths.to(make.device),
        cu_queries=ends.to(make.device),
        most_queries=max(new),
        value_dim=value_dim if "latent" in rule else None,
        key_scale=key_scale,
        value_scale=value_scale,
        **PAGED_RULES.get(rule, {}),
    )


def paged_result(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    cu_queries: Tensor,
    most_queries: int,
    value_dim: int | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    return q.new_empty(*q.shape[:2], value_dim or values.shape[3])  # type: ignore[union-attr]


@operator(
    cases=cases(
        paged_case,
        check=[  # the batch, page, heads, kv_heads, dim, dim of v, what pages hold, what is seen
            ("decode", 16, 4, 2, 16, 16),
            ("mixed", 16, 6, 2, 16, 24, "same", "long"),
            ("mixed", 4, 2, 2, 24, 24, "same", "window"),
            ("mixed", 32, 8, 1, 16, 16, "int8"),
            ("decode", 16, 4, 2, 16, 16, "float8_e4m3fn"),
            ("mixed", 16, 4, 2, 48, 64, "float8_e4m3fn"),
            ("decode", 64, 3, 1, 80, 80, "int8", "window"),
            ("decode", 16, 20, 1, 288, 264, "same", "latent"),
            ("mixed", 16, 5, 1, 40, 32, "float8_e4m3fn", "latent"),
            ("decode", 8, 2, 1, 16, 16, "same", "latent"),
            ("prompt", 256, 2, 1, 96, 96, "same", "capped"),
            ("chunk", 16, 4, 1, 32, 32, "same", "scaled"),
            ("uneven", 16, 2, 1, 16, 16),
            ("nothing", 16, 2, 1, 16, 16),
        ],
        gpu=[  # of "many", more programs than a GPU runs at a time
            ("decode", 16, 4, 2, 64, 64, "float8_e4m3fn"),
            ("many", 16, 16, 8, 128, 128),
            ("many", 16, 16, 8, 128, 128, "float8_e4m3fn"),
            ("many", 16, 32, 8, 128, 128, "float8_e4m3fn"),
            ("many", 16, 32, 8, 64, 128, "int8"),
            ("many", 32, 24, 3, 64, 64),
            ("uneven", 16, 16, 2, 128, 128, "float8_e4m3fn", "long"),
        ],
        bench=[
            ("1x1024", 16, 16, 8, 128, 128),
            ("1x8192", 16, 32, 8, 128, 128),
            ("16x1024", 16, 16, 8, 128, 128),
            ("16x1024", 16, 16, 8, 128, 128, "float8_e4m3fn"),
            ("64x1024", 16, 16, 8, 128, 128),
            ("64x1024", 16, 16, 8, 128, 128, "float8_e4m3fn"),
            ("256x1024", 16, 16, 8, 128, 128),
            ("256x1024", 16, 16, 8, 128, 128, "float8_e4m3fn"),
            ("256x4096", 16, 32, 8, 128, 128),
            ("256x4096", 16, 32, 8, 128, 128, "float8_e4m3fn"),
            ("256x4096", 16, 32, 8, 128, 128, "int8"),
            ("64x4096", 64, 128, 1, 576, 512, "same", "latent"),  # DeepSeek-V3
            ("chunked", 16, 16, 8, 128, 128),
            ("reading", 16, 32, 8, 128, 128),
            ("reading", 16, 32, 8, 128, 128, "int8"),
        ],
    ),
    cost=paged_cost,
    check=paged_takes,
    check_values=paged_values_hold,
    dtypes=dict(keys=(), values=()),
    fake=paged_result,
    tuning_key=paged_key,
)
def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    cu_queries: Tensor,
    most_queries: int,
    value_dim: int | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """What queries [T, heads, dim] see of their sequences' pages: `attention` of each sequence, [T, heads, dim of v].

    keys are [pages, page, kv_heads, dim], values alike; without values, the first `value_dim` elements of the keys are
    (MLA). Sequence s has lengths[s] tokens with its new ones, cu_queries[s] to cu_queries[s + 1] of q, at most
    `most_queries`, and its tokens lie in the pages of block_tables[s]. A query sees the tokens up to its own, `window`
    of them at most. Tokens of q past the last sequence are padding, and theirs are zeros.
    """
    value_dim = value_dim or values.shape[3]  # type: ignore[union-attr]
    out = q.new_zeros(*q.shape[:2], value_dim)
    ends, page, queries = cu_queries.tolist(), keys.shape[1], wide(q)
    for table, length, start, end in zip(block_tables, lengths.tolist(), ends, ends[1:], strict=False):
        if start == end:
            continue
        first = max(length - (end - start) - (window or length) + 1, 0) // page  # the first page that any query sees
        mine = table[first : -(-length // page)]
        rows = mine, length - first * page, queries.dtype
        k = rows_in_pages(keys, key_scale, *rows)[None]
        v = k[..., :value_dim] if values is None else rows_in_pages(values, value_scale, *rows)[None]
        out[start:end] = attention.definition(queries[None, start:end], k, v, None, True, window, scale, softcap)[0]
    return out


def rows_in_pages(pages: Tensor, scale: Tensor | None, numbers: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The first tokens of some pages, [count, kv_heads, dim]: only these pages are copied, and only they are read."""
    rows = lambda x: x[numbers].flatten(0, 1)[:count].to(dtype)
    return rows(pages) if scale is None else rows(pages) * rows(scale)[..., None]
