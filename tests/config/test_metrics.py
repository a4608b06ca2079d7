"""Metrics are named once, fit the task and its records, and say which package they need."""

import pytest

from dpllm.config import ConfigError, DataConfig, ModelConfig, PrivacyConfig, Recipe
from dpllm.config.metrics import METRICS
from dpllm.config.tasks import TASKS
from dpllm.training.evaluation import TEXT_METRICS

PROMPTS = {"format": "prompt_completion", "eval": 0.1}


def recipe(task="causal_lm", **data):
    return Recipe(
        model=ModelConfig(name="x", task=task),
        data=DataConfig(path="x", max_length=8, **data),
        privacy=PrivacyConfig(epsilon=8, delta=1e-6, clip_norm=1, expected_batch_size=64),
    )


def test_every_metric_is_computed_and_fits_a_task():
    """A metric of text has a function; the other one is the mean over classes."""
    assert METRICS.keys() - TEXT_METRICS.keys() == {"macro_f1"} and TEXT_METRICS.keys() <= METRICS.keys()
    assert all(set(about.tasks) <= set(TASKS) and about.tasks for about in METRICS.values())
    for name, about in METRICS.items():
        data = {"format": TASKS[about.tasks[-1]].formats[-1], "eval": 0.1}
        assert recipe(about.tasks[-1], metrics=[name], **data).data.metrics == [name]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metrics": ["blue"]}, r"metrics has no 'blue'; did you mean 'bleu'\? Known: bleu, rouge1"),
        ({"metrics": "bleu"}, "metrics must be a list of bleu, rouge1"),
        ({"metrics": ["bleu", "bleu"]}, "names a metric twice: bleu, bleu"),
        ({"metrics": ["macro_f1"], **PROMPTS}, "macro_f1 does not fit model.task='causal_lm'. Metrics of this task: b"),
        ({"metrics": ["bleu"], "eval": 0.1}, "data.format='text' has no prompt column"),
        ({"metrics": ["bleu"], **PROMPTS, "long_records": "split"}, "needs the prompt of a record in one row"),
        ({"metrics": ["bleu"], "format": "prompt_completion"}, "the recipe holds none out"),
        ({"metrics": ["bleu"], "task": "regression", "eval": 0.1}, "Metrics of this task: none"),
    ],
)
def test_a_metric_that_cannot_be_computed_is_refused(values, message):
    """When the recipe is read, with the remedy."""
    with pytest.raises(ConfigError, match=message):
        recipe(**values)
