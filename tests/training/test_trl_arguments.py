"""Every field of TRL's configurations is in a table: it works, is ignored with a reason, or is refused."""

import dataclasses
from pathlib import Path

import pytest

trl = pytest.importorskip("trl")

from peft import LoraConfig  # noqa: E402
from transformers import TrainingArguments  # noqa: E402

from dpllm.training.argument_table import IGNORED, REFUSED, WORKS  # noqa: E402
from dpllm.training.trl_arguments import DPO, SFT, checked_config, document  # noqa: E402
from tests import trl_data  # noqa: E402

TABLES = {"SFTConfig": SFT, "DPOConfig": DPO}


def own_arguments(kind, base):
    """The arguments that a dataclass has in addition to those of its base."""
    before = {item.name for item in dataclasses.fields(base)}
    return [item.name for item in dataclasses.fields(kind) if item.init and item.name not in before]


@pytest.mark.parametrize("name", TABLES)
def test_every_field_of_the_installed_class_is_in_the_table_and_no_other(name):
    """A new release may bring one that couples rows."""
    assert set(TABLES[name]) == set(own_arguments(getattr(trl, name), TrainingArguments))


@pytest.mark.parametrize("name", TABLES)
def test_defaults_are_never_refused(name, tmp_path):
    """And each entry says how the field is treated."""
    checked_config(trl_data.arguments(getattr(trl, name), tmp_path), name, TABLES[name], "this")
    assert all(entry.kind in (WORKS, IGNORED, REFUSED) and entry.reason for entry in TABLES[name].values())


def test_the_page_is_made_of_the_tables():
    """`python -m dpllm.training.trl_arguments` writes it."""
    file = Path(__file__).resolve().parents[2] / "docs" / "trl.md"
    assert file.read_text(encoding="utf-8") == document()


def test_the_first_program_of_the_page_runs_on_a_machine_without_a_gpu(tmp_path, monkeypatch):
    """TRL's configurations take bf16 by default, which needs one."""
    monkeypatch.chdir(tmp_path)
    trl_data.model().save_pretrained("model")
    trl_data.tokenizer().save_pretrained("model")
    program = document().split("```python\n")[1].split("```")[0]
    data = {"conversations": trl_data.shapes(2000)["messages"], "lora": LoraConfig(target_modules=["q_proj"], r=2)}
    data["preferences"] = next(iter(trl_data.preferences(2000).values()))
    exec(compile(program, "trl.md", "exec"), data)
    assert type(data["tuned"]).__name__ == "DPDPOTrainer"
