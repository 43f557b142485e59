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
from tilestack.ops.sparse import SIDES, rows_of_elements


@dataclass(frozen=True)
class BlockSparse:
    """A matrix of which only some blocks are there: `values` [blocks, side, side] and where each lies, counted in blocks."""

    values: Tensor
    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if self.values.ndim != 3 or self.side not in SIDES or any(size % self.side for size in self.shape):
            raise ValueError(
                f"blocks have sides of {', '.join(map(str, SIDES))} that divide those of the matrix; values are "
                f"{tuple(self.values.shape)}, the matrix {tuple(self.shape)}"
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
        return ops.block_sparse_dsd(self.values, self.rows, self.columns, x, self.shape[0] // self.side)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return ops.block_sparse_dds(x, self.values, self.rows, self.columns, self.shape[1] // self.side)

    # So that Tensor's own @ leaves dense @ sparse to the line above.
    @classmethod
    def __torch_function__(cls, function: object, types: object, args: tuple = (), kwargs: object = None) -> Tensor:
        if function in (Tensor.__matmul__, Tensor.matmul, torch.matmul) and isinstance(args[1], BlockSparse):
            return args[1].__rmatmul__(args[0])
        return NotImplemented

    def sample(self, a: Tensor, b: Tensor) -> "BlockSparse":
        """The blocks of a @ b that lie where this matrix has blocks."""
        values = ops.block_sparse_sdd(a, b, self.rows, self.columns, self.side)
        return BlockSparse(values, self.rows, self.columns, self.shape)


@dataclass(frozen=True)
class CompressedRows:
    """A matrix by rows of single elements (CSR): row r has those from offsets[r] up to offsets[r + 1]."""

    values: Tensor
    columns: Tensor
    offsets: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_dense(cls, x: Tensor) -> "CompressedRows":
        if x.ndim != 2:
            raise ValueError(f"a matrix, not {tuple(x.shape)}")
        rows, columns = x.nonzero(as_tuple=True)
        starts = torch.arange(x.shape[0] + 1, device=x.device)
        return cls(x[rows, columns], columns.int(), torch.searchsorted(rows, starts), (x.shape[0], x.shape[1]))

    @classmethod
    def from_torch(cls, x: Tensor) -> "CompressedRows":
        """From a sparse matrix of PyTorch in any layout."""
        csr = x if x.layout == torch.sparse_csr else x.to_sparse_csr()
        return cls(csr.values(), csr.col_indices(), csr.crow_indices(), (x.shape[0], x.shape[1]))

    def to_torch(self) -> Tensor:
        return torch.sparse_csr_tensor(self.offsets.long(), self.columns.long(), self.values, self.shape)

    def to_dense(self) -> Tensor:
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
