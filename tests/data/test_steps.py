"""Sizes that are rounded up: never down, by little, to few, and never beyond the largest."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpllm.data.rows import RowCollator
from dpllm.data.steps import rows_in_steps, tokens_in_steps


@given(st.lists(st.integers(1, 10_000), min_size=1), st.integers(0, 500))
def test_lengths_are_rounded_up_by_little(lengths, more):
    """By 15 tokens or an eighth, and not beyond the longest of all rows; the rounded length keeps its own."""
    lengths, longest = np.array(lengths), max(lengths) + more
    rounded = tokens_in_steps(lengths, longest)
    assert np.all(rounded >= lengths) and rounded.max() <= longest
    assert np.all(rounded - lengths <= np.maximum(15, lengths / 8))
    assert np.array_equal(tokens_in_steps(rounded, longest), rounded)


def test_unsigned_lengths_are_rounded_alike():
    """They have no negative, and those of 8 bits no sum."""
    lengths = [5, 33, 120, 100]
    for dtype in (np.int8, np.uint8, np.uint16, np.uint32, np.uint64):
        assert tokens_in_steps(np.array(lengths, dtype=dtype), 120).tolist() == [16, 48, 120, 112]


def test_lengths_are_few():
    """Of 1024 lengths and numbers of rows a few dozen are left."""
    assert len(set(tokens_in_steps(np.arange(1, 1025), 1024).tolist())) == 32
    assert len({rows_in_steps(count, 64) for count in range(1, 65)}) == 20


@given(st.integers(1, 300), st.integers(0, 300))
def test_rows_are_rounded_up_within_the_room(count, more):
    """By a quarter at most."""
    assert count <= rows_in_steps(count, count + more) <= min(count + more, count * 1.25)


def test_the_collator_pads_to_the_step():
    """Ids, masks and labels alike; without it to the longest row."""
    rows = [{"input_ids": [5] * 18}, {"input_ids": [6] * 3}]
    for steps_to, length in ((None, 18), (20, 20), (100, 32), (7, 18)):
        batch = RowCollator(pad_token_id=0, steps_to=steps_to)(rows)
        assert {tensor.shape for tensor in batch.values()} == {(2, length)}
        assert batch["attention_mask"].sum(1).tolist() == [18, 3] and (batch["labels"][:, 18:] == -100).all()
