"""A federated run over nodes, from its preparation to the verified report; only Flower itself is left out here."""

from __future__ import annotations

import dataclasses
import json
import os
import ssl
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from dpllm.config import ConfigError, load_recipe
from dpllm.methods.federated.node_program import node_of
from dpllm.methods.federated.preparing import AUTHORITY, CERTIFICATE, SIGNING_KEY, TLS_KEY, prepare
from dpllm.methods.federated.rounds import (
    MORE_LEFT,
    SILENT_NODE,
    TOO_MANY_LEFT,
    against_a_node,
    against_the_server,
    more_left_than_declared,
    words_about_the_server,
)
from dpllm.methods.federated.serving import Options, serve_rounds, share_that_must_be_there, until_the_end, write_end
from dpllm.methods.federated.wire import ALL, unpack
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PrivacyPlan
from dpllm.privacy.rounding import up
from dpllm.report.verify import verify
from tests.methods.federated.deployed import Wire
from tests.methods.federated.small import plan_of
from tests.small_model import WORDS, save_small_model
from tests.tiers import deep_case

pytest.importorskip("cryptography")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
NODES = {"north": 30, "south": 30}
SECURE = ["privacy.randomness=discrete", "privacy.noise={kind: distributed, dropouts: 0.25}"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recipe, a small model, and the records of two nodes of 30 clients."""
    folder = tmp_path_factory.mktemp("deployed")
    for number, name in enumerate(NODES):
        records = [
            {"text": " ".join(WORDS[(client + at) % len(WORDS)] for at in range(6 + row)), "client": f"{name}-{client}"}
            for client in range(30 * number, 30 * number + 30)
            for row in range(3)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    (folder / "held_out.jsonl").write_text(json.dumps({"text": " ".join(WORDS)}), encoding="utf-8")
    values = {
        "model": {
            "name": str(save_small_model(folder / "model", hidden_size=16)),
            "peft": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
        },
        "data": {"path": "none", "eval_path": str(folder / "held_out.jsonl"), "max_length": 16},
        "privacy": {
            "target_epsilon": 8,
            "clip_norm": 0.1,
            "unit": "user",
            "unit_column": "client",
            "max_rows_per_unit": 3,
            "expected_batch_size": 40,
            "dataset": "words",
        },
        "federate": {"local_steps": 1},
        "train": {
            "output_dir": str(folder / "run"),
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "learning_rate": 1.0,
            "disable_tqdm": True,
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder


def prepared(place, tmp_path, *changes, nodes=None):
    recipe = load_recipe(place / "recipe.yaml", list(changes))
    prepare(recipe, tmp_path / "deployment", nodes or NODES, ["localhost", "127.0.0.1"])
    return tmp_path / "deployment"


def test_each_client_of_a_node_is_one_person_where_records_are_split(place, tmp_path, monkeypatch):
    """Each of the 30 clients has rows of one person, and each person is one client."""
    folder, given = prepared(place, tmp_path, "data.long_records=split", "data.max_length=4"), []

    def noted(*arguments):
        given.append(arguments[-1])
        return SimpleNamespace(answer=None)

    monkeypatch.setattr("dpllm.methods.federated.node_program.participant_of", noted)
    node_of(folder / "south", str(place / "south.jsonl"), [], print)
    people = [{row["client"] for row in given[0](client)} for client in range(30, 60)]
    assert people == [{f"south-{client}"} for client in range(30, 60)]


@pytest.mark.parametrize("secure", [False, deep_case(True)], ids=["trusted", "secure"])
def test_a_deployment_reaches_its_report_and_the_server_reads_no_record(place, tmp_path, secure, monkeypatch, capsys):
    """The report has the words of a deployment, and `dpllm verify` finds an edited plan."""
    folder = prepared(place, tmp_path, *(SECURE if secure else []))
    lines = []
    made = {n: node_of(folder / name, str(place / f"{name}.jsonl"), [], lines.append) for n, name in enumerate(NODES)}
    wire, read = Wire(made), []
    monkeypatch.setattr(
        "dpllm.methods.federated.serving.load_records",
        lambda config, load=serve_rounds.__globals__["load_records"]: read.append(config.path) or load(config),
    )
    output = tmp_path / "run"
    assert serve_rounds(folder / "server", wire, Options(overrides=(f"train.output_dir={output}",))) == 0
    assert read == [str(place / "held_out.jsonl")]
    contents = read_ledger(output / LEDGER_FILE)
    assert contents.num_steps == 2
    page = " ".join((output / "privacy_report.md").read_text(encoding="utf-8").split())
    assert "each node reads the records of its own clients, and no process reads those of all" in page
    assert "60 clients, whose records are at 2 nodes" in page
    assert "A person with records at several nodes" in page
    assert "a simulation of" not in page and "in this simulation" not in page
    assert f"federated learning with {'secure aggregation' if secure else 'a trusted server'}: the clients" in page
    assert "perplexity" in capsys.readouterr().out
    tasks = {unpack(body)[ALL]["task"] for _, (body, _), _ in wire.log}
    assert tasks == ({"hello", "keys", "shares", "masked", "unmask"} if secure else {"hello", "update"})
    assert verify(output).ok
    plan = output / "privacy_plan.json"
    plan.write_text(plan.read_text(encoding="utf-8").replace('"clip_norm": 0.1', '"clip_norm": 0.2'), encoding="utf-8")
    assert not verify(output).ok
    with pytest.raises(ValueError, match="a federated run is not resumed"):
        serve_rounds(folder / "server", wire, Options(overrides=(f"train.output_dir={output}",)))


def test_without_enough_clients_nothing_is_charged(place, tmp_path):
    """The server waits before it draws; then it ends by name."""
    folder, output = prepared(place, tmp_path), tmp_path / "run"
    options = Options(wait=0.1, overrides=(f"train.output_dir={output}",))
    with pytest.raises(ConfigError, match=r"of the 60 clients came within 0\.1 s, and nothing was charged"):
        serve_rounds(folder / "server", Wire({}), options)
    assert not (output / LEDGER_FILE).exists()


def test_more_dropouts_than_declared_are_an_open_point(place, tmp_path, monkeypatch):
    """Also when no round had to be given up: δ counts on the declared share. Fewer are none."""
    plan = plan_of(num_clients=100, batch=50, secure=True)
    assert more_left_than_declared(plan, 1000, 700) and not more_left_than_declared(plan, 1000, 800)
    assert not more_left_than_declared(plan_of(), 1000, 0) and not more_left_than_declared(plan, 0, 0)
    # About 40 of 80 leave, by chance 4 more or less; noted when more than 19 do.
    declared = ["privacy.randomness=discrete", "privacy.noise={kind: distributed, dropouts: 0.1}"]
    folder, output = prepared(place, tmp_path, *declared), tmp_path / "run"
    made = {n: node_of(folder / name, str(place / f"{name}.jsonl"), [], print) for n, name in enumerate(NODES)}
    wire = Wire(made)
    wire.deaf = lambda at, body: at == 1 and unpack(body)[ALL]["task"] == "masked"
    assert serve_rounds(folder / "server", wire, Options(overrides=(f"train.output_dir={output}",))) == 0
    page = (output / "privacy_report.md").read_text(encoding="utf-8")
    assert MORE_LEFT in page or TOO_MANY_LEFT in page


def test_a_round_waits_for_the_declared_share_of_the_clients():
    """δ counts on the dropouts; who is connected before the draw does not depend on it."""
    assert share_that_must_be_there(plan_of(num_clients=100, batch=50, secure=True)) == 0.8
    assert share_that_must_be_there(plan_of(num_clients=30)) == 1 / 30


def test_a_run_whose_nodes_leave_ends_with_its_report(place, tmp_path):
    """Rounds that nobody can answer are not drawn, and not charged."""
    folder, output = prepared(place, tmp_path), tmp_path / "run"
    made = {n: node_of(folder / name, str(place / f"{name}.jsonl"), [], print) for n, name in enumerate(NODES)}
    wire = Wire(made)
    wire.deaf = lambda at, body: wire.away.update(wire.nodes) if unpack(body)[ALL]["task"] == "update" else False
    assert serve_rounds(folder / "server", wire, Options(wait=0.1, overrides=(f"train.output_dir={output}",))) == 0
    assert read_ledger(output / LEDGER_FILE).num_steps == 1
    assert verify(output).ok
    assert SILENT_NODE.format(count=1) in (output / "privacy_report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "nodes", "match"),
    [
        (["data.eval_path=null", "data.eval_fraction=0.1"], NODES, "no machine has the records of all clients"),
        (["model.name=null", "model.config={model_type: llama}"], NODES, "begin with the same weights"),
        (["federate.simulated_dropouts=0.1"], NODES, "is for simulations only"),
        (["privacy.unit=sequence", "privacy.unit_column=", "privacy.max_rows_per_unit="], NODES, "privacy.unit=user"),
        ([], {"server": 60}, "other than 'server'"),
        ([], {"../x": 60}, "small letters, digits"),
        ([], {}, "small letters, digits"),
        ([], {"north": 3}, "expected_batch_size"),
    ],
)
def test_a_deployment_without_a_guarantee_is_not_prepared(place, tmp_path, changes, nodes, match):
    recipe = load_recipe(place / "recipe.yaml", changes)
    with pytest.raises(ValueError, match=match):
        prepare(recipe, tmp_path / "deployment", nodes, ["localhost"])
    assert not (tmp_path / "deployment").exists()


@pytest.mark.parametrize("host", ["", "münchen.de", "x" * 65, "fl.example.org:9443", "https://fl.example.org"])
def test_a_certificate_for_no_machine_is_refused_before_a_key_is_written(place, tmp_path, host):
    """No server could show it; and the folder stays empty for the next try."""
    with pytest.raises(ConfigError, match="--host"):
        prepare(load_recipe(place / "recipe.yaml", []), tmp_path / "deployment", NODES, ["localhost", host])
    assert not (tmp_path / "deployment").exists()


def test_what_a_node_gets_has_no_secret_of_another(place, tmp_path):
    """Only the server has the key of its certificate, and each its own signing key, which others cannot read."""
    folder = prepared(place, tmp_path)
    keys = {name: (folder / name / SIGNING_KEY).read_text() for name in ("server", *NODES)}
    assert len(set(keys.values())) == 3
    for name in NODES:
        texts = [path.read_text() for path in (folder / name).iterdir()]
        assert not any(keys[other].strip() in text for other in keys if other != name for text in texts)
        assert not any("PRIVATE KEY" in text or "held_out" in text for text in texts)
        assert not (folder / name / TLS_KEY).exists()
    assert all((folder / name / SIGNING_KEY).stat().st_mode & 0o077 == 0 for name in keys)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server" / CERTIFICATE, folder / "server" / TLS_KEY)
    ssl.create_default_context(cafile=str(folder / "north" / AUTHORITY))
    with pytest.raises(ConfigError, match="is not empty"):
        prepared(place, tmp_path)


def test_a_node_refuses_other_records_settings_and_folders(place, tmp_path):
    """Its number of clients is in the plan's N; its plan is the one that was agreed on."""
    folder, other = prepared(place, tmp_path), tmp_path / "fewer.jsonl"
    other.write_text(json.dumps({"text": "a b", "client": "c"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has the records of 1 clients .* counts 30 at node north"):
        node_of(folder / "north", str(other), [], print)
    records = str(place / "north.jsonl")
    with pytest.raises(ConfigError, match="has another plan than"):
        node_of(folder / "north", records, ["privacy.clip_norm=5"], print)
    with pytest.raises(ConfigError, match="of no node in the roster"):
        node_of(folder / "server", records, [], print)
    (folder / "north" / "starting_weights.txt").write_text("1 file, 3 bytes, SHA-256 0\n")
    with pytest.raises(ConfigError, match="has other weights"):
        node_of(folder / "north", records, [], print)
    if os.name == "posix":
        (folder / "south" / SIGNING_KEY).chmod(0o644)
        with pytest.raises(ConfigError, match="can be read by others: chmod 600"):
            node_of(folder / "south", records, [], print)


def test_the_server_refuses_the_folder_of_a_node_and_answers_without_noise(place, tmp_path):
    folder = prepared(place, tmp_path)
    with pytest.raises(ConfigError, match="is the folder of a node"):
        serve_rounds(folder / "north", Wire({}), Options())
    with pytest.raises(ConfigError, match=r"has no signing\.key"):
        serve_rounds(tmp_path, Wire({}), Options())
    options = Options(keep_answers=str(tmp_path / "kept"), overrides=(f"train.output_dir={tmp_path / 'run'}",))
    with pytest.raises(ConfigError, match="would write the clients' updates"):
        serve_rounds(folder / "server", Wire({}), options)
    with pytest.raises(ConfigError, match="must be above 0"):
        Options(wait=0)


def test_the_end_of_the_rounds_is_noticed_however_they_end(tmp_path, capsys):
    """With their exit code, and where their process was killed and nobody asked for its code."""
    (tmp_path / "rounds.log").write_text("round 1\n")
    write_end(tmp_path, {"pid": os.getpid(), "code": 3})
    assert until_the_end(tmp_path) == 3 and "round 1" in capsys.readouterr().out
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_end(tmp_path, {"pid": killed.pid})
    killed.kill()
    assert until_the_end(tmp_path) == 2 and "ended early" in capsys.readouterr().out
    killed.communicate()


def test_a_node_of_many_clients_knows_much_of_the_noise():
    """Of n survivors' shares those of the others remain; with as many own clients as survivors there is no bound."""
    plan = plan_of(num_clients=100, batch=50, rounds=5, secure=True, target_epsilon=4.0, noise_multiplier=None)
    fewest = plan.event.min_batch_size
    one, half = against_a_node(plan, 1), against_a_node(plan, fewest // 2)
    assert against_the_server(plan) < one < half
    weaker = dataclasses.replace(plan.event, noise_multiplier=plan.noise_multiplier * np.sqrt((fewest - 1) / fewest))
    assert one == epsilon([(dataclasses.replace(weaker.against_the_server), 5)], plan.delta)
    assert against_a_node(plan, fewest) is None
    assert "Against its operator no ε is stated" in words_about_the_server(plan, fewest)
    assert "A node of 1 client knows the noise" in words_about_the_server(plan, 1)


def test_the_traffic_shows_the_cohorts():
    """Who watches the network knows them, so a deployment states ε without sampling too: here that of 5 Gaussians."""
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent, pld

    plan = plan_of(num_clients=100, batch=50, rounds=5, target_epsilon=4.0, noise_multiplier=None)
    accountant = pld.PLDAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(plan.noise_multiplier), 5))
    assert against_the_server(plan) == pytest.approx(accountant.get_epsilon(plan.delta), rel=1e-3)
    assert against_the_server(plan) > 1.3 * 4
    words = words_about_the_server(plan, 1)
    assert (
        f"no sampling hides a client, and for one in all 5 rounds ε is at most {up(against_the_server(plan))}" in words
    )
    assert "traffic" not in words_about_the_server(plan)


def test_a_round_that_is_given_up_is_an_open_point(place, tmp_path, monkeypatch):
    """δ counts on the declared dropouts: rounds with too few survivors show that more clients left."""
    monkeypatch.setattr("dpllm.methods.federated.rounds.Rounds.take", given_up)
    folder, output = prepared(place, tmp_path), tmp_path / "run"
    made = {n: node_of(folder / name, str(place / f"{name}.jsonl"), [], print) for n, name in enumerate(NODES)}
    assert isinstance(PrivacyPlan.load(folder / "server" / "privacy_plan.json"), PrivacyPlan)
    serve_rounds(folder / "server", Wire(made), Options(overrides=(f"train.output_dir={output}",)))
    assert "this ε and δ do not hold" in (output / "privacy_report.md").read_text(encoding="utf-8")


def given_up(self):
    """In place of a round of which too few survive."""
    self._outstanding.take(self._outstanding.made(next(self._draws)))
    return False
