"""Products of matrices in CUDA C++: on plain cores, which any dtype can, and on tensor cores, for halves."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.kernels.cuda.build import DTYPES, call, library
from tilestack.kernels.matmul.products import HALVES, linear_by, linear_gradients_by

IN_VECTOR = 8  # halves in 16 bytes


def tiled_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a @ b + bias for matrices of any strides."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    bias = None if bias is None else bias.contiguous()
    if c.numel():
        strides = *a.stride(), *b.T.stride()
        call(library("matmul_tiled.cu").matmul_tiled, a.device, a, b, bias, c, M, N, K, *strides, DTYPES[a.dtype])
    return c


def tensor_core_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a @ b + bias for matrices of any strides, copied where they do not lie as the kernel reads them."""
    M, N = a.shape[0], b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    a, b = rows_of_vectors(a), rows_of_vectors(b.T)
    bias = None if bias is None else bias.contiguous()
    if c.numel():
        product = library("matmul_tensor_cores.cu").matmul_tensor_cores
        call(product, a.device, a, b, bias, c, M, N, a.shape[1], DTYPES[a.dtype])
    return c


def rows_of_vectors(matrix: Tensor) -> Tensor:
    """The matrix with contiguous rows of whole vectors on 16 bytes, filled up with zeros; copied only if it must be."""
    if over := matrix.shape[1] % IN_VECTOR:
        return F.pad(matrix, (0, IN_VECTOR - over)).contiguous()
    matrix = matrix.contiguous()
    return matrix if matrix.data_ptr() % 16 == 0 else matrix.clone()


def has_tensor_cores(x: Tensor) -> bool | str:
    capable = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)
    return capable or "its tensor-core instructions need compute capability 8.0 or higher"


def tiled_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]):
    return linear_gradients_by(tiled_product, grad, x, weight, bias, needs)


def tensor_core_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]):
    return linear_gradients_by(tensor_core_product, grad, x, weight, bias, needs)


@implements(ops.linear, backend="cuda_tiled", backward=tiled_backward)
def linear_tiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_by(tiled_product, x, weight, bias)


@implements(ops.linear, backend="cuda", backward=tensor_core_backward, when=has_tensor_cores, dtypes=HALVES)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_by(tensor_core_product, x, weight, bias)
