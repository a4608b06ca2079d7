"""Triton's interpreter together with a recent NumPy, in the tests and in the benchmarks' toys."""

import importlib.metadata
import os
from typing import Any


def _version(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in importlib.metadata.version(package).split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ()


def mend() -> None:
    """Let the interpreter of Triton before 3.9 read its numbers: it holds them in arrays (1,).

    NumPy 2.4 and later convert only arrays without dimensions to a number. Nothing happens for newer versions of
    Triton, without it, or where the kernels are compiled.
    """
    old = () < _version("triton") < (3, 9) and _version("numpy") >= (2, 4)
    if not old or os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    whole: Any = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        whole(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    if whole.__name__ != patch.__name__:
        interpreter._patch_lang_tensor = patch
