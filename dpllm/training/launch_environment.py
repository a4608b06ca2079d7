"""Settings that affect a run without being arguments: the environment of `accelerate launch`.

Place in the flow: called by `dpllm.training.arguments.private_arguments`, before data are read. An accelerate
configuration sets environment variables, which TrainingArguments do not contain.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from dpllm.config import ConfigError

_SPLITTING = {"TP": "tensor", "CP": "context", "SP": "sequence"}


def refuse_environment(environment: Mapping[str, str] | None = None) -> None:
    """Refuse settings of the accelerate configuration that cannot be kept private.

    Args:
        environment: environment variables. None: those of this process.

    Raises:
        ConfigError: torch.compile, fp16 or fp8, FSDP version 1, or parallelism that splits a unit's layers or rows is
            set; the message names it.

    >>> refuse_environment({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpllm.config.values.ConfigError: The accelerate configuration sets dynamo_backend
    (ACCELERATE_DYNAMO_BACKEND=INDUCTOR): ...
    """
    given = os.environ if environment is None else environment
    compiler = given.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.lower() not in ("", "no"):
        raise ConfigError(
            f"The accelerate configuration sets dynamo_backend (ACCELERATE_DYNAMO_BACKEND={compiler}): a compiled "
            'graph may fuse layers, so the hooks that compute the norms are lost. Set dynamo_backend: "NO"'
        )
    precision = given.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision.lower() in ("fp16", "fp8"):
        raise ConfigError(
            f"The accelerate configuration sets mixed_precision to {precision} (ACCELERATE_MIXED_PRECISION): "
            + (
                "its loss scaler skips steps depending on the data. "
                if precision.lower() == "fp16"
                else "its scales are chosen over all rows of a microbatch. "
            )
            + 'Set mixed_precision: "no" there, and train.bf16=true in the recipe'
        )
    if given.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and given.get("FSDP_VERSION", "1") == "1":
        raise ConfigError(
            "The accelerate configuration sets FSDP version 1, whose flat parameters hide the layers' parameters. Set "
            "fsdp_version: 2 (dpllm train --config fsdp2)"
        )
    for short, long in _SPLITTING.items():
        size = given.get(f"PARALLELISM_CONFIG_{short}_SIZE", "1")
        if size not in ("", "0", "1"):
            raise ConfigError(
                f"The accelerate configuration sets parallelism_config_{short.lower()}_size to {size}: {long} "
                "parallelism splits a unit's layers or rows over processes, and its norm with them. Leave it at 1"
            )


def find_deepspeed_config(root: Path, environment: MutableMapping[str, str] | None = None) -> None:
    """Make the DeepSpeed file of the shipped accelerate configurations available from any working directory.

    accelerate resolves its path from the folder in which ``accelerate launch`` was called. A path that does not exist
    there is resolved from the folder that contains ``accelerate_configs``.

    Args:
        root: the folder that contains ``accelerate_configs``.
        environment: environment variables, changed in place. None: those of this process.
    """
    given = os.environ if environment is None else environment
    name = given.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if name.endswith(".json") and not Path(name).exists() and (root / name).is_file():
        given["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(root / name)
