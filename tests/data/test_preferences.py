"""Pairs are those that TRL makes, each of its own example only, and the collator keeps pairs apart."""

import pytest

trl = pytest.importorskip("trl")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402

from dpllm.config import ConfigError  # noqa: E402
from dpllm.data.examples import PairCollator, Preferences, Tokens, reference_in, shares_prompts  # noqa: E402
from dpllm.data.lengths import Limits  # noqa: E402
from dpllm.data.records import DataError  # noqa: E402
from tests import trl_data  # noqa: E402
from tests.mutations import kills  # noqa: E402

SHAPES = trl_data.preferences()
SIDES = ("chosen", "rejected")


def made(dataset, keep=(), first=0, **options):
    return Preferences(tokens=Tokens(trl_data.tokenizer()), **options).rows(dataset, keep=keep, first=first)


def by_trl(dataset, folder, **options):
    """The batches of TRL's collator for each pair: sequences and the mask of the answers."""
    args = trl_data.arguments(trl.DPOConfig, folder, **options)
    trainer = trl.DPOTrainer(
        trl_data.model(), trl_data.model(), args, train_dataset=dataset, processing_class=trl_data.tokenizer()
    )
    return [trainer.data_collator([row]) for row in trainer.train_dataset]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"max_length": 10}], ids=["whole", "cut"])
def test_pairs_of_each_shape_are_those_of_trl(shape, options, tmp_path):
    """Both sequences, and the tokens of the answers."""
    if options and "chat" in shape:
        options = {"max_length": 24}
    for own, its in zip(made(SHAPES[shape], **options), by_trl(SHAPES[shape], tmp_path, **options), strict=True):
        for place, side in enumerate(SIDES):
            used = its["attention_mask"][place].bool()
            assert own[f"{side}_input_ids"] == its["input_ids"][place][used].tolist()
            is_answer = [label != -100 for label in own[f"{side}_labels"]]
            assert is_answer == its["completion_mask"][place][used].bool().tolist()
            assert any(is_answer) and not all(is_answer)


def test_each_pair_is_made_of_its_own_example_and_has_its_number():
    """And the column of users is kept."""
    dataset = SHAPES["prompt"].add_column("person", list("aabb"))
    rows = made(dataset, ["person"], first=10)
    assert rows["pair"][:] == [10, 11, 12, 13] and rows["person"][:] == list("aabb")
    alone = [made(dataset.select([number]), ["person"], first=10 + number)[0] for number in range(4)]
    assert list(rows) == alone


@kills(
    "the reference of a pair is that of the first pair of its microbatch",
    "dpllm/data/examples.py",
    "self.reference[numbers]",
    "self.reference[numbers[:1].repeat(len(numbers))]",
)
def test_the_collator_makes_a_pair_of_its_row_only():
    """Padding excepted, a pair is the same beside others; the reference is that of its number."""
    rows, collate = list(made(SHAPES["prompt"])), PairCollator(0)
    assert collate(rows)["reference_log_probs"].tolist() == [[0, 0]] * 4
    collate.reference = np.arange(8.0).reshape(4, 2)
    whole = collate(rows[::-1])
    assert whole["reference_log_probs"].tolist() == [[6, 7], [4, 5], [2, 3], [0, 1]]
    for place, row in enumerate(rows[::-1]):
        alone = collate([row])
        for side in SIDES:
            own = alone[f"{side}_input_ids"].shape[1]
            assert torch.equal(whole[f"{side}_input_ids"][place, :own], alone[f"{side}_input_ids"][0])
            assert torch.equal(whole[f"{side}_labels"][place, :own], alone[f"{side}_labels"][0])
            assert whole[f"{side}_attention_mask"][place].sum() == own


@kills(
    "a pair's second sequence is not counted in its tokens",
    "dpllm/data/examples.py",
    "return longest * self.SEQUENCES",
    "return longest",
)
def test_a_row_counts_the_tokens_of_both_sequences_padded_to_the_longer():
    """A microbatch of these many tokens fits where one of a single sequence does; limits are those of one sequence."""
    rows, collate = made(SHAPES["prompt"]), PairCollator(0)
    longest = [max(len(row[f"{side}_input_ids"]) for side in SIDES) for row in rows]
    assert collate.row_lengths(rows, Limits(positions=max(longest))).tolist() == [2 * n for n in longest]
    with pytest.raises(DataError, match="model has pos"):
        collate.row_lengths(rows, Limits(positions=max(longest) - 1))


@pytest.mark.parametrize(
    ("columns", "options", "error", "says"),
    [
        ({"prompt": ["a"], "chosen": ["b"]}, {}, ConfigError, "no 'rejected'"),
        ({"prompt": ["a"], "chosen": ["b"], "rejected": [None]}, {}, DataError, "row 0: 'rejected' is missing"),
        ({"prompt": [None], "chosen": ["b"], "rejected": ["c"]}, {}, DataError, "row 0: 'prompt' must be a text"),
        (
            {
                "prompt": ["a"],
                "chosen": [trl_data.says("assistant", "b")],
                "rejected": [trl_data.says("assistant", "c")],
            },
            {},
            DataError,
            "row 0: 'prompt' must be a list of messages",
        ),
        (
            {"prompt": ["the dog"] * 2, "chosen": ["a"] * 2, "rejected": ["b"] * 2},
            {"max_length": 3},
            DataError,
            "2 pair",
        ),
    ],
)
def test_examples_that_cannot_be_used_are_refused(columns, options, error, says):
    """With the number of the row and the remedy."""
    with pytest.raises(error, match=says):
        made(Dataset.from_dict(columns), **options)


def test_a_reference_may_come_with_the_examples_and_is_complete():
    """Both columns, with finite numbers."""
    data = Dataset.from_dict({"ref_chosen_logps": [-1.0, -2.0], "ref_rejected_logps": [-3.0, -4.0]})
    assert reference_in(data).tolist() == [[-1, -3], [-2, -4]] and reference_in(SHAPES["chat"]) is None
    with pytest.raises(DataError, match="ref_chosen_logps"):
        reference_in(data.remove_columns("ref_rejected_logps"))
    with pytest.raises(DataError, match="row 1 has no finite"):
        reference_in(Dataset.from_dict({"ref_chosen_logps": [0.0, float("nan")], "ref_rejected_logps": [0.0, 0.0]}))


def test_prompts_that_several_pairs_share_are_found():
    """Texts and conversations, also without a column of prompts; a single pair in a hundred is not told."""
    assert not any(shares_prompts(data) for data in SHAPES.values())
    assert all(shares_prompts(data.select([0, 0, 1])) for data in SHAPES.values())
    other = SHAPES["implicit_chat"].select([0, 0])  # another answer to the same question
    answers = [{"role": "assistant", "content": text} for text in ("yes", "no")]
    chosen = [[pair["chosen"][0], answer] for pair, answer in zip(other, answers, strict=True)]
    assert shares_prompts(other.remove_columns("chosen").add_column("chosen", chosen))


@pytest.mark.parametrize("values", [["a"] * 4, [[1.0]] * 4, [{"a": 1}] * 4], ids=["text", "lists", "objects"])
def test_a_reference_that_is_no_number_is_refused(values):
    """It would fail in the first step."""
    given = trl_data.preferences(4)["prompt"].add_column("ref_chosen_logps", values)
    with pytest.raises(DataError, match="omit both"):
        reference_in(given.add_column("ref_rejected_logps", values))
