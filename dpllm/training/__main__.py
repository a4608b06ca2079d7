"""``python -m dpllm.training``: the program that every process of a launched run calls."""

from dpllm.training.finetune import program

program()
