"""Counts of public classes with noise (`dpllm count`)."""
