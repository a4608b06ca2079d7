"""One backward pass over a microbatch: the contributions from its taps, and what becomes of them.

Place in the flow: between taps and clipper. A `Pass` is made for each microbatch and dropped after its sum. Each
contribution at a tap goes to one *receiver*: the pass itself keeps it until the sum is formed; `AddUpGroups` adds up
the clipped sum of a group of parameters when its last contribution has arrived; `Measure` measures its norm and forgets
it (the first of two passes); `AddUp` adds up the clipped sum at once (the second). `dpllm.ghost.weights_check` has
receivers that probe whether rows are independent.

Shape suffixes: B rows, G groups of parameters, U units, P entries of several parameters.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from dpllm.ghost import kernels
from dpllm.ghost.contributions import Contribution, Flat, Instance, Outer, Rows, Use, formed_together, side_by_side
from dpllm.ghost.model_calls import used_again
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.norms import NormTally, held, is_instance, join, merge
from dpllm.ghost.sums import Finish, GroupFactors, Sum, Weights


class Receiver(Protocol):
    """The object that takes the gradients arriving at the taps."""

    def take(self, name: str, parameter: nn.Parameter, use: Use) -> None:
        """Take the contribution of one use of a parameter.

        Args:
            name: of the parameter.
            parameter: the parameter.
            use: the contribution to the gradient of each row.
        """
        ...


class Uses(Protocol):
    """The number of uses of each parameter."""

    def used_once(self, parameter: nn.Parameter) -> bool:
        """Whether the losses use the parameter once."""
        ...


@dataclass
class Pass:
    """A microbatch, from its backward pass to its clipped sum. As a receiver it keeps every contribution.

    Attributes:
        rows: the unit of each row.
        norm_method: how norms and sums are computed.
        contributions: all uses of each parameter, by its id; none for a parameter in ``flats``.
        flats: the gradients of small parameters, by the number of their group.
        sums: clipped sums that are complete already.
        weights: of the rows and of the units, by the number of a group whose clip factors are known.
        groups: the number of each parameter's group, by its id; 0 if it has no entry.
        finish: takes the sums that are formed during the backward pass; None: they are kept in ``sums``.
    """

    rows: Rows
    norm_method: NormMethod
    contributions: dict[int, list[Contribution]] = field(default_factory=lambda: defaultdict(list))
    flats: dict[int, list[Flat]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, tuple[Weights, Weights]] = field(default_factory=dict)
    groups: Mapping[int, int] = field(default_factory=dict)
    finish: Finish | None = None

    def take(self, name: str, parameter: nn.Parameter, use: Use) -> None:
        """Keep the contribution until the sum is formed."""
        if not (isinstance(use, Outer) and use.is_small(self.rows)):
            contribution = held(use, self.rows, self.norm_method)
        else:  # the gradients of units are formed later, if at all, for several parameters at once
            contribution = use
        self.contributions[id(parameter)].append(contribution)

    def add_norms(self, tally: NormTally) -> tuple[Tensor, Tensor]:
        """Add the norms of the contributions kept; return ``(sq_norm_GU, slack_GU)`` of all parameters."""
        of_groups: dict[int, list[int]] = defaultdict(list)
        for key in self.contributions:
            of_groups[self.groups.get(key, 0)].append(key)
        for group, keys in of_groups.items():
            self.add_norms_of(keys, group, tally, group)
        return tally.total()

    def add_norms_of(self, keys: Iterable[int], group: int, tally: NormTally, place: int) -> None:
        """Add the norms of all contributions kept of one group of parameters.

        Args:
            keys: the ids of the parameters.
            group: their number.
            tally: receives the norms.
            place: the number of the group in the tally.
        """
        apart, flats = self._formed(keys)
        for key in apart:
            tally.add(self.contributions[key], place)
        for flat in side_by_side(flats):
            self.flats[group].append(flat)
            tally.add([Instance(flat.value_UP)], place)

    def _formed(self, keys: Iterable[int]) -> tuple[list[int], list[Flat]]:
        """Merge the contributions; return the small gradients of units, and the parameters that have other forms."""
        apart: list[int] = []
        flats: list[Flat] = []
        products: dict[tuple, dict[int, Outer]] = {}
        for key in keys:
            merged = merge(self.contributions[key], self.rows, self.norm_method)
            self.contributions[key], first = [], merged[0]
            if isinstance(first, Outer) and len(merged) == 1:
                products.setdefault(first.like(), {})[key] = first
            elif isinstance(first, Instance) and first.is_small:
                flats.append(Flat(kernels.entries(first.value_U), {key: first.value_U.shape[1:]}))
            else:
                self.contributions[key] = merged
                apart.append(key)
        for alike in products.values():
            first = next(iter(alike.values()))
            if first.is_small(self.rows) and is_instance(first, self.rows, self.norm_method):
                flats.extend(formed_together(alike))
            else:
                self.contributions.update({key: [use] for key, use in alike.items()})
                apart.extend(alike)
        return apart, flats

    def weigh(self, factor_GU: Tensor) -> None:
        """Fix the factors (G, U) of the clipped sum."""
        for group, factor_U in enumerate(factor_GU):
            self.weigh_group(group, factor_U)

    def weigh_group(self, group: int, factor_U: Tensor) -> None:
        """Fix the factors (U,) of one group of parameters."""
        unit_B, factor_B = self.rows.unit_B, factor_U
        if not self.rows.in_order or len(unit_B) > len(factor_U):
            factor_B = torch.where(unit_B >= 0, factor_U[unit_B.clamp_min(0)] if factor_U.numel() else 0, 0)
        self.weights[group] = (Weights(factor_B), Weights(factor_U))

    def add_clipped_sum_(self, parameter: nn.Parameter, total: Sum) -> None:
        """Add sum_u factor_u g_u of one parameter to ``total``, once, and drop its contributions."""
        key, group = id(parameter), self.groups.get(id(parameter), 0)
        contributions, (of_rows, of_units) = self.contributions.pop(key, []), self.weights[group]
        if not contributions and key not in self.sums:
            for flat in self.flats.pop(group):
                self.sums.update(flat.weighted(of_units))
        if key in self.sums:
            total.take_(self.sums.pop(key))
        for number, one in enumerate(contributions, 1):
            # `merge` puts the matrix product last, which may finish the sum.
            with contextlib.nullcontext() if number == len(contributions) else total.kept_open():
                one.add_weighted_(total, of_units if isinstance(one, Instance) else of_rows, self.norm_method)
        if not self.contributions:
            for of_rows, _ in self.weights.values():
                of_rows.release()

    def form_sum(self, parameter: nn.Parameter) -> None:
        """Form one parameter's clipped sum for ``finish``; without it, keep the sum until `add_clipped_sum_`."""
        if self.finish is not None:
            self.finish(parameter, lambda total: self.add_clipped_sum_(parameter, total))
        else:
            total = Sum.of(parameter)
            self.add_clipped_sum_(parameter, total)
            self.sums[id(parameter)] = total.filled()


class Measure:
    """Measures each layer's norm as its gradient arrives; keeps only contributions of parameters with several uses.

    Attributes:
        tally: the norms so far.
        seen: ids of the parameters that received a gradient.
    """

    def __init__(self, one: Pass, calls: Uses, tally: NormTally) -> None:
        """Start without norms."""
        self._pass, self._calls, self.tally = one, calls, tally
        self.seen: set[int] = set()
        self._done: set[int] = set()  # parameters whose only use has arrived

    def take(self, name: str, parameter: nn.Parameter, use: Use) -> None:
        """Measure the contribution.

        Raises:
            GhostError: a parameter that the model's calls used once receives two gradients.
        """
        self.seen.add(id(parameter))
        if not self._calls.used_once(parameter):
            self._pass.take(name, parameter, use)
            return
        if id(parameter) in self._done:
            raise used_again(name)
        self._done.add(id(parameter))
        contribution = held(use, self._pass.rows, self._pass.norm_method)
        self.tally.add([contribution], self._pass.groups.get(id(parameter), 0))
        self._finish(parameter, contribution)

    def _finish(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        """Forget the contribution."""


class AddUp(Measure):
    """Measures again, and adds each layer's weighted gradient up as it arrives."""

    def _finish(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        self._pass.contributions[id(parameter)] = [contribution]
        self._pass.form_sum(parameter)


class AddUpGroups:
    """Clips a group of parameters and adds up its sum when its last gradient has arrived, and forgets what it kept.

    A group with a parameter that the model uses more than once is kept until the end, as by `Pass`.

    Args:
        one: the pass.
        calls: how often the model's calls used each parameter.
        parameters: all trainable parameters.
        tally: returns an empty tally of one group.
        factors: of one group, from its norms.

    Attributes:
        norms: ``(sq_norm_U, slack_U)`` of the groups added up so far.
        seen: ids of their parameters.
    """

    def __init__(
        self,
        one: Pass,
        calls: Uses,
        parameters: Iterable[nn.Parameter],
        tally: Callable[[], NormTally],
        factors: GroupFactors,
    ) -> None:
        """Wait for every group of parameters that are used once."""
        self._pass, self._tally, self._factors = one, tally, factors
        self.norms: dict[int, tuple[Tensor, Tensor]] = {}
        self.seen: set[int] = set()
        self._members: dict[int, dict[int, nn.Parameter]] = {}
        for parameter in parameters:
            self._members.setdefault(one.groups[id(parameter)], {})[id(parameter)] = parameter
        self._missing = {
            group: set(members)
            for group, members in self._members.items()
            if all(map(calls.used_once, members.values()))
        }

    def take(self, name: str, parameter: nn.Parameter, use: Use) -> None:
        """Keep the contribution; if it is the last one of its group, form the group's sum.

        Raises:
            GhostError: a parameter that the model's calls used once receives two gradients.
        """
        group = self._pass.groups[id(parameter)]
        missing = self._missing.get(group)
        if missing is None:
            self._pass.take(name, parameter, use)
            return
        if id(parameter) not in missing:
            raise used_again(name)
        missing.discard(id(parameter))
        self._pass.take(name, parameter, use)
        if not missing:
            self._finish(group)

    def _finish(self, group: int) -> None:
        tally, members = self._tally(), self._members[group]
        self._pass.add_norms_of(members, group, tally, 0)
        sq_norm_GU, slack_GU = tally.total()
        self.norms[group] = sq_norm_GU[0], slack_GU[0]
        self._pass.weigh_group(group, self._factors.one(group, *self.norms[group]))
        for parameter in members.values():
            self._pass.form_sum(parameter)
        self.seen.update(members)


class HeldUnit:
    """The share of a unit that has more rows than one pass takes, until its last rows arrive.

    Attributes:
        joining: true while a pass is added to the held rows; after a failure they contain only a part of it.
    """

    def __init__(self) -> None:
        """Start without held rows."""
        self._contributions: dict[int, list[Contribution]] = {}
        self.joining = False

    def __bool__(self) -> bool:
        """Whether anything is held."""
        return bool(self._contributions)

    def add(self, one: Pass) -> None:
        """Add the contributions of a pass to the held ones."""
        self.joining = True
        with kernels.exact_matmul(), torch.no_grad():
            for key, contributions in one.contributions.items():
                self._contributions[key] = join(self._contributions.get(key, []), contributions, one.norm_method)
        one.contributions.clear()
        self.joining = False

    def complete(self, one: Pass, device: torch.device) -> Pass:
        """Return a pass over the whole unit, whose last rows are in ``one``; ``joining`` until it is weighed."""
        self.add(one)
        self.joining = True
        contributions, self._contributions = defaultdict(list, self._contributions), {}
        return Pass(Rows.one_unit(device), one.norm_method, contributions, groups=one.groups)

    def clear(self) -> None:
        """Forget the held rows."""
        self._contributions.clear()
