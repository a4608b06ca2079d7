"""Tests of dpllm.methods.queries."""
