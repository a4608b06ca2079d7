"""Scores of membership from token probabilities."""

import math
import zlib

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dpllm.audit.scores import (
    TokenScores,
    loss_score,
    min_k_plus_plus_score,
    min_k_score,
    ratio_score,
    token_scores,
    zlib_score,
)
from dpllm.config import ConfigError, DataConfig
from dpllm.data.records import DataError
from dpllm.data.rows import RowCollator, tokenize_records
from tests.tiers import SHARED, needs_shared_data


def rows_of(*examples):
    return datasets.Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in examples])


def plain(model, ids, labels):
    """log p, mean and standard deviation at every target, in a float64 loop without batches."""
    logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    out = []
    for place, label in enumerate(labels[1:]):
        if label != -100:
            log_p = (logits[place] - logits[place].logsumexp(0)).tolist()
            mean = sum(math.exp(value) * value for value in log_p)
            second = sum(math.exp(value) * value**2 for value in log_p)
            out.append((log_p[label], mean, math.sqrt(second - mean**2)))
    return np.array(out).T


@needs_shared_data
@pytest.mark.parametrize("max_rows", [1, 3, 64])
@torch.no_grad()
def test_scores_are_those_of_a_plain_float64_loop(max_rows):
    """Batching, order, padding and chunks change nothing, on real weights and text."""
    folder = SHARED / "stories260K"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["Once upon a time, there was a dog.", "Lily ran.", "The sun was hot and Tom was happy to play."]
    records = datasets.Dataset.from_dict({"prompt": ["", "One day, ", ""], "completion": texts})
    config = DataConfig(path="x", max_length=64, format="prompt_completion")
    rows = tokenize_records(records, tokenizer, config)
    model.train()
    found = token_scores(model, rows, RowCollator(pad_token_id=0), max_rows)
    assert len(found) == 3 and model.training
    for number, row in enumerate(rows):
        log_prob, mean, stddev = plain(model, row["input_ids"], row["labels"])
        np.testing.assert_allclose(found.log_probs[number], log_prob, atol=2e-5)
        np.testing.assert_allclose(found.means[number], mean, atol=2e-5)
        np.testing.assert_allclose(found.stddevs[number], stddev, atol=2e-5)
        z = np.sort((log_prob - mean) / stddev)
        n = max(1, int(0.2 * len(z)))
        assert loss_score(found)[number] == pytest.approx(log_prob.mean(), abs=2e-5)
        assert min_k_score(found)[number] == pytest.approx(np.sort(log_prob)[:n].mean(), abs=2e-5)
        assert min_k_plus_plus_score(found)[number] == pytest.approx(z[:n].mean(), abs=1e-4)
        size = len(zlib.compress(texts[number].encode()))
        assert zlib_score(found, texts)[number] == pytest.approx(log_prob.mean() / size, abs=2e-6)


def test_few_places_at_a_time_give_the_same(tiny_llama, monkeypatch):
    """Neither the size of a chunk nor that of a batch shows."""
    rows = rows_of(([1, 5, 6, 7, 8], [-100, -100, 6, 7, 8]), ([1, 9], [1, 9]), ([1, 3, 3], [1, 3, 3]))
    whole = token_scores(tiny_llama, rows, RowCollator(pad_token_id=0))
    monkeypatch.setattr("dpllm.audit.scores.CHUNK_ENTRIES", 61)
    monkeypatch.setattr("dpllm.audit.scores._BATCH_ENTRIES", 61 * 5)
    parts = token_scores(tiny_llama, rows, RowCollator(pad_token_id=0))
    assert [len(values) for values in whole.log_probs] == [3, 1, 2]
    for name in ("log_probs", "means", "stddevs"):
        for one, other in zip(getattr(whole, name), getattr(parts, name), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_forbidden_token_and_a_uniform_distribution_have_finite_scores():
    """Logits of -inf and a standard deviation of 0 make no NaN."""

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, attention_mask):
            logits = torch.zeros(*input_ids.shape, 4)
            logits[:, 1:, 3] = -torch.inf
            return type("Output", (), {"logits": logits})

    found = token_scores(Fixed(), rows_of(([1, 2, 1], [1, 2, 1])), RowCollator(pad_token_id=0))
    np.testing.assert_allclose(found.log_probs[0], [-math.log(4), -math.log(3)], atol=1e-6)
    np.testing.assert_allclose(found.stddevs[0], 0, atol=1e-6)
    assert min_k_plus_plus_score(found).tolist() == [0.0]


def test_the_ratio_is_the_difference_of_the_losses(tiny_llama):
    """Against itself a model has a ratio of 0."""
    rows = rows_of(([1, 5, 6], [1, 5, 6]), ([1, 9], [1, 9]))
    found = token_scores(tiny_llama, rows, RowCollator(pad_token_id=0))
    better = TokenScores(tuple(values + 0.5 for values in found.log_probs), found.means, found.stddevs)
    np.testing.assert_allclose(ratio_score(better, found), 0.5)
    assert ratio_score(found, found).tolist() == [0.0, 0.0]
    with pytest.raises(DataError, match="scored"):
        ratio_score(found, TokenScores(found.log_probs[:1], (), ()))


def test_what_has_no_score_is_refused(tiny_llama):
    """A classifier, no row, no target, texts that do not fit, and a k that is no share."""
    collator = RowCollator(pad_token_id=0)
    with pytest.raises(ConfigError, match="sequence_classification"):
        token_scores(tiny_llama, rows_of(([1], [1])), RowCollator(pad_token_id=0, task="sequence_classification"))
    with pytest.raises(DataError, match="no row to score"):
        token_scores(tiny_llama, rows_of(([1], [1])).select([]), collator)
    with pytest.raises(DataError, match="target token"):
        token_scores(tiny_llama, rows_of(([1, 2, 3], [1, 2, 3]), ([1, 2], [-100, -100])), collator)
    found = token_scores(tiny_llama, rows_of(([1, 2], [1, 2])), collator)
    with pytest.raises(DataError, match="2 texts"):
        zlib_score(found, ["a", "b"])
    for k in (0, 1.5):
        with pytest.raises(ConfigError, match="k, a share"):
            min_k_score(found, k)
