"""Compiling many kernels at once, before the first of them is launched.

Triton compiles a kernel when it is launched and then goes on, on one core. Here the same calls are gone through twice:

    calls ──▶ listing.py: nothing is launched, and what Triton would compile is listed
          ──▶ pool.py ──▶ worker.py: as many processes as there are cores compile that into Triton's cache on disk
    calls ──▶ as ever, and whatever they launch is found in that cache

Nothing depends on it: what is not listed, or fails to compile here, is compiled where it is launched.
"""

from tilestack.ahead.pool import SAMPLES, compile_ahead

__all__ = ["SAMPLES", "compile_ahead"]
