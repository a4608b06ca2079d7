"""The cache changes nothing, and a row has the same logits beside any other rows."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from dpllm.config import ConfigError
from dpllm.models.writing import Continuation
from tests.conftest import tiny_llama_config

ROWS = [[1, 5, 9, 20, 7], [1, 3], [1, 40, 41, 42, 43, 44], [1, 8, 8], [2]]
TOKENS = [4, 17, 30, 2]


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_llama_config(vocab_size=48, initializer_range=0.3)).eval()


def gpt2():
    """Learned positions: a padded row with wrong ones would be another row."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32, "initializer_range": 0.5}
    return GPT2LMHeadModel(GPT2Config(vocab_size=48, **sizes)).eval()


def course(model, rows, rows_per_pass, cached, length=8):
    """Return the logits of every row before each token and after the last."""
    continued, found = Continuation(model, rows, length, rows_per_pass, cached), []
    for token in [*TOKENS, None]:
        found.append(torch.cat([logits_RV for _, logits_RV in continued.logits()]))
        if token is not None:
            continued.append(token)
    return torch.stack(found)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-11), (torch.float32, 2e-4)])
def test_the_cache_and_the_passes_change_nothing(make, dtype, close):
    """Against one row at a time, without padding and without a cache."""
    model = make().to(dtype)
    reference = []
    with torch.no_grad():
        for count in range(len(TOKENS) + 1):
            rows = [torch.tensor([[*row, *TOKENS[:count]]]) for row in ROWS]
            reference.append(torch.cat([model(row).logits[:, -1] for row in rows]))
    for rows_per_pass in (1, 2, 5):
        for cached in (True, False):
            assert torch.allclose(course(model, ROWS, rows_per_pass, cached), torch.stack(reference), atol=close)


def test_a_row_has_the_same_bits_beside_any_other_rows():
    """Lengths and passes are public, so shapes do not depend on a record."""
    model = llama()
    one = course(model, ROWS, 3, cached=True)
    other = course(model, [ROWS[0], [1, 2, 3, 4, 5, 6, 7, 8], [9], [1, 30], ROWS[4]], 3, cached=True)
    assert torch.equal(one[:, [0, 4]], other[:, [0, 4]])


@pytest.mark.parametrize(("rows", "length"), [([[1, 2, 3]], 2), ([[]], 2)])
def test_rows_that_do_not_fit(rows, length):
    """A row longer than the public length would show its own."""
    with pytest.raises(ConfigError, match="Every row needs"):
        Continuation(llama(), rows, length, 1)
