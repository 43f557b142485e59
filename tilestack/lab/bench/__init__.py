"""How fast operators are, and what else is measured of calls rather than of whole models.

operators       `operators` times backends and `peers` (`idioms`, `aten_rowwise`) as `candidates`, by the clock in `timing` and under
                the roofs in `roofs`; `quality` adds how exact a quantising one is, `run_ahead` compiles first, `watch` keeps
                to a budget
other parts     `optimizer_steps`, `host_time`, `memory_sweeps`, `quantised_models`, `startup`
what follows    `tune` searches for faster launches, `profile` shows where the time goes, `compare` holds two results against
                each other, `terminal_tables` prints rows
"""
