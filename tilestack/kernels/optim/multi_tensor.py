"""One launch over many tensors: a table of addresses on the device, and a map from blocks to their place in it.

    table (int64)            t0      t1      t2             blocks (int32)   program  0  1  2  3  4  5
    row 0, lengths         2500      0    3000              which tensor              0  0  0  2  2  2
    row 1, address of …    0x7f…   0x7f…   0x7f…            which block of it         0  1  2  0  1  2
    row 2, address of …    0x7f…   0x7f…   0x7f…

A program reads its pair, then its tensor's column, and knows what to walk: a thousand small tensors cost one launch.
Addresses are compared on the host before each launch, and a row that changed (gradients are often new tensors in every
step) is copied again from pinned memory, without waiting for the device.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.kernels.tiles import cdiv

LENGTHS = 0  # the row of the table that holds how many elements each tensor has


class Table:
    """The addresses of some lists of tensors that are walked together, `rows` lists of `len(lengths)` tensors each."""

    def __init__(self, lengths: Sequence[int], rows: int, block: int, device: torch.device, record: int = 0):
        self.lengths = list(lengths)
        self.block = block
        self.addresses: list[list[int]] = [[] for _ in range(rows + 1)]
        self.entries = torch.empty((rows + 1, len(self.lengths)), dtype=torch.int64, device=device)
        self.records = torch.empty((len(self.lengths), record), dtype=torch.float64, device=device)
        counts = torch.tensor([cdiv(n, block) for n in self.lengths], dtype=torch.int64)
        tensor = torch.repeat_interleave(torch.arange(len(self.lengths)), counts)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        self.blocks = _to(torch.stack([tensor, torch.arange(len(tensor)) - first]).int(), device)
        self.staging: Tensor | None = None
        self.spare = (
            torch.empty(self.entries.shape, dtype=torch.int64, pin_memory=True) if self.entries.is_cuda else None
        )
        self._write(LENGTHS, self.lengths)

    def for_capture(self) -> "Table":
        """A table of the same lengths for a CUDA graph under capture, which reads its pinned copy again in every replay."""
        table = object.__new__(Table)
        table.lengths, table.block, table.blocks, table.spare = self.lengths, self.block, self.blocks, None
        table.addresses = [[] for _ in self.addresses]
        table.entries, table.records = torch.empty_like(self.entries), torch.empty_like(self.records)
        table.staging = (
            self.spare
            if self.spare is not None
            else torch.empty(self.entries.shape, dtype=torch.int64, pin_memory=True)
        )
        self.spare = None
        table._write(LENGTHS, self.lengths)
        return table

    @property
    def tensors(self) -> int:
        return len(self.lengths)

    @property
    def programs(self) -> int:
        return self.blocks.shape[1]

    def names(self, *lists: Sequence[Tensor]) -> bool:
        """Whether the rows after the lengths hold just these tensors' addresses."""
        return self.addresses[LENGTHS + 1 :] == [[tensor.data_ptr() for tensor in tensors] for tensors in lists]

    def point(self, *lists: Sequence[Tensor]) -> None:
        """Let the rows after the lengths name the tensors of these lists; a row that already does is not copied."""
        for row, tensors in enumerate(lists, LENGTHS + 1):
            addresses = [tensor.data_ptr() for tensor in tensors]
            if addresses != self.addresses[row]:
                self._write(row, addresses)

    def _write(self, row: int, values: list[int]) -> None:
        self.addresses[row] = values
        host = torch.tensor(values, dtype=torch.int64)
        if self.staging is not None:
            host = self.staging[row].copy_(host)
        elif self.entries.is_cuda:
            host = host.pin_memory()  # the allocator reuses it only after the copy below has run
        self.entries[row].copy_(host, non_blocking=True)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, str(dtype).removeprefix("torch."))


def _to(host: Tensor, device: torch.device) -> Tensor:
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@triton.jit
def place(table_ptr, blocks_ptr, index, blocks, BLOCK: tl.constexpr):
    """Which tensor a block belongs to, where in it the block starts, and how long the tensor is; in 64 bits."""
    tensor = tl.load(blocks_ptr + index).to(tl.int64)
    start = tl.load(blocks_ptr + blocks + index).to(tl.int64) * BLOCK
    return tensor, start, tl.load(table_ptr + tensor)


@triton.jit
def address(table_ptr, tensors, tensor, ROW: tl.constexpr):
    return tl.load(table_ptr + ROW * tensors + tensor)


@triton.jit
def fetch(location, start, lane, length, DTYPE: tl.constexpr, WHOLE: tl.constexpr):
    """A block of the tensor at an address. A WHOLE one lies inside the tensor and starts on 16 bytes: no mask, wide loads."""
    if WHOLE:
        x = tl.load(tl.multiple_of(location.to(tl.pointer_type(DTYPE)), 16) + start + lane)
    else:
        x = tl.load(location.to(tl.pointer_type(DTYPE)) + start + lane, mask=lane < length - start, other=0)
    return x


@triton.jit
def put(location, start, lane, length, value, DTYPE: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(tl.multiple_of(location.to(tl.pointer_type(DTYPE)), 16) + start + lane, value.to(DTYPE))
    else:
        tl.store(location.to(tl.pointer_type(DTYPE)) + start + lane, value.to(DTYPE), mask=lane < length - start)
