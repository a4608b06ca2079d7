"""The programs compile for GPUs, which the interpreter does not show, into the instructions that their promises need.

Triton brings its own assembler, so neither a GPU nor a driver is needed; a separate process is, since the interpreter
is chosen once per process.
"""

import importlib.util
import json
import os
import re
import sys

import pytest

from tests import children

# Launches compile and record instead of running; the driver only gives the target of the compilation.
COMPILE = """
import json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from dpllm.ghost import triton_launch

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

driver.set_active(Driver())
run, found = JITFunction.run, []
def compile_only(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    found.append([self.fn.__name__, str(dtype), kernel.asm["ptx"]])
JITFunction.run = compile_only
triton_launch._require = lambda name, *tensors: None

for dtype in (torch.bfloat16, torch.float32):
    def x(*shape):
        return torch.empty(shape, dtype=dtype)
    # Sizes of one become constants, which makes a separate program.
    for rows, tokens, width in ((1, 1, 1), (8, 512, 64)):
        triton_launch.grouped_gram_norms([(x(rows, tokens, width), [x(rows, tokens, width), x(rows, tokens, 80)])])
        triton_launch.instance_norms(x(rows, tokens, width), x(rows, tokens, 80))
        total = torch.empty(width, 80)
        triton_launch.weighted_outer_(total, total, x(rows, tokens, width), x(rows, tokens, 80), torch.ones(rows))
        index, unit = torch.zeros(rows, tokens, dtype=torch.long), torch.arange(rows)
        triton_launch.lookup_norms(index, x(rows, tokens, width), unit, rows, 9)
print(json.dumps(found))
"""


@pytest.mark.deep
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_programs_compile_for_gpus(tmp_path):
    """For Hopper: tensor cores for bfloat16, no TF32 for float32, and no atomics, whose order would vary."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = children.run([sys.executable, "-W", "error::UserWarning", "-c", COMPILE, "90"], env=environment)
    compiled = json.loads(result.stdout.splitlines()[-1])
    names = {name for name, _, _ in compiled}
    assert names == {f"{name}_program" for name in ("gram", "outer", "run", "segment")}
    for name, dtype, ptx in compiled:
        assert ".entry" in ptx and not re.search(r"tf32|\b(atom|red)\.", ptx)
        if name in ("gram_program", "outer_program"):
            assert (".bf16.bf16" in ptx) == (dtype == "torch.bfloat16")
