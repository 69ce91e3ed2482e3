"""Benchmarks of swiftlet-mlx: each module is one, run with `python -m swiftlet_bench.NAME`."""
