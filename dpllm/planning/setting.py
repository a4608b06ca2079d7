"""The settings of a training that determine its memory and its communication.

Place in the flow: input of `dpllm.planning.footprint`, beside the shape of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpllm.config import ConfigError, nearest

ENGINES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class Update:
    """The settings of the optimizer and of the released average."""

    averaged: bool = False
    """Whether the run keeps an average of its weights."""
    corrected: bool = False
    """Whether the optimizer is AdamW with a corrected second moment, whose moments are float32 everywhere."""
    moment_bits: int | None = None
    """Bits of an entry of AdamW's moments in bitsandbytes; None: they have the dtype of the weights."""


@dataclass(frozen=True, kw_only=True)
class Run(Update):
    """The settings of training that determine memory and communication.

    Raises:
        ConfigError: the engine is unknown, or the numbers do not fit it.
    """

    engine: str
    """One of `ENGINES`."""
    num_gpus: int
    """N."""
    rows: int
    """B: rows of a microbatch."""
    tokens: int
    """T: tokens of a row."""
    num_microbatches: int
    """M: microbatches of a step on each GPU."""
    checkpointing: bool
    """Whether a block keeps only its input and is recomputed in the backward pass."""
    bf16: bool
    """``train.bf16``."""
    unit_rows: int = 1
    """Largest number of rows of a unit; a unit with more than B rows goes through the model in several passes."""
    noise_tensors: int = 0
    """Tensors of the gradient's size, over all GPUs together, that correlated noise keeps between steps; 0 if the noise
    is independent or regenerated."""
    per_unit: bool = False
    """Whether one unit is run at a time (privacy.gradients=per_unit)."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.engine not in ENGINES:
            raise ConfigError(
                f"engine must be one of {', '.join(ENGINES)}, got {self.engine!r}{nearest(self.engine, ENGINES)}"
            )
        for name in ("num_gpus", "rows", "tokens", "num_microbatches", "unit_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.moment_bits is not None and self.is_deepspeed:
            raise ConfigError(f"optimizers of bitsandbytes have no estimate under {self.engine}; use adamw_torch")
        if self.per_unit and self.shards_weights:
            raise ConfigError(
                f"privacy.gradients=per_unit needs whole parameters, which {self.engine} shards; use single, ddp, "
                "zero1 or zero2"
            )
        if self.engine == "single" and self.num_gpus != 1:
            raise ConfigError(f"the engine single uses 1 GPU, not {self.num_gpus}; use ddp, fsdp2 or a zero engine")

    @property
    def is_fsdp(self) -> bool:
        """Whether PyTorch shards the model."""
        return self.engine == "fsdp2"

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed shards the model."""
        return self.engine.startswith("zero")

    @property
    def shards_weights(self) -> bool:
        """Whether parameters are sharded, and their sums formed one at a time."""
        return self.engine in ("fsdp2", "zero3")
