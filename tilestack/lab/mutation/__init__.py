"""Whether the proofs bite: kernels broken on purpose (`mutants`), tried by the harness (`suite`) on the lines that each
claim reaches (`reach`), and what became of them (`record`)."""
