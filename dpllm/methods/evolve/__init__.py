"""Synthetic text by votes of private records on texts of a public model (`dpllm evolve`)."""
