"""``python -m dpllm.cli``."""

from dpllm.cli import main

main()
