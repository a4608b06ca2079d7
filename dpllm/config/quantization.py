"""The value of ``model.quantization``: how the frozen weights under an adapter are stored.

`dpllm.models.quantization` makes the library's configuration from it, and `dpllm.planning` computes the bytes. A
quantised weight is not trained. The rows of a batch stay independent with 4-bit weights, and with 8-bit weights that
have one scale per matrix row and one per token.

Sources: Dettmers et al., QLoRA (2023), arXiv:2305.14314; Dettmers et al., LLM.int8() (2022), arXiv:2208.07339.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpllm.config import values
from dpllm.config.values import ConfigError, nearest, shown

KINDS = ("nf4", "fp4", "int8")
_OPTIONS = {"nf4": ("double",), "fp4": ("double",), "int8": ("outlier_threshold",)}
_BLOCK, _BLOCK_OF_SCALES = 64, 256  # entries that share a scale; scales that share one, in bitsandbytes
_FLOAT32 = 4


@dataclass(frozen=True)
class Quantization:
    """The stored form of frozen matrices.

    Attributes:
        kind: "nf4", "fp4" (4 bits) or "int8".
        double: whether the scales of 4-bit weights are quantised too, to 8 bits (QLoRA, section 3).
        outlier_threshold: of LLM.int8; only 0, no outlier columns, leaves rows independent.

    Raises:
        ConfigError: an unknown kind, or a threshold above 0.
    """

    kind: str
    double: bool = True
    outlier_threshold: float = 0.0

    def __post_init__(self) -> None:
        """Check every value."""
        values.choice("quantization.kind", self.kind, KINDS)
        values.flag("quantization.double", self.double)
        values.number("quantization.outlier_threshold", self.outlier_threshold)
        if self.outlier_threshold:
            raise ConfigError(
                f"quantization.outlier_threshold={self.outlier_threshold:g} chooses outlier columns over all rows of "
                "the batch (LLM.int8), so a row's gradient would depend on other rows. Leave it out: it is 0, "
                "every token then has its own scale. Or use nf4"
            )

    @classmethod
    def of(cls, value: Any) -> Quantization:
        """Read the value of a recipe: a word, or a mapping with ``kind`` and the options of that kind.

        Raises:
            ConfigError: an unknown kind or option, or a value out of range.

        >>> Quantization.of({"kind": "nf4", "double": False})
        Quantization(kind='nf4', double=False, outlier_threshold=0.0)
        """
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, Mapping) or "kind" not in value:
            raise ConfigError(
                f"quantization must be one of {', '.join(KINDS)}, or a mapping with kind, such as "
                f"{{kind: nf4, double: false}}, got {shown(value)}"
            )
        values.choice("quantization.kind", value["kind"], KINDS)
        known = _OPTIONS[value["kind"]]
        for key in value:
            if key != "kind" and key not in known:
                raise ConfigError(
                    f"quantization: {value['kind']} has no option {shown(key)}{nearest(str(key), known) or '.'} "
                    f"Its options are {', '.join(known)}"
                )
        return cls(**value)

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a matrix with its scales; tables of a few hundred bytes are not counted.

        >>> Quantization("nf4", double=False).num_bytes(64, 64), Quantization("int8").num_bytes(64, 64)
        (2304, 4352)
        """
        entries = outputs * inputs
        if self.kind == "int8":
            return entries + _FLOAT32 * outputs
        scales = -(-entries // _BLOCK)
        if not self.double:
            return -(-entries // 2) + _FLOAT32 * scales
        return -(-entries // 2) + scales + _FLOAT32 * -(-scales // _BLOCK_OF_SCALES)

    @property
    def words(self) -> str:
        """The stored form, for people."""
        if self.kind == "int8":
            return "int8 (bitsandbytes, no outlier columns)"
        return f"{self.kind} (bitsandbytes{', scales quantised to 8 bits' if self.double else ''})"


def check_quantization(value: Any, *, has_adapter: bool) -> None:
    """Check ``model.quantization`` and the section around it.

    Args:
        value: of the recipe; None: weights keep the type ``model.dtype``.
        has_adapter: whether ``model.adapter`` is given.

    Raises:
        ConfigError: a value that cannot be used, or nothing would be trained on top of the frozen weights.
    """
    if value is None:
        return
    kind = Quantization.of(value).kind
    if not has_adapter:
        raise ConfigError(
            f"quantization={kind} stores the weights in a form that cannot be trained: give adapter, such as "
            "{r: 16, target_modules: all-linear}, or leave quantization out"
        )
