"""Flower as the way of messages: what it hands over counts once and from its node; and real processes with TLS.

Flower pins packages that others need newer, so these tests run in an environment of their own: `make test-flower`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("flwr", reason="the extra 'flower' is not installed: make test-flower")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

from flwr.app import ConfigRecord, Error, Message, RecordDict  # noqa: E402

from dpllm.methods.federated.flower import QUIET, FlowerLine, envelope_of, record_of  # noqa: E402
from dpllm.methods.federated.wire import unpack  # noqa: E402
from dpllm.privacy.budget import create_budget, read_budget  # noqa: E402
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger  # noqa: E402
from dpllm.report.verify import verify  # noqa: E402
from tests.small_model import WORDS, save_small_model  # noqa: E402
from tests.tiers import deep, deep_case  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NODES = ("north", "south")
SECURE = ["privacy.randomness=discrete", "privacy.noise={kind: distributed, dropouts: 0.25}"]


class Grid:
    """In place of Flower's grid: node to the replies that it gives to a message."""

    def __init__(self, replies):
        self.replies, self.sent = replies, {}

    def get_node_ids(self):
        return list(self.replies)

    def push_messages(self, messages):
        numbers = []
        for place, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"m{place}"
            self.sent[f"m{place}"] = message
            numbers.append(f"m{place}" if message.metadata.dst_node_id in self.replies else None)
        return numbers

    def pull_messages(self, numbers):
        found = []
        for number in numbers:
            found += self.replies[self.sent[number].metadata.dst_node_id](self.sent[number])
        return found


@pytest.fixture
def in_a_task(monkeypatch):
    """Flower's messages take their run from the process that Flower started."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def reply(message, envelope, node=None):
    answer = Message(record_of(envelope), reply_to=message)
    if node is not None:
        answer.metadata.__dict__["_src_node_id"] = node
    return answer


def test_an_envelope_comes_back_and_nothing_else_is_one(in_a_task):
    message = Message(record_of((b"body", b"signature")), 5, "query")
    assert envelope_of(message) == (b"body", b"signature")
    for content in (
        RecordDict(),
        RecordDict({"dpllm": ConfigRecord({"body": b"b"})}),
        RecordDict({"dpllm": ConfigRecord({"body": "text", "signature": b"s"})}),
    ):
        assert envelope_of(Message(content, 5, "query")) is None
    message.metadata.__dict__["_message_id"] = "m"
    assert envelope_of(Message(Error(code=1, reason="a text"), reply_to=message)) is None


def test_the_first_answer_of_each_node_counts_and_only_its_own(in_a_task):
    """A second reply, a reply in another node's name, an error and a node that is gone add nothing."""
    grid = Grid(
        {
            1: lambda message: [reply(message, (b"first", b"s")), reply(message, (b"second", b"s"))],
            2: lambda message: [reply(message, (b"forged", b"s"), node=3)],
            4: lambda message: [Message(Error(code=1, reason="secret"), reply_to=message)],
            5: lambda message: [],
        }
    )
    line = FlowerLine(grid)
    assert set(line.connected()) == {1, 2, 4, 5}
    assert line.exchange(dict.fromkeys((1, 2, 4, 5, 9), (b"b", b"s")), 0.2) == {1: (b"first", b"s")}


def test_flower_reports_nothing_to_its_makers():
    """Its telemetry and its question for updates are off in every process that dpllm starts."""
    from flwr.supercore.constant import FLWR_DISABLE_UPDATE_CHECK

    assert QUIET == {"FLWR_TELEMETRY_ENABLED": "0", FLWR_DISABLE_UPDATE_CHECK: "1"}


# ------------------------------------------------------------------------------------------------------ real processes


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recipe, a model and the files of two nodes with 30 clients each."""
    folder = tmp_path_factory.mktemp("flower")
    for number, name in enumerate(NODES):
        rows = [
            {"text": " ".join(WORDS[(client + at) % len(WORDS)] for at in range(6 + row)), "client": f"c{client}"}
            for client in range(30 * number, 30 * number + 30)
            for row in range(3)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    model = {"name": str(save_small_model(folder / "model", hidden_size=16)), "peft": {"r": 2}}
    model["peft"]["target_modules"] = ["q_proj"]
    privacy = {"target_epsilon": 8, "clip_norm": 0.1, "unit": "user", "unit_column": "client", "max_rows_per_unit": 3}
    train = {"output_dir": "run", "max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1.0}
    recipe = {
        "model": model,
        "data": {"path": "none", "max_length": 16},
        "privacy": {**privacy, "expected_batch_size": 40, "dataset": "words"},
        "federate": {"local_steps": 1},
        "train": {**train, "disable_tqdm": True},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "dpllm").write_text(f'#!/bin/sh\nexec {sys.executable} -m dpllm "$@"\n', encoding="utf-8")
    (programs / "dpllm").chmod(0o755)
    return folder


def environment(place, **more):
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def listens(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def attack_tls(place, port, found):
    """While the server runs: a client that trusts its authority, one that does not, another name, and none with TLS."""
    while not listens(port):
        time.sleep(0.5)
    authority = place / "deployment" / "north" / "authority.pem"
    trusted = ssl.create_default_context(cafile=str(authority))
    with (
        socket.create_connection(("127.0.0.1", port)) as raw,
        trusted.wrap_socket(raw, server_hostname="localhost") as tls,
    ):
        found["version"] = tls.version()
    for name, context in (("unknown", ssl.create_default_context()), ("host", trusted)):
        try:
            with socket.create_connection(("127.0.0.1", port)) as raw:
                context.wrap_socket(raw, server_hostname="localhost" if name == "unknown" else "example.org").close()
        except ssl.SSLCertVerificationError as error:
            found[name] = error.verify_message
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10)
    except OSError as error:
        found["plain"] = type(error).__name__


@pytest.mark.parametrize("secure", [deep_case(False), True], ids=["trusted", "secure"])
def test_server_and_nodes_are_processes_with_tls(place, tmp_path, secure):
    """By the shipped script, to the verified report; the server's folder and process get no record.

    Relative paths are those of the place where the server was started, not of the process that Flower starts.
    """
    port, found = free_port(), {}
    folder, seen = tmp_path / "deployment", tmp_path / "seen"
    nodes = [f"{name}=30={place / name}.jsonl" for name in NODES]
    command = ["bash", str(ROOT / "launch/federation.sh"), str(place / "recipe.yaml"), str(folder), *nodes]
    more = {"SERVE": f"--keep-answers {seen}"} if secure else {}
    env = environment(place, PORT=str(port), **more)
    (place / "deployment").unlink(missing_ok=True)
    (place / "deployment").symlink_to(folder)
    (tmp_path / "model").symlink_to(place / "model")
    budget = tmp_path / "words.budget.json"
    create_budget(budget, dataset="words", epsilon=10, delta=1e-2, unit="user", num_units=60, unit_column="client")
    changes = ["model.name=model", f"privacy.budget_file={budget.name}", *(SECURE if secure else [])]
    watcher = threading.Thread(target=attack_tls, args=(place, port, found), daemon=True)
    watcher.start()
    done = subprocess.run([*command, *changes], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + logs[-3000:]
    watcher.join(30)
    assert found.pop("version") == "TLSv1.3"
    assert set(found) == {"unknown", "host", "plain"}, found
    assert read_ledger(folder / "run" / LEDGER_FILE).num_steps == 2
    assert verify(folder / "run").ok
    assert [entry.steps_charged for entry in read_budget(budget).entries] == [2]
    assert "connected to 127.0.0.1" in logs and "Traceback" not in logs + done.stdout + done.stderr
    texts = "".join(path.read_text(errors="replace") for path in (folder / "server").rglob("*") if path.is_file())
    assert not re.search(" ".join(WORDS[3:7]), texts)
    if secure:
        masked = [unpack(path.read_bytes()) for path in seen.glob("*-masked-*")]
        data = np.frombuffer(b"".join(next(iter(parts.values()))["masked"] for parts in masked), np.uint8)
        expected = data.size / 256
        assert float(((np.bincount(data, minlength=256) - expected) ** 2 / expected).sum()) < 255 + 6 * np.sqrt(510)


@deep
def test_a_node_with_another_authority_does_not_connect(place, tmp_path):
    """One line, exit code 2, and nothing was sent: the certificate is checked before any message."""
    port, env = free_port(), environment(place)
    run = [sys.executable, "-m", "dpllm", "federation"]
    nodes = ["--node", "north=30", "--node", "south=30"]
    for name in ("one", "two"):
        subprocess.run([*run, "prepare", str(place / "recipe.yaml"), name, *nodes], cwd=tmp_path, env=env, check=True)
    serve = subprocess.Popen(
        [*run, "serve", "one/server", "--port", str(port), "--wait", "240", f"train.output_dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        env=env,
    )
    try:
        (tmp_path / "one/north/authority.pem").write_bytes((tmp_path / "two/north/authority.pem").read_bytes())
        while not listens(port):
            assert serve.poll() is None
            time.sleep(1)
        node = [*run, "node", "one/north", "--records", f"{place}/north.jsonl", "--server", f"127.0.0.1:{port}"]
        done = subprocess.run(node, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and "error: no connection to 127.0.0.1" in done.stderr, done.stderr[-2000:]
        assert "Traceback" not in done.stderr
    finally:
        serve.terminate()
        serve.wait(120)
    assert not (tmp_path / "run" / LEDGER_FILE).exists()
