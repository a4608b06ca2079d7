"""The core works without methods, and a method that cannot be imported is named."""

from __future__ import annotations

import ast
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpllm import registry
from dpllm.cli import methods
from dpllm.mechanism.query import Query
from dpllm.privacy.query_plan import Charge, QueryPlan
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
assert "unknown key 'federated'" in call("plan", "recipe.yaml", "federated={}", code=2)
assert "installed methods: none" in call("plan", "recipe.yaml", "count={}", code=2)
assert "quickstart" in call("recipes")
assert "no installed method defines the release 'label counts'" in call("verify", "counts", code=2)
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
    votes = Charge(name="votes", event=Query(noise_multiplier=10.0), count=20)
    counts = {"method": "label counts", "unit": "sequence", "adjacency": "zero-out", "num_units": 1000, "delta": 1e-5}
    (tmp_path / "counts").mkdir()
    QueryPlan(**counts, charges=(votes,)).save(tmp_path / "counts" / "privacy_plan.json")
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


def test_a_broken_method_is_left_out_and_named_with_the_remedy(tmp_path, monkeypatch, emptied, capsys):
    """Whatever its import raises, or that of its commands or events; the others and the core go on."""
    (tmp_path / "broken_import.py").write_text("raise RuntimeError('out\\nof order')", encoding="utf-8")
    later = "from dpllm.registry import Method\nMETHOD = Method(name='{0}', {0}=('broken_import:x',))"
    for kind in ("commands", "events"):
        (tmp_path / f"broken_{kind}.py").write_text(later.format(kind), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "CATALOGUE", tmp_path / "catalogue.toml")
    names = ["missing", "json", "broken_import", "broken_commands", "broken_events", "dpllm.methods.count"]
    registry.CATALOGUE.write_text(f"methods = {names}", encoding="utf-8")
    monkeypatch.setattr(methods.app, "registered_commands", [])
    methods._add_all()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all("cannot be imported" in one and "take its line out" in one for one in lines)
    assert "RuntimeError: out of order" in lines[2] and "count" in {one.name for one in methods.app.registered_commands}
    assert [event.kind for event in registry.parts("events")] == []
    assert list(registry.BROKEN) == ["missing", "json", "broken_import", "commands", "events"]
    assert registry.installed().startswith("count; broken: the method missing cannot be imported (ModuleNotFoundError")


@pytest.mark.parametrize(
    ("catalogue", "says"),
    [
        ("methods = [", "cannot be read"),
        ('methods = "dpllm.methods.count"', "no list 'methods'"),
        ("methods = [1]", "no list 'methods'"),
        ("methods = ['no_method']", "METHOD is a int"),
        ("methods = ['leaves']", "SystemExit"),
        ("methods = ['dpllm.methods.count', 'dpllm.methods.count']", ""),
    ],
)
def test_a_catalogue_that_was_edited_stops_no_command(catalogue, says, tmp_path, monkeypatch, emptied, capsys):
    """The remedy for a broken method is to take its line out, so people edit the file."""
    (tmp_path / "no_method.py").write_text("METHOD = 3", encoding="utf-8")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "CATALOGUE", tmp_path / "catalogue.toml")
    registry.CATALOGUE.write_text(catalogue, encoding="utf-8")
    monkeypatch.setattr(methods.app, "registered_commands", [])
    methods._add_all()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(says) and all(says in one and "install dpllm again" in one for one in lines)
    assert [one.name for one in registry.methods()] == ([] if says else ["count"])


def test_every_method_adds_something_of_its_own(emptied):
    """Each has commands, and no two have the same section, event, noise or words."""
    found = registry.methods()
    assert {one.name for one in found} >= {"count", "federated", "tune", "synthesize", "attacks"}
    assert all(one.commands or one.carry_out for one in found)
    for kinds in (
        [one.name for one in found],
        [registry.load(event).kind for one in found for event in one.events],
        [registry.load(noise).kind for one in found for noise in one.noises],
        [words.name for one in found for words in one.words],
    ):
        assert len(kinds) == len(set(kinds))
    places = [(*one.commands, one.query, one.carry_out, one.show_plan) for one in found]
    for place in itertools.chain(*places):
        assert place is None or registry.load(place) is not None
    assert all(callable(registry.load(one.folder.verify)) for one in found if one.folder)
    with pytest.raises(MethodError, match="method 'none"):
        registry.method("none")
