"""Checks and measurements of this library on one GPU, in two visits; ``benchmarks/gpu.sh`` runs them.

`gpu.plan` lists the steps, `gpu.watch` runs them in processes with time limits, `gpu.record` keeps their figures.
"""
