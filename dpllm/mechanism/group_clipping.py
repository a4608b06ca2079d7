"""Clipping by named parameter groups: each group is bounded separately, with a share of C that the recipe sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from dpllm.mechanism.clipping import NormBound

if TYPE_CHECKING:
    from torch import Tensor

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

        Args:
            shapes: name and shape of each trainable parameter.

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
