"""The value of model.quantization: what is known is read, and what would couple rows or train nothing is refused."""

import pytest

from dpllm.config import ConfigError, ModelConfig, load_recipe
from dpllm.config.quantization import Quantization
from tests.mutations import kills

LORA = {"r": 2, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("nf4", Quantization("nf4", double=True)),
        ({"kind": "fp4", "double": False}, Quantization("fp4", double=False)),
        ({"kind": "int8", "outlier_threshold": 0}, Quantization("int8")),
    ],
    ids=str,
)
def test_words_and_mappings(value, expected):
    """A word is a kind with its defaults."""
    assert Quantization.of(value) == expected
    assert ModelConfig(name="m", adapter=LORA, quantization=value).quantization == value


@kills(
    "a recipe may ask for outlier columns of LLM.int8",
    "dpllm/config/quantization.py",
    "if self.outlier_threshold:",
    "if False:",
)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("int4", r"quantization\.kind must be one of 'nf4', 'fp4', 'int8', got 'int4'"),
        ({"double": True}, "must be one of nf4, fp4, int8, or a mapping with kind"),
        ({"kind": "nf4", "dubble": True}, r"nf4 has no option 'dubble'; did you mean 'double'\?"),
        ({"kind": "nf4", "double": "yes"}, r"quantization\.double must be true or false"),
        (
            {"kind": "int8", "outlier_threshold": 6.0},
            "=6 chooses outlier columns over all rows.*Leave it out.*Or use nf4",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_when_the_recipe_is_read(value, message):
    """Before a model is loaded."""
    with pytest.raises(ConfigError, match=message):
        ModelConfig(name="m", adapter=LORA, quantization=value)


def test_frozen_weights_need_an_adapter():
    """Otherwise norms and embeddings alone would be trained, silently."""
    with pytest.raises(ConfigError, match="quantization=nf4"):
        ModelConfig(name="m", quantization="nf4")


def test_random_weights_are_not_frozen(tmp_path):
    """A model from a configuration, without public training."""
    path = "recipes/quickstart.yaml"
    lora = ["model.adapter={r: 2, target_modules: all-linear}", "model.quantization=nf4"]
    assert load_recipe(path, lora).model.quantization == "nf4"
    with pytest.raises(ConfigError, match=r"model\.config"):
        load_recipe(path, [*lora, "public_pretrain=null"])
