"""``python -m dpllm.cli``."""

from dpllm.cli.program import main

main()
