"""The steps that `sample` and `topk` share, one launch after another."""

import torch
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.early import early
from tilestack.kernels.sampling.bound import bound_kernel
from tilestack.kernels.sampling.depths import DEPTHS
from tilestack.kernels.sampling.gather import HELD, PIECE, gather_kernel
from tilestack.kernels.sampling.keys import SHIFTS, SPAN
from tilestack.kernels.sampling.survey import GROUPS, survey_kernel
from tilestack.kernels.tiles import cdiv, next_power
from tilestack.ops.random import SLAB

LISTED = 1024  # candidates looked at together,
TILE = 4096  # and logits, where candidates have no room
WARPS = dict(survey=8, bound=4, gather=8, decide=16)


class Candidates:
    """The survey, bound and gather of a batch of rows, and the buffers that the last step reads."""

    def __init__(self, logits: Tensor, out: Tensor, seeds: Tensor, *settings: Tensor):
        """`settings` are temperature, top_k, top_p and min_p, all contiguous, as the seeds are; rows without filters have
        their token in `out` already."""
        rows, vocabulary = logits.shape
        self.spans = spans = cdiv(vocabulary, SPAN)
        shared = dict(SHIFT=SHIFTS[logits.dtype], SPANS=next_power(spans))
        self.constants = dict(shared, HELD=HELD, LISTED=LISTED, TILE=TILE, num_warps=WARPS["decide"])
        new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=logits.device)
        tops, scores, winners = new(rows, spans), new(rows, spans), new(rows, spans, dtype=torch.int32)
        maxima, depths = new(rows, spans, GROUPS), new(rows, spans, DEPTHS, dtype=torch.int32)
        self.stats, self.counts = new(rows, 3), new(rows, spans, dtype=torch.int32)
        self.values, self.packed_values = (new(rows, spans, HELD, dtype=logits.dtype) for _ in range(2))
        self.tokens, self.packed_tokens = (new(rows, spans, HELD, dtype=torch.int32) for _ in range(2))
        launch(
            survey_kernel, (rows, spans), logits, seeds, *settings, tops, scores, winners, maxima, depths,
            vocabulary, logits.stride(0),
            HALF=logits.dtype != torch.float32, SLAB=SLAB, GROUPS=GROUPS, DEPTHS=DEPTHS, SPAN=SPAN,
            num_warps=WARPS["survey"], **early(logits),
        )  # fmt: skip
        launch(
            bound_kernel, (rows,), *settings, tops, scores, winners, maxima, depths, self.stats, out, vocabulary, spans,
            **shared, GROUPS=GROUPS, DEPTHS=DEPTHS, num_warps=WARPS["bound"], **early(logits),
        )  # fmt: skip
        launch(
            gather_kernel, (rows, spans), logits, *settings, maxima, self.stats, self.values, self.tokens, self.counts,
            vocabulary, logits.stride(0),
            GROUPS=GROUPS, SPAN=SPAN, PIECE=PIECE, HELD=HELD, num_warps=WARPS["gather"], **early(logits),
        )  # fmt: skip
