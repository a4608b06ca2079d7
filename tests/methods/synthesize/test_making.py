"""Tests of the parts of a synthetic data set that see no private record: filters, labels, and drawing again."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest

from dpllm.config import ConfigError
from dpllm.methods.synthesize.texts import (
    DUPLICATE,
    KEPT,
    LONG,
    MOST_ROUNDS,
    FilterSettings,
    TextFilter,
    Wanted,
    make_texts,
    public_shares,
    shares_of,
    texts_of_each,
    write_records,
)
from dpllm.models.generation import Sampling


class Parrot:
    """A model that numbers its texts; every third one is empty."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int | None]] = []
        self.number = 0

    def sample(self, prompts, sampling, batch_size=16):
        self.calls.append((len(prompts), sampling.seed))
        for start in range(0, len(prompts), batch_size):
            texts = []
            for prompt in prompts[start : start + batch_size]:
                self.number += 1
                texts.append("" if self.number % 3 == 0 else f" {prompt} {self.number} ")
            yield texts


def test_texts_that_are_left_out_are_drawn_again_with_another_seed():
    """The number of texts is as asked for each prompt, and no round repeats the draws of another."""
    model, filters = Parrot(), TextFilter(FilterSettings())
    made = make_texts(
        model, [Wanted("a", 6, "one"), Wanted("b", 3, "two")], Sampling(seed=2**63 - 1), filters, batch_size=4
    )
    assert Counter(record["label"] for record in made.records) == {"one": 6, "two": 3}
    assert all(record["text"].startswith(record["prompt"]) and record["text"].strip() for record in made.records)
    seeds = [seed for _, seed in model.calls]
    assert len(set(seeds)) == len(seeds) > 1 and max(seeds) == 2**63 - 1
    assert made.drawn == sum(count for count, _ in model.calls) == 9 + made.dropped["empty"]
    assert made.missing == 0


def test_drawing_ends():
    """A filter that leaves out everything, and a model without chance, do not go on for ever."""
    nothing = TextFilter(FilterSettings(max_words=1))
    model = Parrot()
    made = make_texts(model, [Wanted("a b", 2)], Sampling(), nothing)
    assert made.missing == 2 and made.records == () and len(model.calls) == MOST_ROUNDS
    assert set(made.dropped) == {"empty", LONG}

    class Same(Parrot):
        def sample(self, prompts, sampling, batch_size=16):
            self.calls.append((len(prompts), sampling.seed))
            yield ["always"] * len(prompts)

    same = Same()
    made = make_texts(same, [Wanted("", 3)], Sampling(temperature=0), TextFilter(FilterSettings()))
    assert made.missing == 2 and made.dropped == {DUPLICATE: 4} and len(same.calls) == 2
    assert made.records == ({"text": "always"},)
    with pytest.raises(ConfigError, match="text is wanted"):
        make_texts(same, [Wanted("a", 0)], Sampling(), nothing)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_words": -1}, "min_words"),
        ({"max_words": 0}, "max_words"),
        ({"min_words": 3, "max_words": 2}, "below min_words"),
        ({"blocked": ("a", "!")}, "entry 2"),
    ],
)
def test_filters_that_make_no_sense_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        FilterSettings(**values)


def test_copies_are_kept_if_asked():
    kept = TextFilter(FilterSettings(duplicates=True))
    assert [kept.verdict("one") for _ in range(2)] == [KEPT, KEPT]


def test_shares_give_all_texts():
    """Rounded shares add up to the number, whatever the shares, and no label has more than one text too many."""
    shares = public_shares({"a": 1, "b": 1, "c": 1, "d": 0})
    for total in (1, 2, 100, 101):
        counts = texts_of_each(shares, total)
        assert sum(counts.values()) == total and counts["d"] == 0
        assert all(abs(counts[name] - share * total) < 1 for name, share in shares.items())


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": 1}, "at least two"),
        ({"a": 1, " ": 1}, "empty"),
        ({"a": -1, "b": 2}, "'a' is -1"),
        ({"a": True, "b": 2}, "'a' is True"),
        ({"a": float("inf"), "b": 2}, "'a' is inf"),
        ({"a": 0, "b": 0}, "no label has a count above 0"),
    ],
)
def test_shares_that_are_none_are_refused(weights, words):
    with pytest.raises(ConfigError, match=words):
        public_shares(weights)


def test_counts_below_their_noise_give_no_shares():
    with pytest.raises(ConfigError, match="noise is larger"):
        shares_of(["a", "b"], [-1.0, -2.0])


def test_files_of_texts(tmp_path):
    records = [{"label": "a", "text": "é"}, {"label": "b", "text": "x\ny"}]
    write_records(tmp_path / "t.jsonl", records)
    write_records(tmp_path / "t.parquet", records)
    lines = (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == records == pq.read_table(tmp_path / "t.parquet").to_pylist()
    with pytest.raises(ConfigError, match=r"not as \.csv"):
        write_records(tmp_path / "t.csv", records)
    with pytest.raises(FileExistsError):
        write_records(tmp_path / "t.jsonl", records)
