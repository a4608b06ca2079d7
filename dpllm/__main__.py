"""The program ``dpllm``, also ``python -m dpllm``."""

from __future__ import annotations

from dpllm.cli.program import main

if __name__ == "__main__":
    main()
