"""An error in a program says how the program gives the keys that the message names."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

import dpllm
from dpllm import DPTrainer, GhostClipper, GhostError, PrivacyConfig, PrivateRun, TrainingRows, make_plan
from dpllm.config import ConfigError
from dpllm.config.python_names import OF_LOOP, OF_TRAINER, named_in_python, python_names

PACKAGE = Path(dpllm.__file__).parent
OF_RECIPES = ("cli", "methods", "planning", "audit")  # folders whose messages only a user of recipes sees
PRIVACY = {"target_epsilon": 8.0, "clip_norm": 1.0, "expected_batch_size": 16}


def messages() -> list[str]:
    """The texts of the library, without docstrings."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in OF_RECIPES:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
        found += [node.value for node in texts if id(node) not in documents]
    return found


def exists(name: str) -> bool:
    """Whether the classes and functions of the library have this name."""
    found = re.fullmatch(r"(\w+(?:\.\w+)?)\((\w+)=.*\)", name.split(", or ")[0].split(";")[0])
    if found is None:
        return True
    place, argument = found.groups()
    owners = {
        "DPTrainer": DPTrainer,
        "PrivacyConfig": PrivacyConfig,
        "TrainingArguments": TrainingArguments,
        "TrainingRows": TrainingRows,
        "PrivateRun.attach": PrivateRun.attach,
        "PrivateRun.start": PrivateRun.start,
        "train": DPTrainer.train,
    }
    return argument in inspect.signature(owners[place]).parameters


def test_every_key_of_a_message_has_a_name_that_exists():
    """A key that was renamed, or an argument that is gone, would lead nowhere."""
    named = {key: name for text in messages() for key, name in python_names(text, OF_TRAINER).items()}
    wrong = {key: name for key, name in named.items() if not exists(name)}
    assert len(named) > 40 and wrong == {}
    loop = {key: name for text in messages() for key, name in python_names(text, OF_LOOP).items()}
    assert len(loop) > 20 and {key: name for key, name in loop.items() if not exists(name)} == {}


def test_every_name_is_of_a_key():
    """Of a recipe's section, or of the options of a training."""
    for names in (OF_TRAINER, OF_LOOP):
        for key in (key for key in names if "." in key and not key.startswith("train.") and names[key]):
            assert python_names(key, names), key


def notes(error: pytest.ExceptionInfo) -> str:
    return " ".join(getattr(error.value, "__notes__", ()))


def model():
    return torch.nn.Linear(3, 2)


class Half(torch.nn.Module):
    """One of its layers has no part in the loss."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

    def forward(self, rows):
        return self.used(rows).squeeze(1)


def clipped(half):
    clipper = GhostClipper(half, clip_norm=1.0)
    try:
        clipper.backward(half(torch.ones(2, 3)))
    finally:
        clipper.remove()


@pytest.mark.parametrize(
    ("call", "note"),
    [
        (
            lambda folder: make_plan(PrivacyConfig(**PRIVACY), num_units=200, num_steps=0),
            "In Python: train.max_steps is num_steps of make_plan",
        ),
        (
            lambda folder: DPTrainer(model(), TrainingArguments(folder, use_cpu=True, optim="lomo"), PRIVACY, []),
            "In Python: train.optim is TrainingArguments(optim=...)",
        ),
        (
            lambda folder: DPTrainer(model(), TrainingArguments(folder, use_cpu=True), {**PRIVACY, "clipnorm": 1}, []),
            "privacy.clip_norm is PrivacyConfig(clip_norm=...), or the key 'clip_norm' of the dictionary",
        ),
        (
            lambda folder: clipped(Half()),
            "privacy.unused_parameters is PrivateRun.freeze_unused(...), or requires_grad_(False); privacy.gradients "
            "is PrivateRun.attach(gradients=...)",
        ),
    ],
    ids=["plan", "argument", "dictionary", "clipper"],
)
def test_an_error_names_the_argument(call, note, tmp_path):
    """Below the message, which stays as it is for recipes."""
    with pytest.raises((ValueError, GhostError)) as error:
        call(str(tmp_path))
    assert note in notes(error)


def test_the_outermost_call_gives_the_names():
    """A Trainer plans and clips inside: its user never called make_plan."""

    @named_in_python(OF_TRAINER)
    def outer():
        inner()

    @named_in_python(OF_LOOP)
    def inner():
        raise ConfigError("train.max_steps is 0")

    with pytest.raises(ConfigError) as error:
        outer()
    assert str(error.value) == "train.max_steps is 0"
    assert notes(error) == "In Python: train.max_steps is TrainingArguments(max_steps=...)"
    assert not hasattr(dataclasses.replace(PrivacyConfig(**PRIVACY)), "__notes__")


def test_an_error_without_keys_and_an_attribute_have_no_note():
    """`model.config` is what a program says, too."""

    @named_in_python(OF_TRAINER)
    def fails():
        raise ValueError("set model.config.num_labels")

    with pytest.raises(ValueError, match="num_labels") as error:
        fails()
    assert notes(error) == ""
