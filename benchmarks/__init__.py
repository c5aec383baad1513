"""Benchmarks: each is one command that prints one table, `python -m benchmarks.NAME [-o FILE]`;
results are in `results/`.
"""
