"""Kernels compiled for GPUs that are not here.

`launches` records what launchers ask for, `sample` picks what of it is worth compiling, `absent_gpu` compiles it and reads what
the assembler says, `spills` lists what is owed, and `explain` shows it to a person.
"""
