"""Whether the kernels are right.

`verify` makes the claims and proves them; `evaluate` computes both sides of one, and `oracle` judges how far apart they may be.
`variants`, `memory_guards`, `interpreted` and `invariance` make it hard. `workers` proves in processes (`child_process`), on a
GPU that they share (`shared_gpu`); `refuted` says what went wrong. `proofs` keeps what was proved, and `proved` says what of
that still stands.
"""
