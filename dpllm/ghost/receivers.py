"""One backward pass over a microbatch: the contributions from its taps, and their processing.

A `Pass` is created for each microbatch and dropped after its sum. Each contribution from a tap goes to one *receiver*:
the pass itself keeps it until the sum is formed; `AddUpGroups` forms the clipped sum of a parameter group when its last
contribution has arrived; `Measure` computes its norm and drops it (the first of two passes); `AddUp` adds it to the
clipped sum immediately (the second). `dpllm.ghost.weights_check` has receivers that probe whether rows are independent.

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
from dpllm.ghost.model_calls import used_again
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.norms import NormTally, held, is_instance, join, merge
from dpllm.ghost.sums import Finish, GroupFactors, Sum, Weights
from dpllm.ghost.unit_gradients import (
    Contribution,
    Flat,
    Instance,
    Outer,
    Rows,
    StackedOuter,
    Use,
    formed_together,
    joint_norms,
    side_by_side,
    stacked,
)


class Receiver(Protocol):
    """An object that receives the gradients arriving at the taps."""

    def take(self, name: str, parameter: nn.Parameter, use: Use) -> None:
        """Receive the contribution of one use of a parameter.

        Args:
            name: the parameter's name.
            parameter: the parameter.
            use: the contribution to the gradient of each row.
        """
        ...


@dataclass
class Pass:
    """A microbatch, from its backward pass to its clipped sum. As a receiver it keeps every contribution.

    Attributes:
        rows: the unit of each row.
        norm_method: how norms and sums are computed.
        contributions: all uses of each parameter, by its id.
        joint: contributions computed for several parameters at once, by the ids of each, which ``contributions`` lacks.
        sums: clipped sums that are already complete.
        weights: of the rows and of the units, by the number of a group whose clip factors are known.
        groups: the number of each parameter's group, by its id; 0 if it has no entry.
        finish: receives the sums formed during the backward pass; None: they are kept in ``sums``.
    """

    rows: Rows
    norm_method: NormMethod
    contributions: dict[int, list[Contribution]] = field(default_factory=lambda: defaultdict(list))
    joint: dict[int, Flat | StackedOuter] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, tuple[Weights, Weights]] = field(default_factory=dict)
    groups: Mapping[int, int] = field(default_factory=dict)
    finish: Finish | None = None
    _small: dict[tuple, tuple[bool, bool]] = field(default_factory=dict)

    def take(self, name: str, parameter: nn.Parameter, use: Use) -> None:
        """Keep the contribution until the sum is formed."""
        # Small unit gradients are formed later, if at all, for several parameters at once.
        waits = isinstance(use, Outer) and self._is_small(use)[0]
        contribution = use if waits else held(use, self.rows, self.norm_method)
        self.contributions[id(parameter)].append(contribution)  # type: ignore[arg-type]

    def _is_small(self, use: Outer) -> tuple[bool, bool]:
        """Return `Outer.is_small`, and whether it is then held as an instance; cached for uses of equal shapes."""
        key = use.like
        if (known := self._small.get(key)) is None:
            is_small = use.is_small(self.rows)
            known = self._small[key] = is_small, is_small and is_instance(use, self.rows, self.norm_method)
        return known

    def add_norms(self, tally: NormTally) -> tuple[Tensor, Tensor]:
        """Add the norms of the kept contributions; return ``(sq_norm_GU, slack_GU)`` of all parameters."""
        self.add_norms_of(list(self.contributions), tally)
        return tally.total()

    def add_norms_of(self, keys: Iterable[int], tally: NormTally, place: int | None = None) -> None:
        """Add the norms of all kept contributions to some parameters.

        Args:
            keys: the ids of the parameters.
            tally: receives the norms.
            place: the number of their group in the tally; None: its usual number.
        """
        flats: dict[int, list[Flat]] = {}
        products: dict[tuple, dict[int, Outer]] = {}
        outers: dict[int, Outer] = {}
        for key in keys:
            merged, group = self.contributions.pop(key), self.groups.get(key, 0)
            if len(merged) > 1:
                merged = merge(merged, self.rows, self.norm_method)
            first = merged[0]
            if isinstance(first, Outer) and len(merged) == 1:
                if self._is_small(first)[1]:
                    products.setdefault((group, *first.like), {})[key] = first
                else:
                    outers[key] = first
            elif isinstance(first, Instance) and first.is_small:
                of_one = Flat(kernels.entries(first.value_U), {key: first.value_U.shape[1:]}, group)
                flats.setdefault(group, []).append(of_one)
            else:
                self.contributions[key] = merged
                tally.add(merged, group if place is None else place)
        for (group, *_), alike in products.items():
            flats.setdefault(group, []).extend(formed_together(alike, group))
        stacks = stacked(outers, self.groups, self.rows, self.norm_method)
        for group, sq_norm_U, mass_U, slack in joint_norms(stacks):
            tally.note(group if place is None else place, sq_norm_U, mass_U, slack)
        for stack in stacks:
            self.joint.update(dict.fromkeys(stack.parameters, stack))
        for key, use in outers.items():
            self.contributions[key] = [use]
            tally.add([use], self.groups.get(key, 0) if place is None else place)
        for group, of_group in flats.items():
            for flat in side_by_side(of_group):
                self.joint.update(dict.fromkeys(flat.parameters, flat))
                tally.add([Instance(flat.value_UP)], group if place is None else place)

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

    def formed(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's clipped sum, once, if it is formed jointly or was formed before."""
        if (joint := self.joint.get(id(parameter))) is not None:
            self.sums.update(joint.sums(lambda group: self.weights[group][1]))
            for key in joint.parameters:
                del self.joint[key]
        return self.sums.pop(id(parameter), None)

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient of the parameter arrived whose sum has not been added."""
        return any(id(parameter) in kept for kept in (self.contributions, self.joint, self.sums))

    def add_clipped_sum_(self, parameter: nn.Parameter, total: Sum) -> None:
        """Add sum_u factor_u g_u of one parameter to ``total``, once, and drop its contributions."""
        if (formed := self.formed(parameter)) is not None:
            total.take_(formed)
        contributions = self.contributions.pop(id(parameter), ())
        for number, one in enumerate(contributions, 1):
            of_rows, of_units = self.weights[self.groups.get(id(parameter), 0)]
            # `merge` puts the matrix product last, which may finish the sum.
            with contextlib.nullcontext() if number == len(contributions) else total.kept_open():
                one.add_weighted_(total, of_units if isinstance(one, Instance) else of_rows, self.norm_method)
        if not self.contributions:
            for of_rows, _ in self.weights.values():
                of_rows.release()

    def form_sum(self, parameter: nn.Parameter) -> None:
        """Pass one parameter's clipped sum to ``finish``; without it, keep the sum until `add_clipped_sum_`."""
        if self.finish is not None:
            self.finish(parameter)
        else:
            total = Sum.of(parameter)
            self.add_clipped_sum_(parameter, total)
            self.sums[id(parameter)] = total.filled()


class Measure:
    """Computes each layer's norm as its gradient arrives; keeps only contributions of parameters with several uses.

    Attributes:
        tally: the norms so far.
        seen: ids of the parameters that received a gradient.
    """

    def __init__(self, one: Pass, used_once: Callable[[nn.Parameter], bool], tally: NormTally) -> None:
        """Start without norms."""
        self._pass, self._used_once, self.tally = one, used_once, tally
        self.seen: set[int] = set()
        self._done: set[int] = set()  # parameters whose only use has arrived

    def take(self, name: str, parameter: nn.Parameter, use: Use) -> None:
        """Add the contribution to the norms.

        Raises:
            GhostError: a parameter that the model's calls used once receives two gradients.
        """
        self.seen.add(id(parameter))
        if not self._used_once(parameter):
            self._pass.take(name, parameter, use)
            return
        if id(parameter) in self._done:
            raise used_again(name)
        self._done.add(id(parameter))
        contribution = held(use, self._pass.rows, self._pass.norm_method)
        self.tally.add([contribution], self._pass.groups.get(id(parameter), 0))
        self._finish(parameter, contribution)

    def _finish(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        """Drop the contribution."""


class AddUp(Measure):
    """Computes norms again, and adds each layer's weighted gradient as it arrives."""

    def _finish(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        self._pass.contributions[id(parameter)] = [contribution]
        self._pass.form_sum(parameter)


class AddUpGroups:
    """Clips a parameter group and forms its sum when its last gradient has arrived, then drops its contributions.

    A group with a parameter that the model uses more than once is kept until the end, as by `Pass`.

    Args:
        one: the pass.
        used_once: whether the losses use a parameter once.
        parameters: all trainable parameters.
        tally: returns an empty tally of one group.
        factors: the factors of one group, from its norms.

    Attributes:
        norms: ``(sq_norm_U, slack_U)`` of the groups completed so far.
        seen: ids of their parameters.
    """

    def __init__(
        self,
        one: Pass,
        used_once: Callable[[nn.Parameter], bool],
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
            group: set(members) for group, members in self._members.items() if all(map(used_once, members.values()))
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
        self._pass.add_norms_of(members, tally, 0)
        sq_norm_GU, slack_GU = tally.total()
        self.norms[group] = sq_norm_GU[0], slack_GU[0]
        self._pass.weigh_group(group, self._factors.one(group, *self.norms[group]))
        for parameter in members.values():
            self._pass.form_sum(parameter)
        self.seen.update(members)


class HeldUnit:
    """The share of a unit with more rows than fit into one pass, until its last rows arrive.

    Attributes:
        joining: true while a pass is added to the held rows; after a failure they contain only part of it.
    """

    def __init__(self) -> None:
        """Start without held rows."""
        self._contributions: dict[int, list[Contribution]] = {}
        self.joining = False

    def __bool__(self) -> bool:
        """Return whether any rows are held."""
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
        """Return a pass over the whole unit, its last rows in ``one``; ``joining`` is set until it is weighed."""
        self.add(one)
        self.joining = True
        contributions, self._contributions = defaultdict(list, self._contributions), {}
        return Pass(Rows.one_unit(device), one.norm_method, contributions, groups=one.groups)

    def clear(self) -> None:
        """Drop the held rows."""
        self._contributions.clear()
