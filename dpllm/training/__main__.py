"""``python -m dpllm.training``: the program that every process of a launched run calls."""

from dpllm.config.extras import hush

hush()

from dpllm.training.finetune import program  # noqa: E402 - it imports the libraries

program()
