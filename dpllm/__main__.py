"""The program ``dpllm``, also ``python -m dpllm``. Without its packages it says how to install them."""

from __future__ import annotations

import sys

from dpllm.config import ConfigError
from dpllm.config.extras import require
from dpllm.config.mistakes import tell


def main() -> None:
    """Run the command line."""
    try:
        require("cli", "the command line")
    except ConfigError as error:
        sys.exit(tell(error))
    from dpllm.cli import app

    app()


if __name__ == "__main__":
    main()
