"""Serving measured: `bench_http` for what HTTP costs, `load/` to ask any server, `serve_steps` for the profiler.

The benchmark of engines lies one folder above, since the rows measured of them are hashed with its files by path.
"""
