"""Loaded by the process that others are forked from: in forks, DeepSpeed's collectives on CPUs are gloo's.

In each fresh environment, DeepSpeed would first compile an operation of its own for them, which takes a minute on two
cores. Interpreters of their own, in ``make test-deep``, use that operation.
"""

from __future__ import annotations

import deepspeed
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
