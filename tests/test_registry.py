"""The core works without methods, and a method that cannot be imported is named."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpllm import registry
from dpllm.registry import MethodError
from dpllm.report.model_card import write_model_card
from dpllm.report.statement import write_report
from tests import children
from tests.report.test_verify import NOTES, NUM_STEPS, charge, plan_of
from tests.test_imports import execute

ROOT = Path(__file__).parents[1]
RECIPE = """
model: {config: {model_type: llama}, tokenizer_vocab_size: 300}
data: {path: records.jsonl, max_length: 8}
privacy: {noise_multiplier: 1.0, clip_norm: 1.0, expected_batch_size: 4, delta: 1.0e-3}
train: {output_dir: run, max_steps: 3}
public_pretrain: {data: {path: public.jsonl, max_length: 8}, train: {output_dir: unused, max_steps: 1}}
"""

WITHOUT_METHODS = """
import sys
from pathlib import Path
from dpllm import registry
registry.CATALOGUE = Path("there/is/none.toml")
from typer.testing import CliRunner
from dpllm.cli.program import app
from dpllm.mechanism.catalogue import from_fields

def call(*arguments, code=0):
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, (arguments, found.output)
    return " ".join(found.output.split())

assert "Methods" not in call("--help") and "generate" in call("--help")
assert "privately" in call("train", "--help") and "gradient" in call("audit", "--help")
assert "ε" in call("plan", "recipe.yaml") and "matches its ledger" in call("verify", "run")
assert "unknown key 'federate'" in call("plan", "recipe.yaml", "federate={}", code=2)
assert "installed methods: none" in call("plan", "recipe.yaml", "count={}", code=2)
assert "quickstart" in call("recipes")
try:
    from_fields({"event": "token draw", "noise_multiplier": 1.0})
except ValueError as error:
    assert "Installed methods: none" in str(error)
else:
    raise AssertionError("an event of no installed method was read")
assert not [name for name in sys.modules if name.startswith("dpllm.methods")]
"""


@pytest.fixture
def emptied() -> Iterator[None]:
    """The methods are asked for again, before and after the test."""
    registry.methods.cache_clear()
    yield
    registry.methods.cache_clear()


def test_the_core_works_without_methods(tmp_path):
    """Plan, help, verify, recipes; what is of a method is refused with the methods that there are."""
    run, plan = tmp_path / "run", plan_of()
    run.mkdir()
    plan.save(run / "privacy_plan.json")
    report = write_report(run, plan, charge(run, plan, NUM_STEPS), NOTES)
    write_model_card(run, report, base_model="org/base", task="causal_lm", adapter=False)
    for name in ("records", "public"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "a {n}"}}\n' for n in range(50)), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    log = tmp_path / "log"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    fork = children.Forked(execute, WITHOUT_METHODS, env=env, log=log, cwd=tmp_path)
    assert children.wait_all([fork]) == [0], log.read_text(encoding="utf-8")[-3000:]


def core() -> list[Path]:
    return [path for path in (ROOT / "dpllm").rglob("*.py") if (ROOT / "dpllm" / "methods") not in path.parents]


def test_no_file_of_the_core_names_a_method_to_import_it():
    """`lint-imports` finds the statements; names in strings could be imported too, and docstrings only name them."""
    for path in core():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        places = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        told = {id(node.value) for node in places if isinstance(node.value, ast.Constant)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in told]
        assert not [text for text in texts if isinstance(text.value, str) and "dpllm.methods" in text.value], path
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        modules += [one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names]
        assert not [name for name in modules if name.startswith("dpllm.methods")], path


def test_a_method_that_cannot_be_imported_is_named(tmp_path, monkeypatch, emptied):
    """With the remedy: it is neither left out in silence nor a traceback from somewhere else."""
    catalogue = tmp_path / "catalogue.toml"
    monkeypatch.setattr(registry, "CATALOGUE", catalogue)
    for name in ("dpllm_broken_method", "json"):  # none of this name; one without a METHOD
        catalogue.write_text(f'methods = ["{name}"]', encoding="utf-8")
        with pytest.raises(MethodError, match=f"the method {name} cannot be imported .*take its line out of"):
            registry.methods()


def test_every_method_adds_something_of_its_own(emptied):
    """Each has commands, and no two have the same section, event, noise or words."""
    found = registry.methods()
    assert {one.name for one in found} >= {"count", "federate", "tune", "synthesize", "attacks"}
    assert all(one.commands or one.audit_commands for one in found)
    for kinds in (
        [one.name for one in found],
        [registry.load(event).kind for one in found for event in one.events],
        [registry.load(noise).kind for one in found for noise in one.noises],
        [words.name for one in found for words in one.words],
    ):
        assert len(kinds) == len(set(kinds))
    for place in [place for one in found for place in (*one.commands, *one.audit_commands, one.query, one.show_plan)]:
        assert place is None or registry.load(place) is not None
    assert all(callable(registry.load(one.folder.verify)) for one in found if one.folder)
    with pytest.raises(MethodError, match="method 'none"):
        registry.method("none")
