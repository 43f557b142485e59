"""Kernels in Gluon for Hopper (compute capability 9.0): warp-specialised, through TMA and WGMMA."""
