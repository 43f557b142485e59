"""Kernels in Gluon for Hopper (compute capability 9.0): warp-specialised, through TMA and WGMMA."""

from tilestack.kernels.hopper import attention

__all__ = ["attention"]
