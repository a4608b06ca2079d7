"""Runs a program under FSDP2 on the CPU: accelerate launch … tests/distributed/fsdp2_on_cpu.py PROGRAM ARGUMENTS…

Accelerate sets up FSDP2 only on accelerators, although its code does not need one: here its state declares the gloo
processes to be accelerators, before the program begins, and the Trainer uses that state unchanged
(``use_configured_state``). The same code runs as on GPUs.
"""

from __future__ import annotations

import runpy
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType


def main() -> None:
    """Prepare the state, then run the program."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
