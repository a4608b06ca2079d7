"""A collator that draws random numbers makes each row from that row only, which its results show."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from dpllm.data.rows import RowCollator
from dpllm.training.checks.drawn import Alone, part_of
from dpllm.training.checks.independence import IndependenceError
from tests.training.checks.test_independence import GPT2, llama, plain, rows_of, steps, trainer

PAD = RowCollator(pad_token_id=0)


def hidden(rows, share=0.3):
    """Tokens are hidden at random, and learned where they were; the second one always is."""
    batch = PAD(rows)
    ids = batch["input_ids"].clone()
    drawn = (torch.rand(ids.shape) < share) & (batch["attention_mask"] == 1)
    drawn[:, 1] = True
    labels = torch.where(drawn, ids, -100)
    return {"input_ids": ids.masked_fill(drawn, 4), "attention_mask": batch["attention_mask"], "labels": labels}


def weighted(rows, over=None):
    batch = hidden(rows)
    used = (batch["labels"] != -100).float()
    return {**batch, "weights": used / used.sum(over, keepdim=True)}


def with_targets_in_one(rows):
    batch = weighted(rows)
    weights = batch.pop("weights")
    return {**batch, "labels": torch.stack([batch["labels"].float(), weights], -1)}


def left_padded(rows):
    batch = hidden(rows)
    width = batch["input_ids"].shape[1]
    for number, row in enumerate(rows):
        for value in batch.values():
            value[number] = value[number].roll(width - len(row["input_ids"]))
    return {**batch, "position_ids": torch.arange(width).expand(len(rows), width).clone()}


def of_the_width(rows):
    """Hides as many tokens of each row as 30 % of the padded width are."""
    batch = PAD(rows)
    ids, labels = batch["input_ids"], torch.full_like(batch["input_ids"], -100)
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        for place in random.sample(range(length), min(length, max(1, int(0.3 * ids.shape[1])))):
            labels[number, place], ids[number, place] = ids[number, place].item(), 4
    return {"input_ids": ids, "attention_mask": batch["attention_mask"], "labels": labels}


def width(rows):
    batch = hidden(rows)
    return {**batch, "n": torch.full((len(rows),), float(batch["input_ids"].shape[1]))}


def count(rows, kind):
    batch = hidden(rows)
    targets = (batch["labels"] != -100).sum()
    return {**batch, "n": int(targets) if kind is int else targets.expand(len(rows)).clone()}


def in_company_only(rows):
    return {**hidden(rows), **({"n": len(rows)} if len(rows) > 1 else {})}


def cropped(rows):
    made = []
    for row in rows:
        length = random.randint(3, len(row["input_ids"]))
        start = random.randint(0, len(row["input_ids"]) - length)
        made.append({"input_ids": row["input_ids"][start : start + length]})
    return PAD(made)


def spans(rows):
    """Sources with sentinels for spans of tokens, and these spans as targets: both have random lengths."""
    sources, targets = [], []
    for row in rows:
        source, target, place = [], [], 0
        while place < len(row["input_ids"]):
            taken = random.randint(1, 4) if random.random() < 0.1 else 0
            source.append(4 if taken else row["input_ids"][place])
            target += [4, *row["input_ids"][place : place + taken]] if taken else []
            place += max(1, taken)
        sources.append({"input_ids": source})
        targets.append({"input_ids": [*target, 3]})
    return {**PAD(sources), "labels": PAD(targets)["labels"]}


def masked_by_transformers():
    words = {name: place for place, name in enumerate(["[PAD]", "[MASK]", "[UNK]", *map(str, range(58))])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]", mask_token="[MASK]"
    )
    collate = DataCollatorForLanguageModeling(tokenizer)
    return lambda rows: dict(collate(rows))


def with_other_things(rows):
    """Numbers, texts and lists that are the same for every batch, and a list with an entry for each row."""
    lengths = [len(row["input_ids"]) for row in rows]
    return {**hidden(rows), "scale": 2.0, "layers": ["first"], "kind": "x", "nothing": None, "lengths": lengths}


def token_loss(model, inputs):
    taken = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
    loss_BT = F.cross_entropy(model(**taken).logits.transpose(1, 2), inputs["labels"], reduction="none")
    return (loss_BT * inputs.get("weights", 1.0)).sum(1) * inputs.get("scale", 1.0) / inputs.get("n", 1)


def gpt2():
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**GPT2, **dropout, initializer_range=0.2))


COUPLED = {
    "weights over the batch": (weighted, "'weights' of a row comes out differently beside other rows"),
    "positions from the padded end": (left_padded, "'position_ids' of a row comes out differently"),
    "the padded width": (width, "'n' of a row comes out differently"),
    "a count": (lambda rows: count(rows, torch.Tensor), "'n' of a row comes out differently"),
    "a count in a number": (lambda rows: count(rows, int), "'n' of a row comes out differently"),
    "a number in company only": (in_company_only, "'n' of a row .* it is there is 0 by itself and 1 beside"),
    "masks by the padded width": (of_the_width, "of a row comes out differently beside other rows"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_collator_that_draws_numbers_and_computes_a_column_from_the_batch_is_refused(name, tmp_path):
    """Rows are taken out of one batch, so that passes cannot show it: all of them have the batch's values."""
    collate, says = COUPLED[name]
    with pytest.raises(IndependenceError, match=says):
        steps(tmp_path, gpt2(), rows_of(plain(), collate=collate), token_loss, count=1)


def test_labels_that_hold_weights_over_the_batch_are_refused_by_the_trainer(tmp_path):
    def loss(outputs, labels):
        loss_BT = F.cross_entropy(outputs.logits.transpose(1, 2), labels[..., 0].long(), reduction="none")
        return (loss_BT * labels[..., 1]).sum(1)

    with pytest.raises(IndependenceError, match=r"labels\["):
        trainer(tmp_path, llama(), plain(), data_collator=with_targets_in_one, compute_loss_func=loss).train()


def test_what_a_collator_returns_beside_rows_reaches_the_loss(tmp_path):
    """A number, a text, and a list of another length than the rows."""
    charged, _ = steps(tmp_path, gpt2(), rows_of(plain(), collate=with_other_things), token_loss, count=2)
    assert charged == 2


def refusals(collate, rows, times):
    """Messages of checks on the first row, as a check of independence asks for them."""
    alone = Alone.of(collate, rows)
    batches = [collate(rows) for _ in range(times)]
    parts = [part_of(batch, [0], alone.labels_apart()) for batch in batches]
    return [message for part in parts if (message := alone.changed(collate, rows, part)) is not None]


SOUND = {
    "hidden tokens": hidden,
    "rarely hidden tokens": lambda rows: hidden(rows, share=0.02),
    "masked by transformers": masked_by_transformers(),
    "weights of the row": lambda rows: weighted(rows, over=1),
    "random crops": cropped,
    "spans": spans,
    "other things": with_other_things,
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("size", [2, 5])
def test_a_sound_collator_that_draws_numbers_is_never_refused(name, size):
    """Whatever numbers are drawn: a draw that is longer in the batch than each of eight by itself is ordinary."""
    rows = sorted(plain(count=size, shortest=20, longest=32), key=lambda row: len(row["input_ids"]))
    assert refusals(SOUND[name], rows, 8) == []


@pytest.mark.parametrize("lacks", ["a mask", "a true mask"])
def test_padding_that_rows_of_random_length_do_not_tell_is_refused(lacks):
    def collate(rows):
        batch = dict(cropped(rows))
        mask = batch.pop("attention_mask")
        return batch if lacks == "a mask" else {**batch, "attention_mask": torch.ones_like(mask)}

    rows = sorted(plain(count=8), key=lambda row: len(row["input_ids"]))
    (message,) = refusals(collate, rows, 1)
    assert "is padded beside longer rows in a way that its batch does not mark" in message


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_collator_that_draws_numbers_and_reorders_rows_is_refused(shuffled):
    """A row has every place of its batch in turn."""

    def collate(rows):
        other = random.sample(rows, len(rows)) if shuffled else sorted(rows, key=lambda row: -len(row["input_ids"]))
        return hidden(other)

    rows = [{"input_ids": np.arange(5, 25).tolist()}, *plain(count=4, shortest=21, longest=30)]
    assert refusals(collate, rows, 1)
