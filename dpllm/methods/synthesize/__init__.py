"""Synthetic text: data sets from released models, their evaluation, and Private Evolution without training."""
