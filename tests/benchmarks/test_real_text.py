"""benchmarks/real_text.py: tokens and padding are those of the batches that were trained on, on both sides."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from dpllm.data.rows import RowCollator
from tests.benchmarks.material import program, save_model, write_records
from tests.tiers import deep_case

benchmark = program("real_text")

STOCK, GROUPED, PRIVATE = benchmark.METHODS
RECORDS, BATCH = 60, 12


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A folder with a tiny model and its tokenizer, and a CSV file of records of mixed lengths."""
    folder = tmp_path_factory.mktemp("material")
    save_model(folder / "model", max_length=48)
    write_records(folder / "records.csv", random.Random(0), RECORDS, (3, 12))
    return folder


def options(folder: Path, *extra: str) -> list[str]:
    """A run of two steps after one."""
    places = ["--model", str(folder / "model"), "--data", str(folder / "records.csv"), "--columns", "mr", "ref"]
    sizes = ["--batch", str(BATCH), "--steps", "2", "--warmup", "1", "--max-length", "40", "--max-tokens", "160"]
    return [*places, *sizes, "--device", "cpu", "--rank", "2", *extra]


def settings(folder: Path, **changes) -> benchmark.Settings:
    """The same as Settings."""
    values = {
        "model": str(folder / "model"),
        "data": str(folder / "records.csv"),
        "columns": ("mr", "ref"),
        "max_length": 40,
        "batch": BATCH,
        "steps": 2,
        "warmup": 1,
        "max_tokens": 160,
        "device": "cpu",
    }
    return benchmark.Settings(**values | changes)


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["full", deep_case("both")])
def test_command_line_prints_tables_and_writes_json(mode, material, tmp_path, capsys):
    """Full and LoRA run from the command line; tokens, shares and ratios agree with one another."""
    modes = ["full", "lora"] if mode == "both" else [mode]
    path = tmp_path / "real_text.json"
    benchmark.main(options(material, "--mode", mode, "--json", str(path)))
    reports = json.loads(path.read_text())
    assert [report["settings"]["mode"] for report in reports] == modes
    for report in reports:
        methods = report["methods"]
        assert list(methods) == [STOCK, GROUPED, PRIVATE]
        for figures in methods.values():
            assert 0 < figures["real_tokens"] <= figures["tokens"]
            assert figures["padding_share"] == pytest.approx(1 - figures["real_tokens"] / figures["tokens"])
            assert figures["real_tokens_per_second"] == pytest.approx(figures["real_tokens"] / figures["seconds"])
            assert figures["largest_microbatch_tokens"] <= report["token_budget"] <= 160
            assert 0 < figures["seconds"] < figures["whole_seconds"]
            assert figures["peak_bytes"] > 0
            for name in ("real_tokens_per_second", "whole_real_tokens_per_second", "peak_bytes"):
                for stock in (STOCK, GROUPED):
                    assert figures[f"{name}_over"][stock] == pytest.approx(figures[name] / methods[stock][name])
        assert methods[STOCK]["rows"] == methods[GROUPED]["rows"] == 2 * BATCH
        assert methods[STOCK]["microbatches"] == 2 * BATCH / report["rows_per_microbatch"]
        assert report["num_rows"] == 3 * BATCH
        assert report["machine"]["torch"] == torch.__version__
    assert all(word in capsys.readouterr().out for word in modes)


def test_counts_are_those_of_the_batches_trained_on(material):
    """The stock loader collates one batch ahead and DPTrainer compares rows with each other: neither is counted."""
    chosen = settings(material, warmup=2, steps=1)  # rows are compared in steps 1 and 2 and in the last
    prepared = benchmark.prepare(chosen)
    for method in benchmark.METHODS:
        folder = str(material / f"run-{method}")
        trainer, counter = benchmark.make_trainer(method, chosen, prepared, folder)
        seen: list[tuple[int, int, int]] = []

        def look(model, args, kwargs, seen=seen):
            mask = kwargs["attention_mask"]
            seen.append((int(mask.sum()), mask.numel(), len(mask)))

        trainer.model.register_forward_pre_hook(look, with_kwargs=True)
        trainer.train()
        counted = counter.collator.batches[counter.start.batches : counter.end.batches]
        assert counted == seen[-len(counted) :]
        if method != PRIVATE:
            assert sum(rows for _, _, rows in counted) == BATCH


def test_rows_are_one_pass_taken_evenly(material):
    """The rows are as many as the steps take, from all over the file; with fewer records, all of them."""
    few = benchmark.prepare(settings(material, warmup=1, steps=1))
    assert len(few.rows) == 2 * BATCH
    every = benchmark.prepare(settings(material, steps=50))
    assert len(every.rows) == RECORDS
    lengths = list(map(len, every.rows["input_ids"]))
    assert every.longest == max(lengths) and len(set(lengths)) > 5


def test_microbatch_fits_the_budget_and_divides_the_batch(material):
    """The stock microbatch has the most rows that fit at any length and divide a logical batch."""
    for max_tokens in (80, 160, 10_000):
        prepared = benchmark.prepare(settings(material, max_tokens=max_tokens))
        rows = prepared.rows_per_microbatch
        assert BATCH % rows == 0 and prepared.budget == rows * prepared.longest <= max_tokens
        assert all(BATCH % more or more * prepared.longest > max_tokens for more in range(rows + 1, BATCH + 1))


def test_configuration_and_text_column(material, tmp_path):
    """A model of random weights from a configuration, and records of one text column."""
    values = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    parsed = benchmark.parse_arguments(["--config", str(path), "--tokenizer", str(material / "model")])
    assert parsed.config == benchmark._configuration(json.dumps(values)) == values
    chosen = settings(material, config=parsed.config, tokenizer=parsed.tokenizer, columns=("ref",))
    prepared = benchmark.prepare(chosen)
    assert prepared.base.config.num_hidden_layers == 1
    assert prepared.rows[0]["labels"] == prepared.rows[0]["input_ids"]


def test_collator_counts_what_it_returns():
    """Real tokens, all tokens and rows of a batch, which is the wrapped collator's own."""
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    counting = benchmark.CountingCollator(RowCollator(pad_token_id=0))
    assert torch.equal(counting(rows)["input_ids"], RowCollator(pad_token_id=0)(rows)["input_ids"])
    assert counting.batches == [(4, 6, 2)]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--batch", "61"], "--batch is 61, and .* has 60 records; lower it"),
        (["--max-tokens", "3"], "--max-tokens is 3, and the longest row has .* tokens; raise it"),
        (["--model", "./nowhere"], "the tokenizer './nowhere' cannot be loaded"),
        (["--columns", "rf"], "no column 'rf'"),
    ],
)
def test_what_does_not_fit_the_data_is_one_line(extra, message, material):
    """A batch, a budget, a model or a column that does not exist ends with one clear line, before any run."""
    with pytest.raises(SystemExit, match=message) as stopped:
        benchmark.main(options(material, *extra))
    assert "\n" not in str(stopped.value)
