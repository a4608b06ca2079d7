"""Answers of a public model for groups of private records, combined with noise (`dpllm aggregate`)."""
