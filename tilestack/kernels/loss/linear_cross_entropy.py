"""The head of a language model and its loss without the logits: rows in chunks, three cuBLAS products around one kernel.

         H             V                        for each chunk of rows, in one buffer of logits
      +-----+   +-------------+
    R |  x  |   |   logits    |    logits  = x @ weight.T
      +-----+   +-------------+    losses, and dlogits written over the logits       (kernels/loss/cross_entropy.py)
      |     |   |  (reused)   |    dx      = dlogits @ weight
      +-----+   +-------------+    dweight += dlogits.T @ x

What would be rows x V logits, their softmax and its gradient is one chunk. What arrives from above at a mean or a sum is
a scalar, so all of it happens in the forward, and the backward multiplies dx and dweight by that scalar. Otherwise (no
reduction, or float16, see `one_scalar_arrives`) the backward makes the logits again.

The products add up in float32; between chunks dweight is rounded to the weight's dtype. A buffer of CHUNK_BYTES holds so
many rows that this is a dozen roundings at most where row chunks of a few dozen make hundreds; a float32 sum would double or
triple the memory the operator is there to save.

The backend `aten` goes the same way with PyTorch's own functions in place of the kernel: less work than the definition's
gradient on a CPU.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.kernels.loss.cross_entropy import Options, losses_and_gradients, one_scalar_arrives, scale_in_place
from tilestack.kernels.tiles import as_matrix, cdiv
from tilestack.ops.autocast import autocast_dtype, lowered

CHUNK_BYTES = 192 << 20  # of logits at a time
MANY = 13  # chunks, as that makes of 8192 rows and 150 thousand words; where it would be more,
FEW = 8  # larger chunks, beside what else a step of so many rows keeps
ROW_MULTIPLE = 128  # rows of a chunk, for whole tiles in the products


class SideStream:
    """A second stream for a product that shares the GPU with the next one; on a CPU, nothing at all.

    The current device, which may be another than the tensors', is afterwards what it was before.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = side_stream(device) if device.type == "cuda" else None
        self.context = torch.cuda.stream(self.stream)

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            self.context.__exit__(*error)

    def join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def rows_per_chunk(rows: int, weight: Tensor) -> int:
    """A chunk's rows: what CHUNK_BYTES hold, and more where that would be many chunks, since each reads and writes dweight."""
    fitting = max(CHUNK_BYTES // (weight.shape[0] * weight.element_size()) // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    return fitting if rows <= MANY * fitting else cdiv(rows, FEW * ROW_MULTIPLE) * ROW_MULTIPLE


def chunked(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor | None,
    losses: Tensor | None,
    needs: tuple[bool, ...],
    options: Options,
    fill: Callable[..., None],
) -> tuple[Tensor | None, Tensor | None]:
    """Fill the losses, where wanted, and answer the gradients of x and weight that are needed, given each row's scale."""
    dtypes = x.dtype, weight.dtype
    x, weight = lowered(x, weight)
    rows, labels = as_matrix(x).contiguous(), labels.reshape(-1)
    losses = None if losses is None else losses.view(-1)
    dx = torch.empty_like(rows) if needs[0] else None
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if needs[1] else None
    if dweight is not None and not len(rows):
        dweight.zero_()
    chunk = min(rows_per_chunk(rows.shape[0], weight), rows.shape[0])
    buffer = torch.empty((chunk, weight.shape[0]), dtype=x.dtype, device=x.device)
    side = SideStream(x.device)
    for start in range(0, rows.shape[0], chunk or 1):
        part = slice(start, start + chunk)
        logits = torch.mm(rows[part], weight.T, out=buffer[: len(rows[part])])
        dlogits = logits if needs[0] or needs[1] else None
        of_part = scale if scale is None or scale.ndim == 0 else scale[part]
        fill(logits, labels[part], of_part, None if losses is None else losses[part], dlogits, options)
        if dx is not None:
            with side:  # few tiles and a very long sum: alone, it would leave most of the GPU idle
                torch.mm(logits, weight, out=dx[part])
        if dweight is not None:
            torch.addmm(dweight, logits.T, rows[part], beta=0 if start == 0 else 1, out=dweight)
        if dx is not None:
            side.join()
    return None if dx is None else dx.view(x.shape).to(dtypes[0]), None if dweight is None else dweight.to(dtypes[1])


def losses_and_gradients_by_aten(
    logits: Tensor,
    labels: Tensor,
    scale: Tensor | None,
    losses: Tensor | None,
    dlogits: Tensor | None,
    options: Options,
) -> None:
    """What the kernel does, by PyTorch's own functions, without the options that need more."""
    ignored = labels == options.ignore_index
    known = (labels >= 0) & (labels < logits.shape[1])
    label = labels.clamp(0, logits.shape[1] - 1).long()[:, None]
    log_p = torch.log_softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    if losses is not None:
        loss = torch.where(known, -log_p.gather(1, label)[:, 0], torch.nan)
        losses.copy_(torch.where(ignored, 0, loss))
    if dlogits is not None:
        assert scale is not None
        factor = torch.where(known, scale, torch.nan)[:, None]
        made = torch.exp(log_p, out=dlogits if dlogits.dtype == log_p.dtype else log_p)
        made.mul_(factor).scatter_add_(1, label, -factor)
        if made.is_cuda:
            made.masked_fill_(ignored[:, None], 0)
        else:  # where nobody waits for the number of rows, and few are to be written
            made.index_fill_(0, ignored.nonzero()[:, 0], 0)
        if made is not dlogits:
            dlogits.copy_(made)


def offer(
    backend: str,
    fill: Callable[..., None],
    scale_gradient: Callable[[Tensor, Tensor], Tensor],
    when: Callable[..., bool | str] | None = None,
) -> None:
    """Register the operator with a function that turns logits into losses and dlogits, and one that scales a gradient in place."""

    def forward(
        x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
        softcap: float, reduction: str,
    ) -> Tensor:  # fmt: skip
        options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
        labels = labels.contiguous()
        losses = options.losses_for(labels, x.dtype)
        chunked(x, weight, labels, None, losses, (False, False), options, fill)
        return options.reduce(losses, labels)

    def backward(
        grad: Tensor, x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float,
        z_loss: float, softcap: float, reduction: str, needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, None]:  # fmt: skip
        options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
        labels = labels.contiguous()
        return *chunked(x, weight, labels, options.row_scale(grad, labels), None, needs, options, fill), None

    def loss_and_gradients(
        x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
        softcap: float, reduction: str, needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """The loss and its gradients, from logits that are made once."""
        options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
        labels = labels.contiguous()
        losses = options.losses_for(labels, x.dtype)
        scale = options.row_scale(losses.new_ones(()), labels)
        gradients = chunked(x, weight, labels, scale, losses, needs, options, fill)
        return options.reduce(losses, labels), *gradients

    def scaled_gradients(grad: Tensor, dx: Tensor | None, dweight: Tensor | None) -> tuple[Tensor | None, ...]:
        return *(None if made is None else scale_gradient(made, grad) for made in (dx, dweight)), None

    extras = Extras(
        loss_and_gradients,
        scaled_gradients,
        when=lambda x, reduction: one_scalar_arrives(reduction, autocast_dtype(x) or x.dtype),
        fake=empty_gradients,  # a product saved is worth far more than a pass over dweight
        overwrites=("dx", "dweight"),
    )
    implements(ops.linear_cross_entropy, backend=backend, backward=backward, when=when, extras=extras)(forward)


def empty_gradients(x: Tensor, weight: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    empty = lambda like: torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return tuple(empty(like) if needed else None for like, needed in zip((x, weight), needs, strict=False))


def asks_no_more(label_smoothing: float, z_loss: float, softcap: float) -> bool | str:
    return not (label_smoothing or z_loss or softcap) or "it has no label smoothing, z-loss or softcap"


offer("triton", losses_and_gradients, scale_in_place)
offer("aten", losses_and_gradients_by_aten, Tensor.mul_, when=asks_no_more)
