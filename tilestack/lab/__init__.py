"""The laboratory: what proves, measures and compares everything below it. The files, by what they do:

prove       `verify` makes the claims, `evaluate` computes them, `oracle` judges; `variants`, `memory_guards`, `interpreted`
            and `invariance` make it hard; `workers` runs it in processes (`apart`), `proofs` and `proved` keep it; `mutation/` tests it
compile     `compile`, `launches`, `compile_sample`, `spills`, `explain`: kernels for GPUs that are not here
measure     `bench` for operators, with `timing`, `roofs`, `peers`, `idioms`, `rowwise`, `quality`; `memory`, `profile`, `tune`
            and `bench_*` for everything else, with what they time in `layers`, `train_steps`, `train_turns`, `plain_model`,
            `serve_candidates`, `serve_workloads`, `serve_steps`; `load/` asks any server
compare     `compare`, `parity`, `curves`, `chain`, `quantisation`
keep        `rows` and `results` on disk, `source` and `stale` for whether they still hold, `machine` for where they are from
show        `tables` and `generated` for the documentation, `bench_tables` for a terminal, `report`, `page` and `plots` for html
plan        `plan`, `plan_costs`, `comm`: layouts on several GPUs
"""
