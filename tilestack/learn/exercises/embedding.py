"""Addresses that come from memory: look up rows of a table.

    out[t, :] = weight[ids[t], :]              in PyTorch: weight[ids]
              = NaN, all of it                 where ids[t] is not a row of the table

         ids            weight [vocabulary, width]           out [tokens, width]
        ┌───┐          ┌──────────────────────┐            ┌──────────────────────┐
      0 │ 2 │───┐    0 │                      │    ┌────▶  │ ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ │ program 0
        ├───┤   │      ├──────────────────────┤    │       ├──────────────────────┤
      1 │ 0 │   └──▶ 2 │ ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ │────┘       │                      │ program 1
        └───┘          └──────────────────────┘            └──────────────────────┘

A program has one token: it loads a single number, the id, and the id says where to read. Until now a mask came from
sizes; now it also comes from data, since nobody promises that an id is in the table, and a kernel cannot raise an
error. It must not read outside, and its answer must be seen: NaN.

`tl.load(pointer)` of one address gives one number. `other=` is what a load gives where its mask is false.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def embedding_kernel(ids_ptr, weight_ptr, out_ptr, vocabulary, width, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)  # WIDTH is the power of two from `width` on
    # begin: yours
    # | # Yours: the token's id; its row of weight, or NaN where it has none; store it as row `token` of out.
    # | pass
    id = tl.load(ids_ptr + token).to(tl.int64)
    known = (id >= 0) & (id < vocabulary)
    row = tl.load(weight_ptr + id * width + column, mask=known & (column < width), other=float("nan"))
    tl.store(out_ptr + token * width + column, row, mask=column < width)
    # end


@implements(ops.embedding, backend="mine")
def embedding(ids, weight, padding_idx):
    ids, weight = ids.contiguous(), weight.contiguous()
    vocabulary, width = weight.shape
    out = torch.empty((*ids.shape, width), dtype=weight.dtype, device=weight.device)
    if out.numel():
        WIDTH = triton.next_power_of_2(width)
        embedding_kernel[(ids.numel(),)](ids, weight, out, vocabulary, width, WIDTH=WIDTH)
    return out


# begin: tutor
CASES = {  # so many ids that some are negative, and some too large
    "any ids": lambda make: dict(ids=make.integers(40, low=-2, high=7), weight=make.normal(5, 8)),
}
HINTS = [
    "id = tl.load(ids_ptr + token). Row `id` of weight begins at id * width, row `token` of out at token * width.",
    "The table has the rows 0 … vocabulary - 1, and an id may be negative: known = (id >= 0) & (id < vocabulary).",
    'row = tl.load(weight_ptr + id * width + column, mask=known & (column < width), other=float("nan")); the store '
    "is masked by column < width alone, so that an unknown id gets its NaN.",
]
MISTAKES = {
    "an id outside the table gives zeros instead of NaN": (
        lambda ids, weight: torch.where(
            ((ids >= 0) & (ids < len(weight)))[..., None], weight[ids.clamp(0, len(weight) - 1)], 0
        )
    ),
}
# end
