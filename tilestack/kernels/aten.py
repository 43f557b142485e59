"""PyTorch's own fused function for an operator, where it has one, as the backend `aten`: the first peer to beat.

`auto` takes it wherever it measured faster than our kernels, so nobody is slower than PyTorch by using tilestack.
"""

import torch
import torch.nn.functional as F

from tilestack import ops
from tilestack.contract import AUTOGRAD, implements


def shares_dtype(x, weight):
    return weight is None or x.dtype == weight.dtype or "PyTorch's own function wants x and weight in one dtype"


def dense(x):
    return x.clone(memory_format=torch.contiguous_format)


def groups_well(x, groups, weight):
    if x.shape[1:].numel() // groups <= 2:
        return (
            "PyTorch's own GroupNorm loses its digits on groups of one or two elements, and has NaN gradients of none"
        )
    if x.device.type == "cpu" and x.shape[2:].numel() > 512:
        return "on the CPU, PyTorch's own GroupNorm loses digits in the weight gradients of channels this large"
    return shares_dtype(x, weight)


def sums_well(x, dim):
    length = x.shape[dim] if x.ndim else 1
    return (
        not (x.device.type == "cpu" and x.dtype == torch.float32 and length > 8192)
        or "on the CPU, PyTorch's own softmax loses digits of rows longer than 8192 in float32"
    )


def groups_on_hopper(x, weight):
    """What torch._grouped_mm asks for; elsewhere than on Hopper it leaves rubbish in the gradient of an empty group."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] != 9:
        return "PyTorch's own grouped product is right for empty groups only on Hopper"
    if 0 in (*x.shape, *weight.shape):
        return "PyTorch's own grouped product takes no empty matrices"
    return (x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0) or (
        f"PyTorch's own grouped product wants multiples of 8 columns, not {x.shape[1]} to {weight.shape[1]}"
    )


def aligned(x):
    """x contiguous from an address of 16 bytes on, copied only if it is not."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def grouped_linear(x, weight, offsets):
    offsets = offsets.contiguous()
    return zero_past(torch._grouped_mm(aligned(x), aligned(weight).mT, offs=offsets), offsets)


def grouped_linear_backward(grad, x, weight, offsets, needs):
    grad, offsets = aligned(grad), offsets.contiguous()
    dx = zero_past(torch._grouped_mm(grad, aligned(weight), offs=offsets), offsets) if needs[0] else None
    dweight = torch._grouped_mm(grad.T, aligned(x), offs=offsets) if needs[1] else None
    return dx, dweight, None


def zero_past(out, offsets):
    """Zeros in the rows past the last offset, which PyTorch's own grouped product leaves as it found them."""
    from tilestack.kernels.matmul.grouped import zero_rows_past  # where this runs, on Hopper, Triton does

    return zero_rows_past(out, offsets)


implements(ops.add, backend="aten", backward=AUTOGRAD)(torch.add)
implements(ops.axpy, backend="aten", backward=AUTOGRAD)(lambda x, y, alpha: torch.add(y, x, alpha=alpha))
implements(ops.relu, backend="aten", backward=AUTOGRAD)(torch.relu)
implements(ops.sigmoid, backend="aten", backward=AUTOGRAD)(torch.sigmoid)
implements(ops.tanh, backend="aten", backward=AUTOGRAD)(torch.tanh)
implements(ops.silu, backend="aten", backward=AUTOGRAD)(F.silu)
implements(ops.gelu, backend="aten", backward=AUTOGRAD)(lambda x, approximate: F.gelu(x, approximate=approximate))
implements(ops.softmax, backend="aten", backward=AUTOGRAD, when=sums_well)(lambda x, dim: torch.softmax(x, dim))
implements(ops.log_softmax, backend="aten", backward=AUTOGRAD)(lambda x, dim: torch.log_softmax(x, dim))
# In half precision its gradient is made from the rounded result.
implements(ops.logsumexp, backend="aten", backward=AUTOGRAD, dtypes=(torch.float32, torch.float64))(
    lambda x, dim: torch.logsumexp(x, dim)
)
implements(ops.linear, backend="aten", backward=AUTOGRAD)(F.linear)
implements(ops.bmm, backend="aten", backward=AUTOGRAD)(torch.bmm)
implements(ops.gram, backend="aten", backward=AUTOGRAD)(lambda x: x @ x.mT)
implements(ops.conv2d, backend="aten", backward=AUTOGRAD, deterministic=False)(  # cuDNN adds up gradients atomically
    lambda x, weight, bias, stride, padding, dilation, groups: F.conv2d(
        x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups
    )
)
implements(
    ops.grouped_linear,
    backend="aten",
    backward=grouped_linear_backward,
    when=groups_on_hopper,
    dtypes=(torch.bfloat16,),
)(grouped_linear)
implements(ops.rms_norm, backend="aten", backward=AUTOGRAD, when=shares_dtype)(
    lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps)
)
implements(ops.layer_norm, backend="aten", backward=AUTOGRAD, when=shares_dtype)(
    lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps)
)
implements(ops.copy, backend="aten", backward=AUTOGRAD)(dense)
implements(ops.strided_copy, backend="aten", backward=AUTOGRAD)(lambda x, step: dense(x[..., ::step]))
implements(ops.transpose, backend="aten", backward=AUTOGRAD)(lambda x: dense(x.mT))
implements(ops.permute, backend="aten", backward=AUTOGRAD)(lambda x, dims: dense(x.permute(dims)))
# Forward only: the gradient of index_select adds with atomics, so that two runs of it differ.
implements(ops.gather_rows, backend="aten")(lambda x, index: x.index_select(0, index))
implements(ops.reduce_sum, backend="aten", backward=AUTOGRAD)(lambda x, dim: x.sum(dim))
implements(ops.add_rms_norm, backend="aten", backward=AUTOGRAD, when=shares_dtype)(
    lambda x, residual, weight, eps: (F.rms_norm(summed := x + residual, x.shape[-1:], weight, eps), summed)
)
implements(ops.add_layer_norm, backend="aten", backward=AUTOGRAD, when=shares_dtype)(
    lambda x, residual, weight, bias, eps: (
        F.layer_norm(summed := x + residual, x.shape[-1:], weight, bias, eps),
        summed,
    )
)
implements(ops.group_norm, backend="aten", backward=AUTOGRAD, when=groups_well)(F.group_norm)
