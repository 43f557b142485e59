"""The laboratory: what proves, measures and compares everything below it.

proof/       are the kernels right? `mutation/` asks the same of the proofs
tiles/       what a kernel reads and writes, counted and drawn
compile/     kernels for GPUs that are not here
bench/       how fast operators are, against their peers and the roofs
training/    how fast training is, and whether its losses are those of the definitions
serving/     how fast engines and servers answer
planning/    layouts on several GPUs
tables/      results in the documentation
report/      results in a browser

Here lies what all of them share: `machine` says where results are from, `results` keeps them on disk, `rows` holds one against
another and `contests` reads all of them, `source` and `stale` say whether they still hold, `units` and `labels` write them for
people. `doctor` says what will run here, and `catalogue` what operators there are.
"""
