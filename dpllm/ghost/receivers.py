"""One backward pass over a microbatch: the contributions from its taps, and their processing.

A `Pass` is created for each microbatch and dropped after its sum. Each contribution from a tap goes to one *receiver*:
the pass itself keeps it until the sum is formed; `AddUpGroups` forms the clipped sum of a parameter group when its last
contribution has arrived; `Measure` computes its norm and drops it (the first of two passes); `AddUp` adds it to the
clipped sum immediately (the second). `dpllm.ghost.weights_check` has receivers that probe whether rows are independent.

A parameter's contributions are combined (`merge`), and `NormTally` computes the squared norms. Several matrix products
with one parameter become one over all their tokens, and so do several lookups. A unit's rows form one long row, so
their cross terms are part of its norm; so is the cross term of a table that is also a head. Layers that read one input
share its Gram matrix, and those with small inputs are computed together (`NormMethod`). Each norm comes with a bound on
its rounding error.

Shape suffixes: B rows, G groups of parameters or units of a group, U units, P entries of several parameters.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from dpllm.ghost import kernels
from dpllm.ghost.chunked_head import HeadUse, head_norms
from dpllm.ghost.experts import Routed
from dpllm.ghost.model_calls import used_again
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.sums import Finish, GroupFactors, Sum, Weights
from dpllm.ghost.unit_gradients import (
    Contribution,
    Flat,
    Group,
    Instance,
    Lookup,
    Outer,
    RowGradients,
    Rows,
    StackedOuter,
    Use,
    formed_together,
    joint_norms,
    side_by_side,
    stacked,
    sum_of,
)


def held(use: Use, rows: Rows, norm_method: NormMethod) -> Contribution:
    """Return a use in the form that is kept until the clipped sum: the one that takes less memory.

    Args:
        use: one use of a parameter.
        rows: the units of the rows.
        norm_method: chooses the form.
    """
    if isinstance(use, RowGradients) or is_instance(use, rows, norm_method):
        return Instance(use.instance(rows))
    return use


def is_instance(use: Outer | Lookup | HeadUse | Routed, rows: Rows, norm_method: NormMethod) -> bool:
    """Return whether a use is held as the units' gradients, see `NormMethod.holds_instance`."""
    # Small ones are stacked, and operations do not dominate their time.
    on_cpu = isinstance(use, Outer) and use.grad.device.type == "cpu" and not kernels.is_small(use.input)
    return norm_method.holds_instance(use.factor_bytes(), use.instance_bytes(rows), on_cpu)


def merge(contributions: Sequence[Contribution], rows: Rows, norm_method: NormMethod) -> list[Contribution]:
    """Convert the contributions to one parameter to a common form.

    The products with one weight, a sum over tokens each, become one over all tokens; so do lookups, and uses of a stack
    of matrices. Instances are added; if one contribution is held as an instance, all of them become one.

    Returns:
        A single contribution, or those of a table that is both looked up and multiplied (a tied head), the matrix
        product last.
    """
    if len(contributions) == 1:
        return list(contributions)
    whole: list[Contribution] = [one for one in contributions if isinstance(one, Instance | HeadUse)]
    with_head = any(isinstance(one, HeadUse) for one in whole)
    for kind in (Lookup, Outer, Routed):
        of_kind = [one for one in contributions if isinstance(one, kind)]
        if of_kind:
            joined = _joined(of_kind)
            whole.append(joined if with_head else held(joined, rows, norm_method))
    kinds = {type(one) for one in whole}
    if len(whole) == 1 or kinds <= {Lookup, Outer} or kinds <= {Lookup, HeadUse}:
        return whole
    return [Instance(sum_of(one.instance(rows) for one in whole))]


def _joined(uses: list) -> Lookup | Outer | Routed:
    """Return uses of one kind as one: a sum over all their tokens."""
    first, *rest = uses
    if not rest:
        return first
    if isinstance(first, Routed):
        return Routed.cat(uses)
    right_BTR = torch.cat([use.right_BTR for use in uses], 1)
    if isinstance(first, Lookup):
        return Lookup(torch.cat([use.index_BT for use in uses], 1), right_BTR, first.num_entries)
    return Outer(torch.cat([use.left_BTL for use in uses], 1), right_BTR, first.input_side)


def join(already: Sequence[Contribution], more: Sequence[Contribution], norm_method: NormMethod) -> list[Contribution]:
    """Combine the contributions of one unit's rows to one parameter over several passes into those of a single row.

    A sum over rows of sums over tokens is one sum over tokens. It is kept as factors, or as the gradient itself as soon
    as that takes less memory, for any number of rows that follow.

    Args:
        already: the result of `join` for the previous passes; empty at first.
        more: every use of the parameter in the next pass.
        norm_method: chooses the form that takes less memory.
    """
    folded: list[Contribution] = [*already, *(one.fold() for one in more)]
    assert not isinstance(folded[0], HeadUse), "it is folded to an instance"
    one_unit = Rows.one_unit((folded[0].value_U if isinstance(folded[0], Instance) else folded[0].right_BTR).device)
    whole = [one if isinstance(one, Instance) else held(one, one_unit, norm_method) for one in folded]
    return merge(whole, one_unit, norm_method)


class NormTally:
    """Squared norms over parameters, added as they arrive.

    Layers that read one input wait for each other to share its Gram matrix.

    Args:
        rows: the units of the rows.
        norm_method: how norms are computed.
        dtype: the dtype in which norms are added.
        slack: returns the allowed multiple of `dpllm.ghost.kernels.rounding_slack`; called by `total`, when all dtypes
            and devices are known.
        max_waiting: the most inputs whose layers wait at the same time; None: all, until `total`. 1 frees activations
            one by one, since layers that share an input follow each other in a backward pass.
        num_groups: G, the groups of parameters with separate norms.
    """

    def __init__(
        self,
        rows: Rows,
        norm_method: NormMethod,
        dtype: torch.dtype,
        slack: Callable[[], float] | None = None,
        max_waiting: int | None = None,
        num_groups: int = 1,
    ) -> None:
        """Start at zero."""
        self._rows, self._norm_method, self._slack, self._max_waiting = rows, norm_method, slack, max_waiting
        self._dtype, self._num_groups = dtype, num_groups
        self._waiting: dict[tuple, list[Outer]] = {}
        # Norms and masses, by the parameter group and the multiple of a mass that is the slack.
        self._parts: dict[tuple[int, float], list[Tensor]] = {}

    def add(self, contributions: Sequence[Contribution], group: int = 0) -> None:
        """Add one parameter's norm.

        Args:
            contributions: every use of it, as returned by `merge`.
            group: the group of the parameter.
        """
        first = contributions[0]
        if len(contributions) > 1 or not isinstance(first, Outer):
            self.note(group, *_norm_mass_slack(contributions, self._rows, self._norm_method))
            return
        self._waiting.setdefault((group, *first.input_key()), []).append(first)
        while self._max_waiting is not None and len(self._waiting) > self._max_waiting:
            self._measure([next(iter(self._waiting))])

    def total(self) -> tuple[Tensor, Tensor]:
        """Return ``(sq_norm_GU, slack_GU)``: each group's squared norms, and the error of a unit's share."""
        self._measure(list(self._waiting))
        shape, device = (self._num_groups, 2, self._rows.num_units), self._rows.unit_B.device
        total_G2U = torch.zeros(shape, dtype=self._dtype, device=device)
        for (group, multiple), values in self._parts.items():
            sum_2U = torch.stack([value.to(self._dtype) for value in values]).unflatten(0, (-1, 2)).sum(0)
            total_G2U[group, 0] += sum_2U[0]
            total_G2U[group, 1].add_(sum_2U[1], alpha=multiple * (self._slack() if self._slack else 1.0))
        return total_G2U[:, 0], total_G2U[:, 1]

    def note(self, group: int, sq_norm_U: Tensor, mass_U: Tensor, multiple: float) -> None:
        """Add a norm whose slack is a multiple of the mass."""
        self._parts.setdefault((group, multiple), []).extend((sq_norm_U, mass_U))

    def _measure(self, keys: list[tuple]) -> None:
        """Measure the layers that read these inputs."""
        if not keys:
            return
        sharing = [self._waiting.pop(key) for key in keys]
        norms = shared_norms(sharing, self._rows, self._norm_method)
        for (group, *_), uses, both in zip(keys, sharing, norms, strict=True):
            self.note(group, *both, kernels.rounding_slack(uses[0].input.dtype))


def _norm_mass_slack(
    contributions: Sequence[Contribution], rows: Rows, norm_method: NormMethod
) -> tuple[Tensor, Tensor, float]:
    """Return squared gradient norms (U,) of one parameter, with cross terms, masses (U,), and the slack's multiple.

    The slack is the rounding error that may reduce a norm or increase the clipped sum.
    """
    first = contributions[0]
    if isinstance(first, Instance):
        sq_norm_U = kernels.squared_norms(first.value_U)
        return sq_norm_U, sq_norm_U, kernels.rounding_slack(sq_norm_U.dtype)
    if isinstance(first, Routed):
        return *first.norms(rows, norm_method), 1.0
    factored = [c for c in contributions if isinstance(c, Outer | Lookup)]
    heads = [c for c in contributions if isinstance(c, HeadUse)]
    assert len(factored) + len(heads) == len(contributions), "merge() returns no mixture of forms"
    found = [_norm_and_root(c, rows, norm_method) for c in factored]
    if heads:
        sq_norm_U = head_norms(heads, [c for c in factored if isinstance(c, Lookup)], rows)
        found.append((sq_norm_U, rows.sum_rows(sum_of(head.mass() for head in heads))))
    norms, roots = zip(*found, strict=True)
    sq_norm_U = sum_of(norms)
    for i, x in enumerate(factored):
        for y in factored[:i]:
            sq_norm_U = sq_norm_U + 2 * _cross(x, y, rows)
    return sq_norm_U, sum_of(roots).square(), kernels.rounding_slack(sq_norm_U.dtype)


def shared_norms(
    sharing: Sequence[Sequence[Outer]], rows: Rows, norm_method: NormMethod
) -> list[tuple[Tensor, Tensor]]:
    """Return ``(sq_norm_U, mass_U)`` of parameters that are used once each, for each set of layers that read one input.

    Rows are copied if units have different numbers of rows, or rows that are not adjacent. The sets are then computed
    one after another.

    Args:
        sharing: the uses in layers that read one input, for one or more inputs.
        rows: the units of the rows.
        norm_method: how norms are computed.
    """
    if rows.whole is not None:
        return norm_method.grouped_outer_norms([_folded(uses, rows.whole) for uses in sharing])

    def of(group: Group) -> Tensor:
        norms = [norm_method.outer_norms(*_folded(uses, group)) for uses in sharing]
        return torch.stack([x for both in norms for x in both], 1)

    columns = rows.by_groups(of).unbind(1)
    return list(zip(columns[::2], columns[1::2], strict=True))


def _folded(uses: Sequence[Outer], group: Group) -> tuple[Tensor, list[Tensor]]:
    return group.fold(uses[0].input), [group.fold(use.grad) for use in uses]


def _norm_and_root(x: Outer | Lookup, rows: Rows, norm_method: NormMethod) -> tuple[Tensor, Tensor]:
    """Return (U,), (U,): the squared norm of one use, and sum_t |left_t| |right_t| or sum_t |right_t|."""
    if isinstance(x, Outer):
        ((sq_norm_U, mass_U),) = shared_norms([[x]], rows, norm_method)
        return sq_norm_U, mass_U.sqrt()
    longest = x.index_BT.shape[1] * max(group.rows_GN.shape[1] for group in rows.groups)
    if kernels.is_short(longest) and kernels.is_small(x.right_BTR) and not norm_method.fuses(x.right_BTR):
        both_U2 = rows.by_groups(lambda units: kernels.short_lookup_norms(*map(units.fold, (x.index_BT, x.right_BTR))))
        return both_U2[:, 0], both_U2[:, 1]
    sq_norm_U = norm_method.lookup_norms(x.index_BT, x.right_BTR, rows.unit_B, rows.num_units, x.num_entries)
    return sq_norm_U, rows.sum_rows(x.mass())


def _cross(x: Outer | Lookup, y: Outer | Lookup, rows: Rows) -> Tensor:
    """Return (U,): each unit's <gradient of a lookup, gradient of a matrix product>."""
    lookup, outer = (x, y) if isinstance(x, Lookup) else (y, x)
    assert isinstance(lookup, Lookup) and isinstance(outer, Outer), "merge() returns one use of each kind"
    of_both = lookup.index_BT, lookup.right_BTR, outer.left_BTL, outer.right_BTR
    return rows.by_groups(lambda units: kernels.lookup_outer_inner(*map(units.fold, of_both)))


# ----------------------------------------------------------------------------------------------------- receivers


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
