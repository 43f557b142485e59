"""Whether the kernels are right.

`claims` says what is to be proved and `verify` proves it; `evaluate` computes both sides of a claim, and `oracle` judges how far
apart they may be.
`variants`, `memory_guards`, `interpreted` and `invariance` make it hard. `workers` proves in processes (`child_process`), on a
GPU that they share (`shared_gpu`); `refuted` says what went wrong. `proofs` keeps what was proved, and `proved` says what of
that still stands.
"""
