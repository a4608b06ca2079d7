"""Settings that reach a run past its arguments: the environment of `accelerate launch`.

Place in the flow: called by `dpllm.training.arguments.private_arguments`, before data are touched. An accelerate
configuration speaks through environment variables, which TrainingArguments do not show.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from dpllm.config import ConfigError

_SPLITTING = {"TP": "tensor", "CP": "context", "SP": "sequence"}


def refuse_environment(environment: Mapping[str, str] | None = None) -> None:
    """Refuse what the accelerate configuration asks for and private training cannot keep private.

    Args:
        environment: variables of the process; None: its own.

    Raises:
        ConfigError: torch.compile, fp16 or fp8, FSDP version 1, or a way of splitting a unit's layers or rows; by name.

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
            'graph may fuse layers away from under the hooks that compute the norms. Set dynamo_backend: "NO"'
        )
    precision = given.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision.lower() in ("fp16", "fp8"):
        raise ConfigError(
            f"The accelerate configuration sets mixed_precision to {precision} (ACCELERATE_MIXED_PRECISION): "
            + (
                "its loss scaler skips steps by what the data does. "
                if precision.lower() == "fp16"
                else "its scales are chosen over all rows of a microbatch. "
            )
            + 'Set mixed_precision: "no" there, and train.bf16=true in the recipe'
        )
    if given.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and given.get("FSDP_VERSION", "1") == "1":
        raise ConfigError(
            "The accelerate configuration asks for FSDP version 1, whose flat parameters hide the layers' own. Set "
            "fsdp_version: 2 (accelerate_configs/fsdp2.yaml)"
        )
    for short, long in _SPLITTING.items():
        size = given.get(f"PARALLELISM_CONFIG_{short}_SIZE", "1")
        if size not in ("", "0", "1"):
            raise ConfigError(
                f"The accelerate configuration sets parallelism_config_{short.lower()}_size to {size}: {long} "
                "parallelism splits a unit's layers or rows over processes, and its norm with them. Leave it at 1"
            )


def find_deepspeed_config(root: Path, environment: MutableMapping[str, str] | None = None) -> None:
    """Let the DeepSpeed file of the shipped accelerate configurations be found from any working directory.

    accelerate takes its path from the folder in which ``accelerate launch`` was called. A path that leads nowhere from
    there is looked up below the folder that holds ``accelerate_configs``.

    Args:
        root: that folder.
        environment: variables of the process, changed in place; None: its own.
    """
    given = os.environ if environment is None else environment
    name = given.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if name.endswith(".json") and not Path(name).exists() and (root / name).is_file():
        given["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(root / name)
