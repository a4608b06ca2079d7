"""Clip factors computed from norms: of the whole gradient, by groups or layers, or to a quantile of the norms.

**A quantile.** The threshold follows it by a noisy count that is part of each step's event. Step t has a threshold Q_t,
which is fixed before the step. A unit contributes two things to it:

* its gradient, clipped to Q_t and scaled by C / Q_t. Its norm is at most C, whatever Q_t is. Andrew et al. add noise of
  standard deviation σ_g Q_t to the sum of gradients clipped to Q_t; here sum and noise are divided by Q_t and
  multiplied by the constant C. So a learning rate keeps its meaning while Q_t changes, and the noise has the same
  standard deviation in each step;
* its share of a count: ½ if its norm is at most Q_t, otherwise -½, including non-finite gradients.

The sum of gradients gets noise of standard deviation σ_g C, and the count noise of σ_b. Divided by these deviations,
one unit's contribution to both is a vector of squared norm at most 1/σ_g² + 1/(2σ_b)², and σ_g is chosen so that this
is 1/σ². So a step is one Gaussian release with noise multiplier σ, sampled and composed as without the count. This
holds under zero-out. If a unit is replaced by a different one, the gradients change by at most 2C and the count by at
most 1, which is twice as much in both. It also holds for noise that is correlated over steps: the count is an
additional coordinate of the release, and its noise comes from the same stream with the same strategy. Q_t depends only
on earlier noisy counts, so it is a function of earlier releases.

The count is divided by the public expected batch size b, never by the number of units in the step, which is private.

Source: Andrew, Thakkar, McMahan and Ramaswamy 2021, arXiv:1905.03871, with σ_g and σ_b from their Theorem 1.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpllm.mechanism.limits import MAX_CLIP_NORM, MIN_CLIP_NORM
from dpllm.mechanism.parts import OneGroup

if TYPE_CHECKING:
    from torch import Tensor


def sensitivity_of(clip_norm: float, adjacency: str) -> float:
    """Return the largest l2 change between neighbours of a sum of contributions of at most ``clip_norm``.

    Args:
        clip_norm: C.
        adjacency: "zero-out" (a unit's contribution is replaced by nothing) gives C; "replace-one" gives 2C.
    """
    if adjacency not in ("zero-out", "replace-one"):
        raise ValueError(f"adjacency is {adjacency!r}; choose 'zero-out' or 'replace-one'.")
    return clip_norm if adjacency == "zero-out" else 2 * clip_norm


def check_clip_norm(clip_norm: float) -> None:
    """Refuse a clip norm that is not a positive finite number.

    Raises:
        ValueError: it is not above 0, or not finite.
    """
    if not (isinstance(clip_norm, (int, float)) and math.isfinite(clip_norm) and clip_norm > 0):
        raise ValueError(f"clip_norm is {clip_norm!r}; it must be a finite number above 0, for instance 1.0.")


@dataclass(frozen=True)
class NormBound:
    """The shared part of clippings: a contribution has an l2 norm of at most C over all parameters together.

    Attributes:
        clip_norm: C > 0.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        """Check the clip norm."""
        check_clip_norm(self.clip_norm)

    def sensitivity(self, adjacency: str) -> float:
        """Return the largest l2 change of the clipped sum between neighbouring data sets (`sensitivity_of`)."""
        return sensitivity_of(self.clip_norm, adjacency)


@dataclass(frozen=True)
class FlatClipping(NormBound, OneGroup):
    """Scale each unit's whole gradient to a norm of at most C (Abadi et al. 2016, arXiv:1607.00133)."""

    kind: ClassVar[str] = "flat"

    def factors(self, norm_GU: Tensor) -> Tensor:
        """Return c_u = min(1, C / ||g_u||).

        Args:
            norm_GU: (G, U) l2 norms, rounded up, above 0 and finite.

        Returns:
            (G, U) factors in [0, 1].

        >>> import torch
        >>> FlatClipping(1.0).factors(torch.tensor([2.0, 0.5]))
        tensor([0.5000, 1.0000])
        """
        return (self.clip_norm / norm_GU).clamp_max(1)

    def words(self) -> str:
        """Return how a gradient is bounded, for the report."""
        return f"is clipped once to norm C = {self.clip_norm:g}"


_MIN_STABILITY = 1e-9  # the norm of a gradient that means anything is far longer
_MAX_FACTOR = 1e30  # far within float32


@dataclass(frozen=True)
class AutomaticClipping(NormBound, OneGroup):
    """Scale each unit's gradient by C / (norm + stability), AUTO-S (Bu et al. 2022, arXiv:2206.07136).

    A contribution is always shorter than C, so the privacy event is that of `FlatClipping`. C only scales the learning
    rate; with an optimizer that normalises, such as Adam, it has no effect.

    Attributes:
        stability: γ, at least 1e-9 and at least C / 1e30, so that every factor is finite. It keeps short gradients
            short: with γ = 0 a nearly flat loss would count as much as a steep one.
    """

    kind: ClassVar[str] = "automatic"
    stability: float = 0.01

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        known = isinstance(self.stability, (int, float)) and not isinstance(self.stability, bool)
        least = max(_MIN_STABILITY, self.clip_norm / _MAX_FACTOR)
        if not known or not least <= self.stability <= sys.float_info.max:
            huge = known and isinstance(self.stability, int) and self.stability > 0
            shown = "beyond every float" if huge and self.stability > sys.float_info.max else repr(self.stability)
            raise ValueError(f"stability is {shown}; it must be a finite number of at least {least:g}, usually 0.01")

    def factors(self, norm_GU: Tensor) -> Tensor:
        """Return c_u = C / (||g_u|| + γ).

        Args:
            norm_GU: (G, U) l2 norms, rounded up, above 0 and finite.

        Returns:
            (G, U) factors; above 1 where a gradient is shorter than C - γ.

        >>> import torch
        >>> AutomaticClipping(1.0).factors(torch.tensor([0.99, 0.09]))
        tensor([ 1., 10.])
        """
        return self.clip_norm / (norm_GU + self.stability)

    def words(self) -> str:
        """Return how a gradient is bounded, for the report."""
        return f"is scaled by C / (its norm + {self.stability:g}), to a norm below C = {self.clip_norm:g} (AUTO-S)"


@dataclass(frozen=True)
class AdaptiveScaleClipping(AutomaticClipping):
    """Scale each unit's gradient by C / (norm + r / (norm + r)), DP-PSAC (Xia et al. 2023, arXiv:2212.00328).

    Long gradients get nearly the norm C, as in `AutomaticClipping`. A gradient shorter than about √r is not scaled up
    in the same way: its factor falls to C again, where AUTO-S gives it the largest factor of all. A contribution is
    always shorter than C, so the privacy event is that of `FlatClipping`.

    Attributes:
        stability: r, at most 1 and with the lower bounds of `AutomaticClipping`. No factor exceeds C / (2√r - r).
    """

    kind: ClassVar[str] = "psac"

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        if self.stability > 1:
            raise ValueError(f"stability is {self.stability:g}; for psac it must be at most 1, usually 0.01")

    def factors(self, norm_GU: Tensor) -> Tensor:
        """Return c_u = C / (||g_u|| + r / (||g_u|| + r)).

        Args:
            norm_GU: (G, U) l2 norms, rounded up, above 0 and finite.

        Returns:
            (G, U) factors; largest at ||g_u|| = √r - r.

        >>> import torch
        >>> AdaptiveScaleClipping(1.0, 0.04).factors(torch.tensor([1e-9, 0.16, 4.0])).round(decimals=2)
        tensor([1.0000, 2.7800, 0.2500])
        """
        return self.clip_norm / (norm_GU + self.stability / (norm_GU + self.stability))

    def words(self) -> str:
        """Return how a gradient is bounded, for the report."""
        r = f"{self.stability:g}"
        return f"is scaled by C / (its norm + {r} / (its norm + {r})), to a norm below C = {self.clip_norm:g} (DP-PSAC)"


_REST = ("*",)  # the patterns of a group that takes all parameters not named by other groups


@dataclass(frozen=True)
class GroupClipping(NormBound):
    """Scale each unit's gradient in each named parameter group k to a norm of at most C_k, where Σ C_k² = C².

    Group-wise clipping (McMahan et al. 2018, arXiv:1812.06210; He et al. 2023, arXiv:2212.01539). The norm of a
    contribution over all groups is at most √(Σ C_k²) = C, so the privacy event is that of `FlatClipping`, and every
    entry of every group gets noise of standard deviation σC. Noise of σC_k in group k would be too small: K releases,
    each with noise multiplier σ, together equal one with σ/√K. Only names determine the groups, so they do not depend
    on the data.

    Attributes:
        parameters: maps each group's name to a pattern, or a list of patterns, of parameter names (``fnmatch``, case
            sensitive). The pattern "*" alone means all parameters that no other group names. Stored as sorted pairs.
        shares: maps each group's name to a number above 0, in proportion to C_k². None: equal shares. Stored as sorted
            pairs.

    Raises:
        ValueError: a name, a pattern or a share is invalid.

    >>> clipping = GroupClipping(5.0, {"embeddings": "*embed*", "rest": "*"}, {"embeddings": 9, "rest": 16})
    >>> clipping.clip_norms
    (3.0, 4.0)
    """

    kind: ClassVar[str] = "groups"
    parameters: Any
    shares: Any = None

    def __post_init__(self) -> None:
        """Check names, patterns and shares."""
        super().__post_init__()
        patterns = {name: _patterns(name, value) for name, value in _mapping("parameters", self.parameters).items()}
        if sum(value == _REST for value in patterns.values()) > 1:
            raise ValueError('parameters has "*" for two groups: use it for the one that takes all other parameters')
        given = dict.fromkeys(patterns, 1.0) if self.shares is None else _mapping("shares", self.shares)
        if set(given) != set(patterns):
            raise ValueError(
                f"shares has the groups {', '.join(given)}, but parameters has {', '.join(patterns)}: list the same "
                "groups in both"
            )
        shares = {name: _share(name, value) for name, value in given.items()}
        object.__setattr__(self, "parameters", tuple(sorted(patterns.items())))
        object.__setattr__(self, "shares", tuple(sorted(shares.items())))

    @property
    def clip_norms(self) -> tuple[float, ...]:
        """C_k = C √(share_k / Σ shares), in the order of the groups' names."""
        whole = math.fsum(share for _, share in self.shares)
        return tuple(self.clip_norm * math.sqrt(share / whole) for _, share in self.shares)

    def groups(self, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Sequence[str]]:
        """Return the names of the trainable parameters of each group, in the order of the groups' names.

        Raises:
            ValueError: a parameter is in no group or in two, or a group has none.

        >>> clipping = GroupClipping(1.0, {"embeddings": "*embed*", "rest": "*"})
        >>> clipping.groups({"embed.weight": (9, 2), "fc.weight": (2, 2), "fc.bias": (2,)})
        [['embed.weight'], ['fc.weight', 'fc.bias']]
        """
        members: dict[str, list[str]] = {name: [] for name, _ in self.parameters}
        rest = next((name for name, patterns in self.parameters if patterns == _REST), None)
        for parameter in shapes:
            found = [
                name
                for name, patterns in self.parameters
                if name != rest and any(fnmatchcase(parameter, pattern) for pattern in patterns)
            ]
            if len(found) > 1:
                raise ValueError(
                    f"clipping: the parameter {parameter} is in the groups {found[0]} and {found[1]}, so its share of "
                    "C is ambiguous. Change the patterns so that each parameter is in one group"
                )
            if not found and rest is None:
                raise ValueError(
                    f"clipping: the parameter {parameter} is in no group, so nothing would bound it. Add a pattern for "
                    'it, or a group with the pattern "*", which takes all other parameters'
                )
            members[found[0] if found else str(rest)].append(parameter)
        for name, names in members.items():
            if not names:
                raise ValueError(
                    f"clipping: the group {name} contains no trainable parameter, so its share of C would be lost. The "
                    f"trainable parameters have names such as {next(iter(shapes), '(there is none)')}"
                )
        return list(members.values())

    def factors(self, norm_GU: Tensor) -> Tensor:
        """Return c_ku = min(1, C_k / ||g_ku||).

        Args:
            norm_GU: (G, U) l2 norms, rounded up, above 0 and finite.

        Returns:
            (G, U) factors in [0, 1].

        Raises:
            ValueError: the norms have a different number of groups.

        >>> import torch
        >>> clipping = GroupClipping(5.0, {"embeddings": "*embed*", "rest": "*"}, {"embeddings": 9, "rest": 16})
        >>> clipping.factors(torch.tensor([[6.0, 1.0], [16.0, 2.0]]))
        tensor([[0.5000, 1.0000],
                [0.2500, 1.0000]])
        """
        if len(norm_GU) != len(self.clip_norms):
            raise ValueError(f"got norms of {len(norm_GU)} groups, but the clipping has {len(self.clip_norms)}")
        return (norm_GU.new_tensor(self.clip_norms)[:, None] / norm_GU).clamp_max(1)

    def group_factors(self, group: int, num_groups: int, norm_U: Tensor) -> Tensor:
        """Return min(1, C_k / ||g_ku||) of one group k."""
        return (norm_U.new_tensor(self.clip_norms[group]) / norm_U).clamp_max(1)

    def words(self) -> str:
        """Return how a gradient is bounded, for the report."""
        each = ", ".join(
            f"{name} to norm {norm:g}" for (name, _), norm in zip(self.shares, self.clip_norms, strict=True)
        )
        return (
            f"is clipped in each parameter group ({each}), and over all groups together to norm C = {self.clip_norm:g}"
        )


def _mapping(what: str, value: Any) -> dict[str, Any]:
    """Return a mapping by group, which may be given as pairs."""
    try:
        pairs = list(value.items() if isinstance(value, Mapping) else value)
        named = {} if any(isinstance(pair, str) for pair in pairs) else dict(pairs)
    except (TypeError, ValueError):
        pairs, named = [], {}
    if not named or len(named) < len(pairs) or not all(_is_name(name) for name in named):
        raise ValueError(
            f"{what} is {value!r}; it must map group names (letters, digits, - and _) to values, for instance "
            f"parameters: {{embeddings: '*embed*', rest: '*'}}"
        )
    return named


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.replace("-", "_").isidentifier()


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not patterns or not all(isinstance(one, str) for one in patterns):
        raise ValueError(
            f"parameters.{name} is {value!r}; it must be a pattern of parameter names, or a list of patterns"
        )
    return tuple(patterns)


def _share(name: str, value: Any) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 1e-12 <= value <= 1e12:
        raise ValueError(f"shares.{name} is {value!r}; it must be a number above 0, in proportion to C_k squared")
    return float(value)


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


_BATCHES_PER_NOISE = 20  # b / σ_b by default, as in the source's experiments


@dataclass(frozen=True)
class QuantileClipping(NormBound, OneGroup):
    """Clip each unit's gradient to a threshold that follows a quantile of the norms, and scale it to at most C.

    The object belongs to one step; `updated` returns the next step's object.

    Attributes:
        quantile: γ, the share of units that should stay below the threshold; above 0 and below 1.
        rate: η > 0. The threshold changes by the factor exp(-η (b̃ - γ)), where b̃ is the noisy share below it.
        start: Q, the threshold; in a recipe that of the first step. None: C.
        count_noise: σ_b, at least 0.001, the standard deviation of the noise on the count of units, in units. None:
            b/20.

    Raises:
        ValueError: a number is out of range.
    """

    kind: ClassVar[str] = "quantile"
    quantile: float = 0.5
    rate: float = 0.2
    start: float | None = None
    count_noise: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        if self.start is None:
            object.__setattr__(self, "start", self.clip_norm)
        for name, least, most in (
            ("quantile", 1e-6, 1 - 1e-6),
            ("rate", 1e-6, 10.0),
            ("start", MIN_CLIP_NORM, MAX_CLIP_NORM),
            ("count_noise", 1e-3, 1e12),
        ):
            value = getattr(self, name)
            if name == "count_noise" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ValueError(f"{name} is {value!r}; it must be between {least:g} and {most:g}")

    @property
    def threshold(self) -> float:
        """Q, the norm to which gradients are clipped in this step."""
        assert self.start is not None, "set when it is made"
        return float(self.start)

    def factors(self, norm_GU: Tensor) -> Tensor:
        """Return c_u = C / max(||g_u||, Q): clipped to Q, and scaled by C / Q.

        Args:
            norm_GU: (G, U) l2 norms, rounded up, above 0 and finite.

        Returns:
            (G, U) factors in [0, C / Q].

        >>> import torch
        >>> QuantileClipping(1.0, start=4.0).factors(torch.tensor([2.0, 8.0]))
        tensor([0.2500, 0.1250])
        """
        return self.clip_norm / norm_GU.clamp_min(self.threshold)

    def statistic(self, norm_U: Tensor) -> Tensor:
        """Return each unit's share of the count: ½ if its norm is at most Q, otherwise (also if not finite) -½.

        Args:
            norm_U: (U,) l2 norms; may be non-finite.

        >>> import torch
        >>> QuantileClipping(1.0).statistic(torch.tensor([0.5, 1.5, float("nan")]))
        tensor([ 0.5000, -0.5000, -0.5000])
        """
        return (norm_U <= self.threshold).to(norm_U.dtype) - 0.5

    def statistic_noise(self, expected_batch_size: int) -> float:
        """Return σ_b."""
        return expected_batch_size / _BATCHES_PER_NOISE if self.count_noise is None else float(self.count_noise)

    def at(self, threshold: float) -> Self:
        """Return the clipping with a different threshold."""
        return dataclasses.replace(self, start=threshold)

    def updated(self, noisy_statistic: float, expected_batch_size: int) -> Self:
        """Return the clipping of the next step: Q ← Q exp(-η (b̃ - γ)) with b̃ = ½ + noisy_statistic / b.

        Args:
            noisy_statistic: the sum of the units' shares in this step, with its noise.
            expected_batch_size: b, a public constant.

        >>> QuantileClipping(1.0).updated(10.0, expected_batch_size=20).threshold == math.exp(-0.2 * 0.5)
        True
        """
        share = 0.5 + noisy_statistic / expected_batch_size
        logarithm = math.log(self.threshold) - self.rate * (share - self.quantile)
        return self.at(math.exp(min(max(logarithm, math.log(MIN_CLIP_NORM)), math.log(MAX_CLIP_NORM))))

    def words(self) -> str:
        """Return how a gradient is bounded, for the report."""
        deviation = "b/20" if self.count_noise is None else f"{self.count_noise:g}"
        return (
            f"is clipped to a threshold, {self.threshold:g} in the first step, which moves towards the "
            f"{self.quantile:g}-quantile of the norms after each step, using a count of the gradients below it with "
            f"Gaussian noise of standard deviation {deviation}; it is then scaled by C over the threshold, to a norm "
            f"of at most C = {self.clip_norm:g}"
        )
