"""One parameter's contributions combined, and the squared norms of all parameters' gradients, for each unit.

Several matrix products with one parameter become one over all their tokens, and so do several lookups. A unit's rows
form one long row, so their cross terms are part of its norm; so is the cross term of a table that is also a head.
Layers that read one input share its Gram matrix, and those with small inputs are computed together (`NormMethod`).
Each norm comes with a bound on its rounding error.

Shape suffixes: B rows, G groups of parameters or units of a group, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpllm.ghost import kernels
from dpllm.ghost.chunked_head import HeadUse, head_norms
from dpllm.ghost.experts import Routed
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.unit_gradients import Contribution, Group, Instance, Lookup, Outer, RowGradients, Rows, Use, sum_of


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
