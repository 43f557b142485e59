"""Kernels that begin before the one in front of them has ended, on Hopper and later GPUs.

A step of decoding is a chain of short kernels. Each would be started when the last block of the one before is done, and
only then ask for its first weights. With CUDA's programmatic dependent launch it is started sooner:

    kernel 1   wait │ work ──────────────────────────────│
    kernel 2        └─▶ start │ fetch weights │ wait ────┴│ work ────────────────│
    kernel 3                                              └─▶ start │ fetch … │ wait ┴│ work …

A kernel lets the next one begin when its own wait is over, so two are under way at a time, and one that has waited finds
everything that came before it done. What it does before it waits must not depend on any kernel at all: it asks for
weights to be brought into the L2 cache, where whoever writes them would write them too, and for nothing else. All its
programs wait, those with nothing to do as well: else it might end before the kernel in front of it.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    KNOWN_TO_TRITON = True
except ImportError:  # a version without them: kernels begin one after the other
    KNOWN_TO_TRITON = False

FIRST_CAPABILITY = 90
PIECE = 16  # bytes, of which what is fetched is made and on which it begins


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """Wait until all kernels in front have ended, and let the next one begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_rows(ptr, first, rows, stride, ROWS: tl.constexpr, PIECES: tl.constexpr, BYTES: tl.constexpr):
    """Have PIECES of BYTES bytes from `ptr` on brought into the L2 cache, for ROWS rows from the first on that lie `stride`
    elements apart; of those beyond `rows` the last one again. Nothing where there are no pieces."""
    if PIECES > 0:
        place = tl.arange(0, ROWS * PIECES)
        row = tl.minimum(first + place // PIECES, rows - 1).to(tl.int64)
        elements: tl.constexpr = BYTES * 8 // ptr.dtype.element_ty.primitive_bitwidth
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
            [ptr + row * stride + (place % PIECES) * elements, tl.full([ROWS * PIECES], BYTES, tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def begins_early(device: torch.device) -> bool:
    """Whether kernels on a device may begin before the one in front has ended."""
    if device.type == "cpu" or torch.version.hip or not KNOWN_TO_TRITON:
        return False
    return capability(device) >= FIRST_CAPABILITY


def capability(device: torch.device) -> int:
    return (
        capability_of_gpu(device) if device.type == "cuda" else triton.runtime.driver.active.get_current_target().arch
    )


@functools.cache
def capability_of_gpu(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def early(x: Tensor) -> dict[str, bool]:
    """Of a kernel that waits for the last: the constant that tells it to, and the option of its launch."""
    return dict(EARLY=True, launch_pdl=True) if begins_early(x.device) else dict(EARLY=False)


def pieces_of(weight: Tensor, rows: int, length: int, warps: int) -> tuple[int, int]:
    """(pieces, bytes of each) in which the threads of a program fetch so many elements of so many rows, each one once;
    no pieces where these do not begin on 16 bytes or their elements do not lie side by side."""
    size = length * weight.element_size()
    apart = weight.stride(0) * weight.element_size() | weight.data_ptr() | size
    if not size or apart % PIECE or weight.stride(1) != 1 or not begins_early(weight.device):
        return 0, 0
    pieces = max(32 * warps // rows, 1)
    while size % (pieces * PIECE):
        pieces //= 2
    return pieces, size // pieces
