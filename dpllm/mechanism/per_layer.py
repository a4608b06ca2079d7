"""Per-layer clipping: each layer is bounded separately, so that large gradients do not suppress the other layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dpllm.mechanism.clipping import NormBound

if TYPE_CHECKING:
    from torch import Tensor

_WRAPPER = ("base_model", "model")  # PEFT's path of the wrapped model
_INSIDE_A_LAYER = ("base_layer", "modules_to_save", "original_module")  # PEFT's names for a wrapped layer


@dataclass(frozen=True)
class PerLayerClipping(NormBound):
    """Scale each unit's gradient in each of G layers to a norm of at most C / √G.

    Per-layer clipping of McMahan et al. 2018 (arXiv:1710.06963), with an equal share for each layer. The norm of a
    contribution over all layers is at most √(G · C²/G) = C, so the privacy event is that of `FlatClipping`. Only names
    determine the layers (`layer_of`), so they do not depend on the data.
    """

    kind: ClassVar[str] = "per-layer"

    def groups(self, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Sequence[str]]:
        """Return the names of each layer's trainable parameters, in the order of the model.

        Args:
            shapes: name and shape of each trainable parameter. A layer without any is not a group and takes no share of
                C.

        >>> PerLayerClipping(1.0).groups({"h.0.fc.weight": (2, 2), "h.0.fc.bias": (2,), "head.weight": (2, 2)})
        [['h.0.fc.weight', 'h.0.fc.bias'], ['head.weight']]
        """
        layers: dict[str, list[str]] = {}
        for name in shapes:
            layers.setdefault(layer_of(name), []).append(name)
        return list(layers.values())

    def factors(self, norm_GU: Tensor) -> Tensor:
        """Return c_gu = min(1, C / (√G ||g_gu||)).

        Args:
            norm_GU: (G, U) l2 norms, rounded up, above 0 and finite.

        Returns:
            (G, U) factors in [0, 1].

        >>> import torch
        >>> PerLayerClipping(2.0).factors(torch.tensor([[2.0], [0.5], [4.0], [1.0]])).flatten()
        tensor([0.5000, 1.0000, 0.2500, 1.0000])
        """
        return self.group_factors(0, len(norm_GU), norm_GU)

    def group_factors(self, group: int, num_groups: int, norm_U: Tensor) -> Tensor:
        """Return min(1, C / (√G ||g||)), which is the same in every group."""
        return (self.clip_norm / math.sqrt(num_groups) / norm_U).clamp_max(1)

    def words(self) -> str:
        """Return how a gradient is bounded, for the report."""
        return (
            "is clipped in each of the G layers of the model to norm C/√G, over all layers together to norm "
            f"C = {self.clip_norm:g}"
        )


def layer_of(name: str) -> str:
    """Return the layer of a parameter: its name up to and including the first number.

    A name without a number gives the first two module names after PEFT's. A weight, its bias and its LoRA matrices are
    in one layer.

    >>> layer_of("model.layers.3.self_attn.q_proj.weight"), layer_of("model.norm.weight"), layer_of("lm_head.weight")
    ('model.layers.3', 'model.norm', 'lm_head')
    >>> layer_of("base_model.model.lm_head.lora_A.default.weight")
    'base_model.model.lm_head'
    """
    parts = name.split(".")
    inside = (number for number, part in enumerate(parts) if part.startswith("lora_") or part in _INSIDE_A_LAYER)
    modules = parts[: next(inside, len(parts) - 1)]
    for number, part in enumerate(modules):
        if part.isdecimal():
            return ".".join(modules[: number + 1])
    start = len(_WRAPPER) if tuple(modules[: len(_WRAPPER)]) == _WRAPPER else 0
    return ".".join(modules[: start + 2])
