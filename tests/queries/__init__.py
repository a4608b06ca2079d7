"""Tests of dpllm.queries."""
