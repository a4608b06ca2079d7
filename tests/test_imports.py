"""Every module can be imported where an operating system or an installation has less than this one."""

import os
import sys

from tests import children

EVERY_MODULE = """
for module in pkgutil.walk_packages(dpllm.__path__, "dpllm."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def execute(code: str) -> None:
    """Execute a program in a fork, which has loaded libraries, but nothing of dpllm."""
    assert "dpllm" not in sys.modules
    exec(code, {"__name__": "program"})


def test_every_module_is_imported_without_what_windows_lacks(tmp_path):
    """Libraries look after themselves; they are imported before."""
    code = f"""
import importlib, os, pkgutil, signal, sys
import accelerate, datasets, filelock, peft, torch, transformers, transformers.trainer
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("fork", "geteuid", "getpgid", "getuid", "killpg", "pread", "pwrite", "sched_getaffinity"):
    delattr(os, name)
for name in ("SIGCONT", "SIGHUP", "SIGTSTP", "SIGTTOU", "SIGUSR1"):
    delattr(signal, name)
import dpllm
{EVERY_MODULE}
from dpllm.training.signals import STOPPING
assert STOPPING == (signal.SIGINT, signal.SIGTERM)
from dpllm.privacy.chained_file import fcntl
assert fcntl is None
os._exit(0)  # the rest of this process needs what is missing now
"""
    fork = children.Forked(execute, code, env=dict(os.environ), log=tmp_path / "log", cwd=tmp_path)
    assert children.wait_all([fork]) == [0], (tmp_path / "log").read_text()[-2000:]
