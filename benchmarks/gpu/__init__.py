"""Checks and measurements of this library on one GPU, stage by stage; ``benchmarks/gpu.sh`` runs them.

Each stage is a module with ``TITLE``, ``LIMIT`` (seconds) and ``STEPS``: names and functions that take the figures to
fill in and the `Setting`. `gpu.record` runs them, and saves after each.
"""
