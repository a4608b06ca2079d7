"""Shared by all tests: one thread per process, no progress bars, no Hub."""

import gc
import logging
import os
import signal

if gc.isenabled():  # until the tests are collected: what the imports and the collection create stays
    gc.disable()

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

if not torch.cuda.is_available():  # before anything imports Triton, which decides then whether it interprets
    os.environ.setdefault("TRITON_INTERPRET", "1")

import datasets
import pytest

from tests import children, interpreted, tiers

interpreted.mend()

# A suite that runs in the background, or under nohup, ignores these, and so would every program that it starts.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    tiers.mark_the_rest_of_grids(items)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """Every Trainer collects garbage when it begins: what is older than this module is not searched each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _collectable_at_the_end():
    """Libraries report objects that were not collected when the interpreter ends."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _deterministic():
    """Without an accelerator, ``torch.manual_seed`` keeps a stack trace for each kind of one, in milliseconds."""
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture
def rows_not_compared(request, monkeypatch):
    """For runs that are about something else: in ``make test`` they do not compare rows before their steps.

    The comparison takes two thirds of a short run. It is tested in `tests.training.checks`; the README's programs, the
    recipes and the engines have it in every run, and in ``make test-deep`` these tests have it too. A test that is
    marked ``compares_rows`` always has it.
    """
    if tiers.is_quick(request.config) and not request.node.get_closest_marker("compares_rows"):
        monkeypatch.setattr("dpllm.training.checks.independence.IndependenceCheck.before_step", lambda *_, **__: None)


@pytest.fixture(autouse=True)
def _no_child_outlives_its_test():
    """Also when the test failed or was interrupted."""
    yield
    children.end_all()


@pytest.fixture(autouse=True)
def _audible_libraries():
    """A program that silences libraries, run within a test, leaves them audible to the tests that follow."""
    loggers = [logging.getLogger(name) for name in ("transformers", "datasets", "dpllm")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Copies of data sets stay in the session's own folder, also those of fixtures that many tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
        yield


@pytest.fixture(autouse=True)
def _quiet_datasets():
    """Progress bars stay off."""
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def tiny_llama_config(**changes):
    from transformers import LlamaConfig

    settings = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**settings, **changes})


@pytest.fixture
def tiny_llama():
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(tiny_llama_config())


@pytest.fixture
def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
