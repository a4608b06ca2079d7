"""Tiny random models and the float64 loop that every clipped sum is compared with."""
