"""`dpllm methods federated` from a recipe to the report, with a trusted server and secure aggregation."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config import ConfigError, load_recipe
from dpllm.methods.federated.client import LocalTraining
from dpllm.methods.federated.run import run
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.report.verify import verify
from dpllm.training import finetune
from tests.mutations import kills
from tests.small_model import WORDS, save_small_model
from tests.tiers import deep_case

NUM_CLIENTS = 60
SECURE = ["privacy.randomness=discrete", "privacy.noise={kind: distributed, dropouts: 0.25}"]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    """A recipe over 60 clients with three texts each, and a small model in a folder."""
    folder = tmp_path_factory.mktemp("federated")
    records = [
        {"text": " ".join(WORDS[(client + place) % len(WORDS)] for place in range(6 + number)), "client": f"c{client}"}
        for client in range(NUM_CLIENTS)
        for number in range(3)
    ]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    (folder / "held_out.jsonl").write_text(json.dumps({"text": " ".join(WORDS)}), encoding="utf-8")
    values = {
        "model": {
            "name": str(save_small_model(folder / "model", hidden_size=16)),
            "adapter": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
        },
        "data": {
            "path": str(folder / "records.jsonl"),
            "eval": str(folder / "held_out.jsonl"),
            "format": "text",
            "columns": {"text": "text", "unit": "client"},
            "max_length": 16,
        },
        "privacy": {
            "epsilon": 8,
            "clip_norm": 0.1,
            "max_rows_per_unit": 3,
            "expected_batch_size": 40,
            "dataset": "words",
        },
        "federated": {"local_steps": 1, "simulated_dropouts": 0.2},
        "train": {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1.0, "disable_tqdm": True},
    }
    path = folder / "federated.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.mark.parametrize("secure", [False, deep_case(True)], ids=["trusted", "secure"])
def test_a_run_says_what_it_was_and_verifies(recipe_file, secure, tmp_path, capsys):
    """Its units are clients, the report says who sees what, and an edited file is found."""
    output = tmp_path / "run"
    recipe = load_recipe(recipe_file, [f"train.output_dir={output}", *(SECURE if secure else [])])
    assert run(recipe) == 0
    contents = read_ledger(output / LEDGER_FILE)
    report = json.loads((output / "privacy_report.json").read_text(encoding="utf-8"))
    ((event, count),) = contents.history
    assert count == 2 and report["statement"]["epsilon"] == epsilon([(event, 2)], report["statement"]["delta"]) <= 8
    assert event.kind == ("distributed poisson" if secure else "poisson") and event.num_units == NUM_CLIENTS
    page = (output / "privacy_report.md").read_text(encoding="utf-8")
    assert "a client, which has the records of one user" in page
    sees = "the server sees the sum of a round" if secure else "a trusted server sees the bounded update"
    assert sees in page and sees in " ".join(capsys.readouterr().out.split())
    kind = "secure aggregation" if secure else "a trusted server"
    assert f"a simulation of federated learning with {kind}. One trusted process" in page
    assert load_recipe(output / "recipe.yaml") == recipe
    checked = verify(output)
    assert checked.ok, [check for check in checked.checks if not check.ok]
    command = report["checkable"]["recompute_from_the_numbers"]
    assert (command is None) == secure  # `dpllm epsilon` has no options for noise of each client
    if command is not None:
        again = CliRunner().invoke(app, [*command.split()[1:], "--json"])
        assert again.exit_code == 0, again.output
        assert json.loads(again.output)["epsilon"] == pytest.approx(report["statement"]["epsilon"], rel=1e-6)

    with pytest.raises(ValueError, match="a federated run is not resumed"):
        run(recipe)
    plan = output / "privacy_plan.json"
    plan.write_text(plan.read_text(encoding="utf-8").replace('"clip_norm": 0.1', '"clip_norm": 0.2'), encoding="utf-8")
    assert not verify(output).ok


@kills(
    "a client gets the rows that have the numbers of its records",
    "dpllm/methods/federated/run.py",
    "return rows, unit_index_of(rows, ",
    "return rows, unit_index_of(records, ",
)
def test_a_client_has_rows_of_its_own_split_records_only(recipe_file, tmp_path, monkeypatch):
    """The numbers of records were taken for those of rows: pieces of one person's texts trained several clients."""
    seen = []

    def update(self, rows, start, number):
        seen.append({row["client"] for row in rows})
        return np.zeros(self._weights.size(self._weights.of_round(number)))

    monkeypatch.setattr(LocalTraining, "update", update)
    changes = ["data.long_records=split", "data.max_length=4", "federated.simulated_dropouts=0"]
    assert run(load_recipe(recipe_file, [f"train.output_dir={tmp_path / 'run'}", *changes])) == 0
    assert len(seen) > NUM_CLIENTS // 2 and {len(clients) for clients in seen} == {1}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["federated=null"], "has no section federated"),
        (["train.weight_decay=0.1"], "train.weight_decay is not used by a federated run"),
        (["train.max_steps=null"], "needs train.max_steps, the number of rounds"),
        (["microbatch.pack=true"], r"does not support microbatch\.pack"),
        (["data.columns.unit=", "privacy.max_rows_per_unit="], "set data.columns.unit"),
        (["privacy.seed=1"], "leave privacy.seed"),
        (["privacy.noise={kind: banded, bands: 2}"], "has no 'flat' clipping with 'banded' noise"),
        (["privacy.noise=distributed"], r"set privacy\.randomness=discrete"),
        (["federated.local_steps=0"], "local_steps"),
        (["federated.server_optimizer=adam", "federated.server_momentum=0.9"], "belongs to server_optimizer=sgd"),
        (["federated.lora=both"], "lora must be one of"),
        (
            ["privacy.randomness=discrete", "privacy.noise={kind: distributed, dropouts: 0.1}"],
            r"simulated_dropouts=0\.2, and privacy\.noise declares dropouts=0\.1",
        ),
    ],
)
def test_a_recipe_without_the_guarantee_or_with_unused_options_is_refused(recipe_file, changes, match, tmp_path):
    """Before a record is read, and nothing is written."""
    with pytest.raises(ValueError, match=match):
        run(load_recipe(recipe_file, [f"train.output_dir={tmp_path / 'run'}", *changes]))
    assert not (tmp_path / "run" / LEDGER_FILE).exists()


def test_one_trainer_does_not_run_a_federated_recipe(recipe_file, tmp_path):
    """It would read the records of all clients; nor does it take the noise of clients."""
    with pytest.raises(ConfigError, match="dpllm methods federated"):
        finetune.run(load_recipe(recipe_file, [f"train.output_dir={tmp_path / 'run'}"]))


def test_a_run_that_fails_stays_charged_for_its_rounds(recipe_file, tmp_path, monkeypatch):
    """The ledger has ended, with the rounds that were drawn."""
    from dpllm.methods.federated.client import LocalTraining

    def fail(self, *args):
        raise OSError("a client's disk is full")

    monkeypatch.setattr(LocalTraining, "update", fail)
    output = tmp_path / "run"
    with pytest.raises(OSError, match="client's disk"):
        run(load_recipe(recipe_file, [f"train.output_dir={output}"]))
    contents = read_ledger(output / LEDGER_FILE)
    assert contents.num_steps == 1 and contents.end == "failed"


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # no round moved the weights
def test_a_round_that_is_given_up_is_an_open_point(recipe_file, tmp_path, monkeypatch):
    """δ counts on the declared dropouts: rounds with too few survivors show that more clients left."""
    monkeypatch.setattr("dpllm.methods.federated.client.Clients.answers", lambda *_: {})  # too few survive
    output = tmp_path / "run"
    assert run(load_recipe(recipe_file, [f"train.output_dir={output}", *SECURE])) == 0
    assert read_ledger(output / LEDGER_FILE).num_steps == 2
    assert "this ε and δ do not hold" in (output / "privacy_report.md").read_text(encoding="utf-8")
