"""Collators of transformers, TRL and tutorials are given one row at a time: they work, or one sentence says why not."""

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForPermutationLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    default_data_collator,
)

from dpllm import DPTrainer, per_sequence_loss
from dpllm.config import ConfigError
from dpllm.data.rows import PackedCollator, RowCollator
from dpllm.data.single_rows import RowByRow, fetch_rows, same_values
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from tests.conftest import tiny_llama_config
from tests.training.test_trainer import arguments, privacy

PAD, COUNT = 0, 24
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1}


def tokenizer(side="right"):
    words = {name: place for place, name in enumerate(["[PAD]", "[MASK]", "[UNK]", "[END]", *map(str, range(57))])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")),
        pad_token="[PAD]",
        mask_token="[MASK]",
        eos_token="[END]",
        padding_side=side,
    )


def ids(count=COUNT, seed=1, even=False):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 12, count)
    return [rng.integers(4, 61, int(n + n % 2 if even else n)).tolist() for n in lengths]


def tokens(**more):
    return Dataset.from_dict({"input_ids": ids(), **more})


def masked(**more):
    return tokens(attention_mask=[[1] * len(row) for row in ids()], **more)


def llama():
    return LlamaForCausalLM(tiny_llama_config(pad_token_id=PAD))


def bert(kind=BertForMaskedLM):
    return kind(BertConfig(**SIZES, vocab_size=61, max_position_embeddings=32, pad_token_id=PAD))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=61, **sizes, decoder_start_token_id=PAD, pad_token_id=PAD))


def of_masked_tokens(outputs, labels):
    loss_BT = torch.nn.functional.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none")
    return loss_BT.sum(1) / (labels >= 0).sum(1).clamp(min=1)


# --------------------------------------------------------------------- written by hand, as tutorials do


def padded_sequences(rows):
    made = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True, padding_value=PAD)
    return {"input_ids": made, "attention_mask": made.ne(PAD).long(), "labels": made.clone()}


def without_a_mask(rows):
    made = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True, padding_value=PAD)
    return {"input_ids": made, "labels": made}


@dataclass
class Supervised:
    """Instruction tuning as in the best known recipe of 2023."""

    tokenizer: Any

    def __call__(self, instances):
        made, labels = ([torch.tensor(one[key]) for one in instances] for key in ("input_ids", "labels"))
        made = pad_sequence(made, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        labels = pad_sequence(labels, batch_first=True, padding_value=-100)
        return {"input_ids": made, "labels": labels, "attention_mask": made.ne(self.tokenizer.pad_token_id)}


def by_the_tokenizer(rows):
    return tokenizer().pad([{"input_ids": row["input_ids"]} for row in rows], padding="longest", return_tensors="pt")


def labels_behind_the_tokenizer(rows):
    batch = by_the_tokenizer(rows)
    batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == PAD, -100)
    return batch


def left_padded(rows):
    width = max(len(row["input_ids"]) for row in rows)
    lists = [[PAD] * (width - len(row["input_ids"])) + row["input_ids"] for row in rows]
    made = torch.tensor(lists)
    return {"input_ids": made, "attention_mask": (made != PAD).long(), "labels": made.masked_fill(made == PAD, -100)}


def longest_first(rows):
    return padded_sequences(sorted(rows, key=lambda row: -len(row["input_ids"])))


def stacked(rows):
    return {name: torch.stack([torch.tensor(row[name]) for row in rows]) for name in ("input_ids", "labels")}


def of_arrays(rows):
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in ("input_ids", "labels")}


def with_texts_and_weights(rows):
    batch = padded_sequences(rows)
    return {**batch, "texts": [" ".join(map(str, row["input_ids"])) for row in rows], "weight": torch.ones(len(rows))}


def with_token_weights(rows):
    batch = padded_sequences(rows)
    return {**batch, "weights": torch.rand(batch["input_ids"].shape), "scale": 2.0}


def popping(rows):
    made = [torch.tensor(row.pop("input_ids")) for row in rows]  # of the data set's own dictionaries
    return {"input_ids": torch.stack(made), "labels": torch.stack(made)}


def of_spans(rows):
    made = []
    for row in rows:
        start = random.randrange(len(row["input_ids"]) - 1)
        made.append({"input_ids": row["input_ids"], "labels": [-100] * start + row["input_ids"][start:]})
    return RowCollator(pad_token_id=PAD)(made)


def with_dropped_tokens(rows):
    kept = [[token for token in row["input_ids"] if np.random.rand() < 0.8] or row["input_ids"] for row in rows]
    return RowCollator(pad_token_id=PAD)([{"input_ids": one} for one in kept])


def with_negatives(rows):
    batch = padded_sequences(rows)
    return {**batch, "negative_input_ids": batch["input_ids"].roll(1, 0)}


def one_mask_rate(rows):
    batch, rate = padded_sequences(rows), random.uniform(0.1, 0.9)
    hidden = torch.rand(batch["input_ids"].shape) < rate
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 1)}


def in_chunks(rows, size=4):
    flat = torch.tensor([token for row in rows for token in row["input_ids"]] * size)
    flat = flat[: len(flat) // size * size].view(-1, size)
    return {"input_ids": flat, "labels": flat}


def without_short_rows(rows):
    kept = [row for row in rows if len(row["input_ids"]) > 5]
    made = [torch.tensor(row["input_ids"]) for row in kept]
    made = pad_sequence(made, batch_first=True) if made else torch.zeros(0, 1).long()
    return {"input_ids": made, "labels": made}


def without_a_row(rows):
    return {name: torch.tensor(rows[0]["input_ids"]) for name in ("input_ids", "labels")}


def with_lengths_of_media(rows):
    return {**padded_sequences(rows), "sound": torch.zeros(len(rows), len(rows[0]["input_ids"]) * 3, 2)}


def with_a_count(rows):
    return {**padded_sequences(rows), "num_tokens": sum(len(row["input_ids"]) for row in rows)}


def sometimes_more(rows):
    batch = padded_sequences(rows)
    return {**batch, "long": torch.ones(len(rows))} if batch["input_ids"].shape[1] > 6 else batch


def of_two_kinds(rows):
    batch = padded_sequences(rows)
    long = batch["input_ids"].shape[1] > 6
    return {**batch, "weight": torch.ones(len(rows), dtype=torch.float64 if long else torch.float32)}


def trl_module(name):
    return pytest.importorskip(f"trl.trainer.{name}")


WORKS = {
    "transformers default_data_collator": (lambda: default_data_collator, llama, lambda: masked(labels=ids())),
    "transformers DefaultDataCollator": (DefaultDataCollator, llama, lambda: masked(labels=ids())),
    "transformers DataCollatorWithPadding": (
        lambda: DataCollatorWithPadding(tokenizer()),
        lambda: bert(BertForSequenceClassification),
        lambda: tokens(label=[n % 2 for n in range(COUNT)]),
    ),
    "transformers DataCollatorForLanguageModeling": (
        lambda: DataCollatorForLanguageModeling(tokenizer(), mlm=False),
        llama,
        tokens,
    ),
    "the same, padded to multiples of 8": (
        lambda: DataCollatorForLanguageModeling(tokenizer(), mlm=False, pad_to_multiple_of=8),
        llama,
        tokens,
    ),
    "the same, for masked tokens": (lambda: DataCollatorForLanguageModeling(tokenizer()), bert, tokens),
    "transformers DataCollatorForSeq2Seq": (
        lambda: DataCollatorForSeq2Seq(tokenizer()),
        t5,
        lambda: masked(labels=ids(seed=2)),
    ),
    "transformers DataCollatorForTokenClassification": (
        lambda: DataCollatorForTokenClassification(tokenizer()),
        lambda: bert(BertForTokenClassification),
        lambda: tokens(labels=[[token % 2 for token in row] for row in ids()]),
    ),
    "transformers DataCollatorWithFlattening": (DataCollatorWithFlattening, llama, tokens),
    "TRL DataCollatorForLanguageModeling": (
        lambda: trl_module("sft_trainer").DataCollatorForLanguageModeling(PAD),
        llama,
        tokens,
    ),
    "pad_sequence": (lambda: padded_sequences, llama, tokens),
    "pad_sequence without a mask": (lambda: without_a_mask, llama, tokens),
    "instruction tuning": (lambda: Supervised(tokenizer()), llama, lambda: tokens(labels=ids())),
    "tokenizer.pad": (lambda: labels_behind_the_tokenizer, llama, tokens),
    "transformers, padded on the left": (
        lambda: DataCollatorForLanguageModeling(tokenizer("left"), mlm=False),
        llama,
        tokens,
    ),
    "padded on the left": (lambda: left_padded, llama, tokens),
    "longest first": (lambda: longest_first, llama, tokens),
    "torch.stack of rows of any length": (lambda: stacked, llama, lambda: tokens(labels=ids())),
    "NumPy arrays": (lambda: of_arrays, llama, lambda: tokens(labels=ids())),
    "texts and weights beside": (lambda: with_texts_and_weights, llama, tokens),
    "weights of tokens": (lambda: with_token_weights, llama, tokens),
    "rows that it changes": (lambda: popping, llama, lambda: tokens().to_list()),
    "random spans": (lambda: of_spans, llama, tokens),
    "dropped tokens": (lambda: with_dropped_tokens, llama, tokens),
    "negatives out of the batch": (lambda: with_negatives, llama, tokens),
    "one masking rate for the batch": (lambda: one_mask_rate, llama, tokens),
}
REFUSED = {
    "transformers, with a seed": (
        lambda: DataCollatorForLanguageModeling(tokenizer(), seed=1),
        bert,
        tokens,
        "has its own random generator|has seed=1",
    ),
    "transformers DataCollatorWithFlattening with boundaries": (
        lambda: DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        llama,
        tokens,
        "pack_rows=True",
    ),
    "TRL DataCollatorForLanguageModeling without padding": (
        lambda: trl_module("sft_trainer").DataCollatorForLanguageModeling(PAD, padding_free=True),
        llama,
        tokens,
        "pack_rows=True",
    ),
    "transformers DataCollatorForPermutationLanguageModeling": (
        lambda: DataCollatorForPermutationLanguageModeling(tokenizer()),
        llama,
        lambda: Dataset.from_dict({"input_ids": ids(even=True)}),
        r"'perm_mask' of shape \(1, .*for one row and \(1, .*for another",
    ),
    "TRL DataCollatorForPreference": (
        lambda: trl_module("dpo_trainer").DataCollatorForPreference(PAD),
        llama,
        lambda: tokens(prompt_ids=ids(), chosen_ids=ids(), rejected_ids=ids()),
        r"one row into 'input_ids' of shape \(2, .*DPDPOTrainer",
    ),
    "chunks of equal length": (lambda: in_chunks, llama, tokens, r"one row into 'input_ids' of shape .*packs"),
    "short rows left out": (lambda: without_short_rows, llama, tokens, r"one row into 'input_ids' of shape \(0, 1\)"),
    "no dimension of rows": (lambda: without_a_row, llama, tokens, "one row into 'input_ids' of shape"),
    "a tuple": (lambda: lambda rows: (padded_sequences(rows)["input_ids"],), llama, tokens, "collate returned a tuple"),
    "sound of other lengths": (lambda: with_lengths_of_media, llama, tokens, r"'sound' of shape \(1, .*one shape"),
    "a count": (lambda: with_a_count, llama, tokens, "'num_tokens' as a int that is another one for another row"),
    "columns of some rows": (lambda: sometimes_more, llama, tokens, "the column 'long' for some rows"),
    "two dtypes": (lambda: of_two_kinds, llama, tokens, "'weight' as torch.float32 and as torch.float64"),
}


def run_of(folder, name, table):
    collate, model, rows, *_ = table[name]
    torch.manual_seed(0)
    kind = model()
    losses = {"compute_loss_func": of_masked_tokens} if isinstance(kind, BertForMaskedLM) else {}
    columns = {"remove_unused_columns": "PermutationLanguage" not in name and "Preference" not in name}
    return DPTrainer(
        model=kind,
        args=arguments(folder, max_steps=1, per_device_train_batch_size=8, logging_strategy="no", **columns),
        privacy=privacy(expected_batch_size=8),
        train_dataset=rows(),
        data_collator=collate(),
        **losses,
    )


@pytest.mark.parametrize("name", WORKS)
def test_a_collator_works(name, tmp_path):
    """Nothing of it is changed; its rows are made one at a time, and a row in a batch is that row, padded."""
    run = run_of(tmp_path, name, WORKS)
    run.train()
    assert run.ledger.num_steps == 1


@pytest.mark.parametrize("name", REFUSED)
def test_a_collator_is_refused_by_one_sentence_before_anything_is_charged(name, tmp_path):
    says = REFUSED[name][-1]
    with pytest.raises(ConfigError, match=says) as refused:
        run_of(tmp_path, name, REFUSED).train()
    assert "\n" not in str(refused.value)
    ledger = tmp_path / LEDGER_FILE
    assert not ledger.exists() or read_ledger(ledger).num_steps == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_in_a_batch_is_that_row_and_padding(data):
    """Columns of tokens with every kind of name, on both sides, with more dimensions, beside columns of one shape."""
    side = data.draw(st.sampled_from(["left", "right"]))
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    targets = data.draw(st.lists(st.integers(1, 6), min_size=len(lengths), max_size=len(lengths)))

    def collate(rows):
        ((length, target),) = rows
        of_tokens = torch.arange(1, length + 1)[None]
        return {
            "input_ids": of_tokens,
            "attention_mask": torch.ones_like(of_tokens),
            "labels": torch.full((1, target), 5),
            "weights": of_tokens * 0.5,
            "soft_labels": of_tokens * 0.5,
            "chosen_labels": of_tokens,
            "tags": of_tokens,
            "input_ids_other": torch.full((1, target), 6),
            "spans": torch.stack([of_tokens, of_tokens], -1),
            "pixel_values": torch.full((1, 3, 2, 2), float(length)),
            "decoder_input_ids": torch.full((1, target), 6),
            "text": [str(length)],
            "inside": {"token_type_ids": torch.ones_like(of_tokens)},
            "scale": 2.0,
        }

    fills = {"input_ids": 9, "decoder_input_ids": 9, "input_ids_other": 9}
    fills |= dict.fromkeys(("labels", "chosen_labels", "tags"), -100)
    batch = RowByRow(collate, pad_token_id=9, padding_side=side)(list(zip(lengths, targets, strict=True)))
    batch |= batch.pop("inside")
    assert batch.pop("text") == [str(length) for length in lengths] and batch.pop("scale") == 2.0
    for place, (length, target) in enumerate(zip(lengths, targets, strict=True)):
        alone = collate([(length, target)])
        alone |= alone.pop("inside")
        for name, value in batch.items():
            own = value[place]
            if name != "pixel_values":
                count = alone[name].shape[1]
                padding, own = (own[:-count], own[-count:]) if side == "left" else (own[count:], own[:count])
                assert (padding == fills.get(name, 0)).all() and len(padding) + count == value.shape[1]
            assert torch.equal(own, alone[name][0]) and own.dtype == alone[name].dtype


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_that_are_packed_one_at_a_time_are_those_that_are_packed_together(count):
    rows = [{"input_ids": one} for one in ids(count)]
    assert same_values(dict(RowByRow(PackedCollator(), packed=True)(rows)), PackedCollator()(rows))


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification", "regression"])
def test_dpllms_own_collator_makes_the_same_batch_of_single_rows(task):
    label = {"sequence_classification": 1, "regression": 0.5}.get(task)
    rows = [{"input_ids": one, **({} if label is None else {"label": label})} for one in ids(5)]
    collate = RowCollator(pad_token_id=7, task=task)
    assert same_values(dict(RowByRow(collate)(rows)), collate(rows))


def test_the_padding_is_that_of_the_collators_tokenizer():
    """Its token and its side; a batch is of the class that the collator returns."""
    own = DataCollatorWithPadding(tokenizer("left"))
    assert (RowByRow(own).pad_token_id, RowByRow(own).padding_side) == (PAD, "left")
    batch = RowByRow(own)([{"input_ids": [5]}, {"input_ids": [6, 7, 8]}])
    assert isinstance(batch, BatchEncoding) and batch["input_ids"].tolist() == [[PAD, PAD, 5], [6, 7, 8]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    with pytest.raises(ConfigError, match="padding_side is 'top'"):
        replace(RowByRow(own), padding_side="top")


def test_the_losses_of_rows_that_are_padded_on_the_left_are_those_on_the_right(tmp_path):
    """A model with relative positions, and a tokenizer that pads on the left."""
    run = run_of(tmp_path, "tokenizer.pad", WORKS)
    rows, model = tokens().to_list(), run.model.eval()
    found = []
    for side in ("left", "right"):
        batch = dict(replace(run._prepared.rows.collate, padding_side=side)(rows[:5]))
        labels = batch.pop("labels")
        found.append(per_sequence_loss(model(**batch).logits, labels))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_a_row_that_is_read_beside_another_is_what_it_is_alone(form):
    """NumPy's and PyTorch's formats make one array of all rows that are read, and a missing number makes it floats."""
    dataset = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "age": [1700000001, None]}).with_format(form)
    together, alone = fetch_rows(dataset, np.arange(2)), [fetch_rows(dataset, np.array([n]))[0] for n in (0, 1)]
    for one, other in zip(together, alone, strict=True):
        assert str(one["age"]) == str(other["age"]) and list(one["input_ids"]) == list(other["input_ids"])
    assert int(together[0]["age"]) == 1700000001
