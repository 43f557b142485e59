"""The backend `cuda`: kernels in CUDA C++, compiled on first use, to stand beside the Triton ones in `verify` and `bench`.

A `.cu` file here is a library of its own with plain C functions: they take addresses, sizes and a stream, launch, and
return CUDA's error code. No PyTorch headers, so that each compiles in seconds and holds nothing but CUDA; what tensors
are and how they lie is the Python file's that calls it. `auto` takes this backend only where it measured fastest.
"""

from tilestack.contract.backends import register_backend
from tilestack.kernels.cuda.build import cuda_needs

register_backend("cuda", cuda_needs)
