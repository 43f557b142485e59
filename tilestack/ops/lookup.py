"""Rows of a table by number: the embedding, and how every look-up treats a number that the table does not have."""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import named_rows_exist


def rows_or_nan(table: Tensor, ids: Tensor) -> Tensor:
    """table[ids], with a row of NaN for a number outside the table: seen in the result, with no read out of bounds."""
    if table.shape[0] == 0:
        return table.new_full((*ids.shape, *table.shape[1:]), torch.nan)
    known = (ids >= 0) & (ids < table.shape[0])
    return torch.where(known[..., None], table[torch.where(known, ids, 0)], torch.nan)


def rows_named(table: Tensor, ids: Tensor | None, count: int = 0) -> Tensor:
    """The rows of a table that a look-up must read, each once: those ids name, or the first `count` without ids.

    Ids that have no values, on the meta device, may name as many rows as there are of either.
    """
    if ids is None:
        rows = min(count, table.shape[0])
    elif ids.is_meta:
        rows = min(ids.numel(), table.shape[0])
    else:
        rows = ids[(ids >= 0) & (ids < table.shape[0])].unique().numel()
    return table.new_empty(rows, *table.shape[1:], device="meta")


def embedding_takes(ids: Tensor, weight: Tensor, padding_idx: int | None) -> bool | str:
    if ids.dtype not in (torch.int32, torch.int64):
        return f"ids must be int32 or int64, not {ids.dtype}"
    if weight.ndim != 2:
        return f"weight must be [vocabulary, width], not {tuple(weight.shape)}"
    return (
        padding_idx is None
        or 0 <= padding_idx < weight.shape[0]
        or f"padding_idx must be a row of weight, 0 to {weight.shape[0] - 1}, not {padding_idx}"
    )


def embedding_case(make, tokens, vocabulary, width, different_ids):
    return dict(ids=make.integers(tokens, high=different_ids), weight=make.normal(vocabulary, width))


def batch_case(make, batch, tokens, vocabulary, width, different_ids):
    return dict(ids=make.integers(batch, tokens, high=different_ids), weight=make.normal(vocabulary, width))


def awkward_case(make, tokens, vocabulary, width, padding_idx=3):
    """Ids from outside the vocabulary on both sides, and a padding row; too large for finite differences of its row."""
    ids = make.integers(tokens, low=-2, high=vocabulary + 2)
    ids[::5], ids[1], ids[2] = padding_idx, -1, vocabulary
    return dict(ids=ids, weight=make.normal(vocabulary, width), padding_idx=padding_idx)


def looked_up(ids: Tensor, weight: Tensor) -> Cost:
    return Cost(read=[ids, rows_named(weight, ids)], backward_read=[ids], backward_flops=ids.numel() * weight.shape[1])


@operator(
    cases=cases(
        embedding_case,
        check=[(1, 1, 1, 1), (7, 5, 33, 5), (300, 17, 8, 2), (0, 4, 8, 4), (5, 4, 0, 4)],
        bench=[(8192, 151936, 1024, 151936), (8192, 128256, 4096, 128256), (8192, 151936, 1024, 8)],
    )
    + cases(batch_case, check=[(2, 40, 9, 20, 9)])
    + cases(awkward_case, check=[(30, 50, 100)]),
    cost=looked_up,
    check=embedding_takes,
    check_values=lambda ids, weight: named_rows_exist("ids", ids, weight.shape[0]),
)
def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """The rows of weight that ids name, [*ids.shape, width].

    The row `padding_idx` gets no gradient. An id outside the vocabulary gives a row of NaN and adds to no gradient.
    """
    rows = rows_or_nan(weight, ids)
    return rows if padding_idx is None else torch.where((ids == padding_idx)[..., None], rows.detach(), rows)
