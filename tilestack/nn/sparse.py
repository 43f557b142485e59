"""Sparse matrices and where they come from: dense ones, and PyTorch's own sparse tensors.

    weight = BlockSparse.from_dense(pruned, side=64)
    y = weight @ x                       # sparse @ dense; x @ weight is dense @ sparse
    grads = weight.sample(dy, x.T)       # only those blocks of dy @ x.T that the weight has

All differentiate through `values` and the dense operand. 2:4 sparsity, two of every four elements, is PyTorch's own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import BackendError
from tilestack.contract.backends import checks_values
from tilestack.ops.sparse import SIDES, elements_exist, exist, rows_of_elements

MATRICES_MEET = "both must be matrices, and their inner sides equal"


@dataclass(frozen=True)
class BlockSparse:
    """A matrix of which only some blocks are there: `values` [blocks, side, side] and where each lies, counted in blocks."""

    values: Tensor
    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor):
            return  # a compiler's stand-in, of which nothing is known yet
        square = self.values.ndim == 3 and self.values.shape[1] == self.side
        if not square or self.side not in SIDES or any(size % self.side for size in self.shape):
            raise ValueError(
                f"blocks have sides of {', '.join(map(str, SIDES))} that divide those of the matrix; values are "
                f"{tuple(self.values.shape)}, the matrix {tuple(self.shape)}"
            )
        if not self.rows.shape == self.columns.shape == self.values.shape[:1]:
            raise ValueError(
                f"there are {len(self.values)} blocks, but rows are {tuple(self.rows.shape)} and columns "
                f"{tuple(self.columns.shape)}"
            )

    @property
    def side(self) -> int:
        return self.values.shape[-1]

    @classmethod
    def from_dense(cls, x: Tensor, side: int) -> "BlockSparse":
        """The blocks of a matrix that hold anything but zeros. The host waits to learn how many there are."""
        if x.ndim != 2 or side not in SIDES or any(size % side for size in x.shape):
            raise ValueError(f"a matrix whose sides are multiples of {side}, one of {SIDES}, not {tuple(x.shape)}")
        blocks = x.unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2)  # [lines, width, side, side]
        rows, columns = (blocks != 0).flatten(2).any(2).nonzero(as_tuple=True)
        return cls(blocks[rows, columns], rows.int(), columns.int(), (x.shape[0], x.shape[1]))

    @classmethod
    def from_torch(cls, x: Tensor, side: int) -> "BlockSparse":
        """From a sparse tensor of PyTorch in any layout; in torch.sparse_bsr with blocks of this side as it is, else by way of
        a dense one."""
        if x.layout == torch.sparse_bsr and x.values().shape[1:] == (side, side):
            rows = rows_of_elements(x.crow_indices(), x.values().shape[0])
            return cls(x.values(), rows.int(), x.col_indices().int(), (x.shape[0], x.shape[1]))
        return cls.from_dense(x.to_dense(), side)

    def to_dense(self) -> Tensor:
        lines, width = (size // self.side for size in self.shape)
        if checks_values(self.values.device) and (reason := exist(self.rows, lines, self.columns, width)) is not True:
            raise IndexError(f"a matrix of {tuple(self.shape)} in blocks of {self.side}: {reason}")
        blocks = self.values.new_zeros(lines * width, self.side, self.side)
        blocks = blocks.index_add(0, self.rows.long() * width + self.columns.long(), self.values)
        return blocks.unflatten(0, (lines, width)).transpose(1, 2).reshape(self.shape)

    def to_torch(self) -> Tensor:
        """As a torch.sparse_bsr tensor."""
        return self.to_dense().to_sparse_bsr((self.side, self.side))

    @property
    def T(self) -> "BlockSparse":
        return BlockSparse(self.values.mT, self.columns, self.rows, (self.shape[1], self.shape[0]))

    def __matmul__(self, x: Tensor) -> Tensor:
        if x.ndim != 2 or x.shape[0] != self.shape[1]:
            raise ValueError(f"a sparse matrix of {tuple(self.shape)} times {tuple(x.shape)}: {MATRICES_MEET}")
        return ops.block_sparse_dsd(self.values, self.rows, self.columns, x, self.shape[0] // self.side)

    # Tensor's own @ leaves dense @ sparse to this. A `__torch_function__` would be asked first, and torch.compile hands it
    # the operands of sparse @ dense in the order of dense @ sparse.
    def __rmatmul__(self, x: Tensor) -> Tensor:
        if x.ndim != 2 or x.shape[1] != self.shape[0]:
            raise ValueError(f"{tuple(x.shape)} times a sparse matrix of {tuple(self.shape)}: {MATRICES_MEET}")
        return ops.block_sparse_dds(x, self.values, self.rows, self.columns, self.shape[1] // self.side)

    def sample(self, a: Tensor, b: Tensor) -> "BlockSparse":
        """The blocks of a @ b that lie where this matrix has blocks."""
        if a.ndim != 2 or b.ndim != 2 or (a.shape[0], b.shape[1]) != tuple(self.shape):
            raise ValueError(
                f"a @ b is sampled where a matrix of {tuple(self.shape)} has blocks, but a is {tuple(a.shape)} and b "
                f"{tuple(b.shape)}"
            )
        values = ops.block_sparse_sdd(a, b, self.rows, self.columns, self.side)
        return BlockSparse(values, self.rows, self.columns, self.shape)


@dataclass(frozen=True)
class CompressedRows:
    """A matrix by rows of single elements (CSR): row r has those from offsets[r] up to offsets[r + 1]."""

    values: Tensor
    columns: Tensor
    offsets: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor):
            return  # a compiler's stand-in, of which nothing is known yet
        lists = self.values.ndim == 1 and self.columns.shape == self.values.shape
        if not lists or self.offsets.shape != (self.shape[0] + 1,):
            raise ValueError(
                f"a matrix of {tuple(self.shape)} has values and columns of one length and {self.shape[0] + 1} offsets, not "
                f"{tuple(self.values.shape)}, {tuple(self.columns.shape)} and {tuple(self.offsets.shape)}"
            )

    @classmethod
    def from_dense(cls, x: Tensor) -> "CompressedRows":
        if x.ndim != 2:
            raise ValueError(f"a matrix, not {tuple(x.shape)}")
        rows, columns = x.nonzero(as_tuple=True)
        starts = torch.arange(x.shape[0] + 1, device=x.device)
        return cls(x[rows, columns], columns.int(), torch.searchsorted(rows, starts), (x.shape[0], x.shape[1]))

    @classmethod
    def from_torch(cls, x: Tensor) -> "CompressedRows":
        """From a sparse matrix of PyTorch in any layout; one of blocks by way of a dense one."""
        if x.ndim != 2:
            raise ValueError(f"a matrix, not {tuple(x.shape)}")
        if x.layout in (torch.sparse_bsr, torch.sparse_bsc):
            x = x.to_dense()
        csr = x if x.layout == torch.sparse_csr else x.to_sparse_csr()
        return cls(csr.values(), csr.col_indices(), csr.crow_indices(), (x.shape[0], x.shape[1]))

    def to_torch(self) -> Tensor:
        return torch.sparse_csr_tensor(self.offsets.long(), self.columns.long(), self.values, self.shape)

    def to_dense(self) -> Tensor:
        if checks_values(self.values.device):
            reason = elements_exist(self.values, self.columns, self.offsets, self.shape[1])
            if reason is not True:
                raise IndexError(f"a matrix of {tuple(self.shape)} in compressed rows: {reason}")
        place = rows_of_elements(self.offsets, self.values.shape[0]) * self.shape[1] + self.columns.long()
        return self.values.new_zeros(self.shape[0] * self.shape[1]).index_add(0, place, self.values).view(self.shape)

    def __matmul__(self, x: Tensor) -> Tensor:
        """Times a matrix, or a vector."""
        if x.ndim not in (1, 2) or x.shape[0] != self.shape[1]:
            raise ValueError(f"a matrix of {self.shape} times a tensor of {tuple(x.shape)}: the inner sides differ")
        return ops.csr_matmul(self.values, self.columns, self.offsets, x)


def prune_2_4(x: Tensor) -> Tensor:
    """x with the two smallest of every four neighbours in a row set to zero; of equals the later go."""
    if not x.ndim or x.shape[-1] % 4:
        raise ValueError(f"rows must be multiples of four, but the shape is {tuple(x.shape)}")
    fours = x.unflatten(-1, (-1, 4))
    kept = fours.abs().argsort(dim=-1, descending=True, stable=True)[..., :2]
    return torch.zeros_like(fours).scatter(-1, kept, fours.gather(-1, kept)).flatten(-2)


def semi_structured(x: Tensor) -> Tensor:
    """A matrix of 2:4 sparsity as torch.sparse.to_sparse_semi_structured keeps it, for `F.linear` and `@` on sparse tensor
    cores; see `prune_2_4`."""
    if not x.is_cuda:
        raise BackendError(
            f"2:4 sparsity runs on the sparse tensor cores of NVIDIA GPUs from compute capability 8.0 on, and this matrix is on {x.device}"
        )
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        raise BackendError(
            "2:4 sparsity needs sparse tensor cores, which this GPU, older than compute capability 8.0, lacks"
        )
    return torch.sparse.to_sparse_semi_structured(x)
