"""The cut of a logical batch: every row of every drawn unit once, no unit split, nothing else."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.data.units import UnitIndex
from dpllm.training.microbatches import (
    PADDING_UNIT,
    TOKENS_PER_MICROBATCH,
    Bounds,
    best_cuts,
    deal,
    joint_pieces,
    microbatches,
)
from tests.mutations import kills


def collate(rows):
    return {"row": torch.tensor(rows)}


def cut(units, lengths, unit_ids, max_rows, rank=0, size=1, max_tokens=None, packed=False, key=0):
    return list(
        microbatches(
            lambda rows: rows.tolist(),
            collate,
            units,
            np.asarray(lengths),
            np.asarray(unit_ids, dtype=np.int64),
            max_rows,
            rank,
            size,
            max_tokens,
            packed,
            key,
        )
    )


def units_of(batches, units):
    """The units whose rows are in these microbatches, each as often as it is there; padding rows left out."""
    unit_of_row = {int(row): unit for unit in range(units.num_units) for row in units.rows_of(np.array([unit]))[0]}
    found = []
    for batch in batches:
        real = [row for row, u in zip(batch.inputs["row"].tolist(), batch.unit_index.tolist(), strict=True) if u >= 0]
        assert len({unit_of_row[row] for row in real}) == batch.num_units + batch.continues
        found += [] if batch.continues else sorted({unit_of_row[row] for row in real})
    return found


def drawn(data, most=8, fewest=1):
    """The owner of each row, an index of units, their rows' lengths, and the units of a step."""
    owner = data.draw(st.lists(st.integers(0, most), min_size=1, max_size=30))
    units = UnitIndex.from_ids([str(o) for o in owner], None)
    chosen = data.draw(st.lists(st.integers(0, units.num_units - 1), unique=True, min_size=fewest))
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=len(owner), max_size=len(owner)))
    return owner, units, np.array(lengths), chosen


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_row_of_every_unit_exactly_once(data):
    """For any number of units, rows and any budget: a unit's rows stay together, in one microbatch or in its own."""
    owner, units, lengths, chosen = drawn(data, most=6)
    max_rows = data.draw(st.integers(1, 8))
    batches = cut(units, lengths, chosen, max_rows)
    seen, held = [], []
    for batch in batches:
        rows = batch.inputs["row"].tolist()
        seen += rows
        assert 1 <= len(rows) <= max_rows
        if batch.continues:
            assert batch.num_units == 0 and set(batch.unit_index.tolist()) == {0} and len(rows) == max_rows
            held += rows
            continue
        assert sorted(set(batch.unit_index.tolist())) == list(range(batch.num_units))
        assert not held or batch.num_units == 1
        for unit in range(batch.num_units):
            members = held + [row for row, u in zip(rows, batch.unit_index.tolist(), strict=True) if u == unit]
            (name,) = {owner[row] for row in members}
            assert sorted(members) == [row for row, o in enumerate(owner) if o == name]
        held = []
    assert not held
    expected, _ = units.rows_of(np.asarray(chosen))
    assert sorted(seen) == sorted(expected.tolist())


def test_a_unit_larger_than_a_microbatch_has_several_to_itself():
    """Its rows are divided, and the processes still get the same number of microbatches."""
    units = UnitIndex.from_ids(["a"] * 5 + ["b", "c"])
    key = next(key for key in range(100) if deal(np.arange(3), 2, key).tolist() == [1, 0, 0])
    shares = [cut(units, [9] * 5 + [1, 1], [0, 1, 2], 2, rank, 2, key=key) for rank in (1, 0)]
    assert [(len(b.unit_index), b.num_units, b.continues) for b in shares[0]] == [
        (2, 0, True),
        (2, 0, True),
        (1, 1, False),
    ]
    assert [(b.num_units, b.continues) for b in shares[1]] == [(2, False), (0, False), (0, False)]


def test_rows_of_similar_length_go_together():
    """Little padding: sorted by length, longest first."""
    units = UnitIndex.one_row_per_unit(6)
    batches = cut(units, [1, 50, 2, 49, 3, 48], range(6), 3)
    assert [sorted(b.inputs["row"].tolist()) for b in batches] == [[1, 3, 5], [0, 2, 4]]


def test_shares_are_parts_of_the_work_of_a_process():
    """By padded tokens, or by the rows' own tokens without padding; a padding row has none."""
    units, lengths = UnitIndex.one_row_per_unit(4), [30, 20, 10, 10]
    padded = cut(units, lengths, range(4), 2)
    assert [batch.share for batch in padded] == pytest.approx([60 / 80, 20 / 80])
    packed = cut(units, lengths, range(4), None, max_tokens=50, packed=True)
    assert [batch.share for batch in packed] == pytest.approx([50 / 70, 20 / 70])
    for rank in (0, 1):
        assert sum(batch.share for batch in cut(units, lengths, range(4), 1, rank, 2)) == pytest.approx(1)
    (empty,) = cut(units, lengths, [], 3)
    assert empty.share == 0


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_unit_is_on_exactly_one_rank_and_ranks_have_equally_many_microbatches(data):
    """Any number of ranks, also more than units, and an empty draw: no unit twice, none left out, no rank waits."""
    _, units, lengths, chosen = drawn(data, fewest=0)
    size, max_rows = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    shares = [cut(units, lengths, chosen, max_rows, rank, size) for rank in range(size)]
    assert sorted(unit for share in shares for unit in units_of(share, units)) == sorted(chosen)
    assert len({len(share) for share in shares}) == 1
    rows = sorted(row for share in shares for batch in share for row in batch.inputs["row"][batch.unit_index >= 0])
    assert rows == sorted(units.rows_of(np.asarray(chosen, dtype=np.int64))[0].tolist())
    for batch in (batch for share in shares for batch in share):
        padding = batch.num_units == 0 and not batch.continues
        assert batch.unit_index.tolist() == [PADDING_UNIT] if padding else int(batch.unit_index.min()) == 0
        assert len(batch.unit_index) <= max_rows


def test_a_rank_with_nothing_and_an_empty_draw_run_padding_rows():
    """Two units on four ranks, a long unit beside five short ones, no unit at all: all ranks run equally often."""
    units = UnitIndex.one_row_per_unit(4)
    shares = [cut(units, [1, 2, 3, 4], [1, 3], 5, rank, 4) for rank in range(4)]
    assert sorted(share[0].num_units for share in shares) == [0, 0, 1, 1]
    uneven = [cut(UnitIndex.one_row_per_unit(5), [50, 1, 1, 1, 1], range(5), 1, rank, 2) for rank in range(2)]
    assert sorted([batch.num_units for batch in share] for share in uneven) == [[1, 1, 0], [1, 1, 1]]
    for rank in range(2):
        (batch,) = cut(units, [1, 2, 3, 4], [], 5, rank, 2)
        assert (
            batch.num_units == 0 and batch.unit_index.tolist() == [PADDING_UNIT] and batch.inputs["row"].shape == (1,)
        )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_unit_s_rank_depends_on_no_other_unit_s_length(data):
    """Only ids, key and number of processes decide it: a neighbour's longer row moves nobody."""
    owner, units, one, chosen = drawn(data, fewest=0)
    size, key = data.draw(st.integers(2, 5)), data.draw(st.integers(0, 2**128 - 1))
    other = np.array(data.draw(st.lists(st.integers(0, 50), min_size=len(owner), max_size=len(owner))))
    for rank in range(size):
        shares = [
            sorted(units_of(cut(units, lengths, chosen, 4, rank, size, key=key), units)) for lengths in (one, other)
        ]
        assert shares[0] == shares[1]
    counts = np.bincount(deal(np.asarray(chosen, dtype=np.int64), size, key), minlength=size)
    assert counts.sum() == len(chosen) and counts.max() - counts.min() <= 1


@pytest.mark.parametrize("size", [2, 8, 64])
def test_processes_have_about_equal_work(size):
    """1024 units whose lengths are spread as those of text are: no process has much more than the mean."""
    lengths = np.exp(np.linspace(np.log(8), np.log(512), 1024))
    worst = []
    for key in range(20):
        loads = np.bincount(deal(np.arange(1024), size, key), weights=lengths, minlength=size)
        worst.append(loads.max() / loads.mean())
    assert np.mean(worst) < 1 + 5 / np.sqrt(1024 / size)  # a sample of n such lengths deviates by about 1.1 / sqrt(n)


def test_another_key_deals_differently_and_evenly():
    """Two units meet on one process as often as chance says, so that no arrangement of ids is favoured."""
    dealt = np.array([deal(np.arange(40), 4, key) for key in range(400)])
    together = (dealt[:, :1] == dealt[:, 1:]).mean(axis=0)
    assert together.min() > 0.12 and together.max() < 0.36  # 9/39, and 6 deviations of 400 trials
    assert len({tuple(row) for row in dealt}) == 400


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(rank, size):
    """Its share would be nobody's."""
    with pytest.raises(ValueError, match=rf"rank is {rank} of {size} processes"):
        cut(UnitIndex.one_row_per_unit(3), [1, 1, 1], [0], 2, rank, size)


@pytest.mark.parametrize("packed", [False, True])
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_budget_of_tokens_is_kept(packed, data):
    """Rows times the longest, or the packed rows' own tokens, never exceed it, except for a single row above it.

    Nothing is lost, and no unit is split.
    """
    _, units, lengths, chosen = drawn(data)
    budget, max_rows = data.draw(st.integers(1, 200)), data.draw(st.one_of(st.none(), st.integers(1, 6)))
    size = data.draw(st.integers(1, 3))
    shares = [cut(units, lengths, chosen, max_rows, rank, size, budget, packed) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(unit for share in shares for unit in units_of(share, units)) == sorted(chosen)
    found = []
    for batch in (batch for share in shares for batch in share):
        rows = batch.inputs["row"][batch.unit_index >= 0].tolist()
        found += rows
        if rows:
            tokens = int(lengths[rows].sum()) if packed else len(rows) * lengths[rows].max()
            assert len(rows) == 1 or tokens <= budget
            assert max_rows is None or len(rows) <= max_rows
    assert sorted(found) == sorted(units.rows_of(np.asarray(chosen))[0].tolist())


def test_a_budget_of_tokens_fills_microbatches_with_short_rows():
    """Many short rows go together where few long ones did: 200 tokens are two rows of 100, or ten of 20."""
    units = UnitIndex.one_row_per_unit(14)
    batches = cut(units, [100] * 4 + [20] * 10, range(14), None, max_tokens=200)
    assert [len(b.unit_index) for b in batches] == [2, 2, 10]


def test_packed_rows_are_as_many_as_their_own_tokens_allow():
    """A row of 100 tokens leaves room for five of 20, which would have been padded to 100 each."""
    units = UnitIndex.one_row_per_unit(6)
    assert [len(b.unit_index) for b in cut(units, [100] + [20] * 5, range(6), None, max_tokens=200, packed=True)] == [6]
    assert [len(b.unit_index) for b in cut(units, [100] + [20] * 5, range(6), None, max_tokens=200)] == [1, 5]


PACKED = {"input_ids": torch.zeros(1, 4), "cu_seq_lens_q": torch.tensor([0, 4])}


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({"row": torch.tensor([[0], [1]])}, r"one row into 'row' of shape \(2, 1\)"),  # a row that is doubled
        ({"row": torch.tensor(3)}, r"one row into 'row' of shape \(\)"),
        ({"row": torch.zeros(0, 3)}, r"one row into 'row' of shape \(0, 3\)"),
        (
            {**PACKED, "cu_seq_lens_q": torch.tensor([0, 2, 4])},
            r"into packed rows with the boundaries \[0, 2, 4",
        ),
        ({**PACKED, "cu_seq_lens_q": torch.tensor([1, 4])}, r"with the boundaries \[1, 4\]"),
        ({**PACKED, "input_ids": torch.zeros(1, 5)}, r"packed 4 tokens, but 'input_ids' has shape \(1, 5\)"),
        ({**PACKED, "input_ids": torch.zeros(3, 4)}, r"'input_ids' has shape \(3, 4\)"),
    ],
)
def test_a_collator_that_makes_other_rows_than_it_was_given_is_refused(inputs, match):
    """One row of one row, and every input of a packed one as long as it is."""
    arguments = (UnitIndex.one_row_per_unit(3), np.ones(3, dtype=np.int64), np.arange(3), 8)
    packed = "cu_seq_lens_q" in inputs
    with pytest.raises(ValueError, match=match):
        list(microbatches(lambda rows: rows.tolist(), lambda rows: inputs, *arguments, packed=packed))


@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "says"), [(0, None, "max_rows is 0"), (None, 0, "max_tokens"), (None, None, "max_")]
)
def test_a_microbatch_needs_a_bound(max_rows, max_tokens, says):
    """Without one, all rows of a step would go through the model at once."""
    with pytest.raises(ValueError, match=says):
        cut(UnitIndex.one_row_per_unit(2), [1, 1], [0], max_rows, max_tokens=max_tokens)


def test_lengths_of_other_integers_keep_the_budget():
    """Unsigned, or of 8 bits: the same microbatches."""
    units, lengths = UnitIndex.one_row_per_unit(60), np.random.default_rng(0).integers(1, 100, 60)
    found = []
    for dtype in (np.int64, np.int8, np.uint8, np.uint16, np.uint64):
        batches = cut(units, lengths.astype(dtype), range(60), None, max_tokens=400)
        assert max(len(batch.unit_index) * int(batch.taken.lengths_B.max()) for batch in batches) <= 400
        found.append([batch.inputs["row"].tolist() for batch in batches])
    assert all(one == found[0] for one in found)


def cost_of(cuts, rows_RU, longest_RU):
    """The cost of common cuts, in tokens: padded ones of the process that has most, and those that stand for a call."""
    return sum(
        max(rows_RU[:, first:last].sum(axis=1) * longest_RU[:, first]) + TOKENS_PER_MICROBATCH for first, last in cuts
    )


def fits(first, last, rows_RU, room_RU):
    """Whether units may be in one microbatch on every process; one with more rows than fit is in one by itself."""
    return last == first + 1 or bool((rows_RU[:, first:last].sum(axis=1) <= room_RU[:, first]).all())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_common_cut_of_the_units_costs_less(data):
    """Against every division of a few units into microbatches that fit; units of several rows, many of them equal."""
    scale, size = data.draw(st.sampled_from([1, 100, 600])), data.draw(st.sampled_from([1, 1, 2, 3]))
    count = data.draw(st.integers(1, 9))
    lists = st.lists(st.integers(1, 4), min_size=count, max_size=count)
    longest = np.array([sorted(data.draw(lists), reverse=True) for _ in range(size)]) * scale
    rows = np.array([[data.draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in range(count)] for _ in range(size)])
    for rank in range(size):
        if data.draw(st.booleans()) and size > 1 and count > 1:  # it has a unit less than others
            longest[rank, -1] = rows[rank, -1] = 0
    budget, max_rows = data.draw(st.integers(1, 20)) * scale, data.draw(st.integers(1, 9))
    room = np.minimum(max_rows, np.maximum(1, budget // np.maximum(1, longest)))
    possible = []
    for inner in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(at + 1 for at, cut_here in enumerate(inner) if cut_here), count]
        cuts = list(itertools.pairwise(edges))
        if all(fits(*one, rows, room) for one in cuts):
            possible.append(cost_of(cuts, rows, longest))
    found = best_cuts(rows, longest, room)
    assert found[0][0] == 0 and found[-1][1] == count
    assert all(before[1] == after[0] for before, after in itertools.pairwise(found))
    assert all(fits(*one, rows, room) for one in found)
    assert cost_of(found, rows, longest) == min(possible)


def in_lockstep(shares):
    """Tokens of the largest of the microbatches that run together, padding included; padding rows are not counted."""
    return [
        max(one.num_tokens if int(one.unit_index.max()) >= 0 else 0 for one in together)
        for together in zip(*shares, strict=True)
    ]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_processes_do_not_cost_more_than_with_the_best_common_cuts(data):
    """In lockstep, where the largest of the microbatches that run together counts."""
    size, max_rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    scale = data.draw(st.sampled_from([1, 300, 2000]))
    lengths = np.array(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=20))) * scale
    owner = deal(np.arange(len(lengths)), size, 5)
    most = int(np.bincount(owner, minlength=size).max())
    longest = np.zeros((1, most), dtype=int)  # at each place, over the processes
    for mine in (np.sort(lengths[owner == rank])[::-1] for rank in range(size)):
        longest[0, : len(mine)] = np.maximum(longest[0, : len(mine)], mine)
    rows = np.ones_like(longest)
    bound = cost_of(best_cuts(rows, longest, max_rows * rows), rows, longest)
    units = UnitIndex.one_row_per_unit(len(lengths))
    costs = in_lockstep([cut(units, lengths, range(len(lengths)), max_rows, rank, size, key=5) for rank in range(size)])
    assert sum(costs) + TOKENS_PER_MICROBATCH * len(costs) <= bound


@pytest.mark.parametrize(("size", "most"), [(2, 1.25), (8, 1.55), (64, 3.0)])
def test_microbatches_that_run_together_cost_about_the_same(size, most):
    """Tokens of a step in lockstep, as a multiple of a process's mean without padding; lengths spread as of text."""
    ratios = []
    for seed in range(3):
        lengths = np.exp(np.random.default_rng(seed).normal(np.log(100), 0.9, 1024)).astype(np.int64)
        units = UnitIndex.one_row_per_unit(1024)
        shares = [cut(units, lengths, range(1024), None, r, size, max_tokens=8192, key=seed) for r in range(size)]
        ratios.append(sum(in_lockstep(shares)) / (lengths.sum() / size))
    assert np.mean(ratios) < most


@kills(
    "a process that is ahead waits between the pieces of a unit",
    "dpllm/training/microbatches.py",
    "np.maximum(parts.full(part, budget), at + inside)",
    "parts.full(part, budget)",
)
def test_the_pieces_of_a_unit_follow_each_other_without_padding():
    """The clipper holds its rows from one to the next: also where a process is ahead, and the budget falls."""
    rows, tokens = np.array([3, 2, 1, 2]), np.array([90, 90, 20, 70, 60, 90, 70, 70])  # two units on each process
    pieces = [joint_pieces(rows, tokens, np.array([0, 2, 4]), rank, Bounds(1, None)) for rank in range(2)]
    assert len(pieces[0]) == len(pieces[1])
    assert pieces[1][:3] == [(5, 6, False), (6, 7, True), (7, 8, False)]
    for own in pieces:
        assert all(after is not None for before, after in itertools.pairwise(own) if before and before[2])


@pytest.mark.parametrize("size", [1, 3])
def test_more_units_than_cuts_are_chosen_for_are_divided_too(size, monkeypatch):
    """Each microbatch is as full as its bounds allow, and no unit is lost."""
    monkeypatch.setattr("dpllm.training.microbatches.MOST_PLACES", 4)
    rng = np.random.default_rng(0)
    owner = rng.integers(0, 40, 100)
    units, lengths = UnitIndex.from_ids([str(one) for one in owner]), rng.integers(1, 50, 100)
    shares = [cut(units, lengths, range(units.num_units), 6, rank, size, 120) for rank in range(size)]
    assert sorted(unit for share in shares for unit in units_of(share, units)) == list(range(units.num_units))
    assert len({len(share) for share in shares}) == 1
    assert all(one.num_tokens <= 120 or len(one.unit_index) == 1 for share in shares for one in share)


def test_a_few_long_rows_do_not_stretch_the_others():
    """Two rows of 1000 tokens and thirty of 100 would fit together; two microbatches save 27 000 tokens of padding."""
    units = UnitIndex.one_row_per_unit(32)
    batches = cut(units, [1000] * 2 + [100] * 30, range(32), None, max_tokens=32_000)
    assert [len(batch.unit_index) for batch in batches] == [2, 30]
    short = cut(units, [10] * 2 + [1] * 30, range(32), None, max_tokens=32_000)
    assert len(short) == 1  # padding of 270 tokens is less than the cost of a microbatch


def test_the_first_of_equally_good_cuts_is_full():
    """Memory peaks in the first microbatch."""
    batches = cut(UnitIndex.one_row_per_unit(5), [7] * 5, range(5), 2)
    assert [len(batch.unit_index) for batch in batches] == [2, 2, 1]


def test_no_units_have_no_cuts():
    """Nothing drawn, nothing cut."""
    none = np.zeros((1, 0), dtype=np.int64)
    assert best_cuts(none, none, none) == []
