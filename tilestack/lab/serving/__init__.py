"""Serving measured.

engines   `bench_serve` compares engines (`serve_candidates`) on workloads made by code (`serve_workloads`), and `serve_steps`
          hands single steps of ours to the profiler
servers   `bench_http` says what HTTP costs, `load/` asks any server
"""
