"""Whole runs by `accelerate launch` in two processes: their files, and the files that remain after a crash."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest
from dp_accounting.rdp import RdpAccountant
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from dpllm.config import DataConfig
from dpllm.data.rows import RowCollator, load_train_and_eval, tokenize_records
from dpllm.mechanism.discrete import ORDERS
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.checkpoints import latest_whole, verify
from dpllm.privacy.ledger import read_ledger
from dpllm.privacy.run_folder import adopt
from dpllm.report.verify import verify as verify_report
from dpllm.training.evaluation import HeldOut, HeldOutRows, measure
from dpllm.training.training_log import TrainingLog
from tests import children
from tests.distributed.launching import environment, launch, start, write_data
from tests.distributed.world import ROOT, free_port
from tests.tiers import deep_case

CONFIGS = ("cpu_fsdp2", *map(deep_case, ("cpu_ddp", "cpu_zero1", "cpu_zero2", "cpu_zero3")))
LORA = "model.adapter={r: 4, lora_alpha: 8, target_modules: all-linear}"
MIXTURE = (
    "model.config={model_type: mixtral, hidden_size: 32, intermediate_size: 24, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 2, num_local_experts: 4, max_position_embeddings: 32}"
)
LORA_ON_EXPERTS = (
    "model.adapter={r: 4, lora_alpha: 8, target_modules: [q_proj], "
    "target_parameters: [experts.gate_up_proj, experts.down_proj]}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_data(tmp_path)
    return tmp_path


def losses(folder: Path) -> list[float]:
    """The Trainer's log, step by step, without the steps lost in a crash."""
    return [entry["loss"] for entry in TrainingLog(folder / "out").read() if "loss" in entry]


def perplexity(folder: Path, model) -> float:
    """Of the held-out records, in this process, by plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    data = DataConfig(path=str(folder / "private.jsonl"), max_length=16, eval=0.05)
    _, records = load_train_and_eval(data)
    rows = tokenize_records(records, tokenizer, data, (), "causal_lm", None)
    return measure(model, rows, RowCollator(pad_token_id=tokenizer.pad_token_id)).value


def printed_perplexity(printed: str) -> float:
    return float(re.search(r"held-out perplexity\s+(?:[0-9.]+ → )?([0-9.]+)", printed)[1])


@pytest.mark.parametrize("config", CONFIGS)
def test_a_recipe_runs_on_every_engine_and_leaves_a_plain_model(config, folder):
    """ε is the ledger's, the consolidated model is the trained one, and every checkpoint is whole."""
    printed = launch(config, folder)
    out = folder / "out"
    ledger, report = read_ledger(out / "privacy_ledger.jsonl"), json.loads((out / "privacy_report.json").read_text())
    assert ledger.num_steps == 6 and len(ledger.runs) == 1 and ledger.end == "completed"
    assert not any("changed after the end" in point for point in report["open_points"])
    epsilon = re.search(r"guarantee\s+ε = ([0-9.]+)", printed)[1]
    assert report["statement"]["epsilon"] == pytest.approx(float(epsilon), abs=1e-4) and float(epsilon) <= 8
    model = AutoModelForCausalLM.from_pretrained(out)
    assert perplexity(folder, model) == pytest.approx(printed_perplexity(printed), rel=1e-3)
    start = AutoModelForCausalLM.from_pretrained(out / "public_pretrain")
    assert perplexity(folder, start) > printed_perplexity(printed)
    for step in (2, 4, 6):
        verify(out / f"checkpoint-{step}")
    assert "differential_privacy" in (out / "README.md").read_text()


@pytest.mark.deep
@pytest.mark.parametrize("config", ["cpu_ddp", "cpu_fsdp2"])
def test_a_run_with_discrete_noise_states_the_epsilon_of_its_event(config, folder):
    """In two processes: ledger, report and printed line agree, `verify` passes, and rounded noise is no open matter."""
    printed = launch(config, folder, "privacy.randomness=discrete")
    out = folder / "out"
    ledger, report = read_ledger(out / "privacy_ledger.jsonl"), json.loads((out / "privacy_report.json").read_text())
    ((event, count),) = [(event, ledger.num_steps) for event in {event for event, _ in ledger.history}]
    accountant = RdpAccountant(ORDERS)
    accountant.compose(event.dp_event(), count)
    assert event.kind == "discrete poisson" and event.sensitivity > 1 and count == 6
    stated = report["statement"]["epsilon"]
    assert stated == epsilon([(event, count)], 1e-4) == pytest.approx(accountant.get_epsilon(1e-4), rel=0.01)
    shown = re.search(r"guarantee\s+ε = ([0-9.]+)", printed)[1]
    assert float(shown) == pytest.approx(stated, abs=1e-4) and stated <= 8
    assert verify_report(out).ok and "discrete Gaussian noise" in (out / "privacy_report.md").read_text()
    assert "floating-point noise" not in (out / "privacy_report.md").read_text()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("config", "model"),
    [("cpu_fsdp2", (LORA,)), ("cpu_zero3", (LORA,)), ("cpu_zero3", (MIXTURE, LORA_ON_EXPERTS))],
    ids=["cpu_fsdp2", "cpu_zero3", "cpu_zero3, experts"],
)
def test_an_adapter_of_a_sharded_model_loads_in_plain_peft(config, model, folder):
    """Only the adapter is consolidated, and it is the trained one."""
    printed = launch(config, folder, *model, "train.learning_rate=0.05")
    start = AutoModelForCausalLM.from_pretrained(folder / "out" / "public_pretrain")
    before = perplexity(folder, start)
    adapted = PeftModel.from_pretrained(start, folder / "out")
    assert perplexity(folder, adapted) == pytest.approx(printed_perplexity(printed), rel=1e-3)
    assert abs(before - printed_perplexity(printed)) > 1e-3 * before
    assert not (folder / "out" / "model.safetensors").exists()


@pytest.mark.deep
@pytest.mark.parametrize("model", [(), (LORA,)], ids=["whole", "adapter"])
@pytest.mark.parametrize("config", ["cpu_ddp", "cpu_fsdp2", "cpu_zero3"])
def test_the_text_of_a_sharded_model_is_measured_as_that_of_one_process(config, model, folder):
    """All processes write together, and the figures are those of the released model in one process."""
    pytest.importorskip("rouge_score")
    ending = "we serve the people"  # of the public texts too, so that the model learns to write it
    heads = [" ".join(line.split()[:2])[:16] for line in (folder / "public.txt").read_text().splitlines()]
    (folder / "public.txt").write_text("\n".join(f"{head} {ending}" for head in heads), encoding="utf-8")
    texts = [json.loads(line)["text"] for line in (folder / "private.jsonl").read_text().splitlines()]
    pairs = [{"prompt": " ".join(text.split()[:2])[:16] + " ", "completion": ending} for text in texts]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    values = {
        "path": "pairs.jsonl",
        "format": "prompt_completion",
        "eval": 0.3,
        "metrics": ["rouge1", "rougeL"],
    }
    longer = ("public_pretrain.train.max_steps=80", "public_pretrain.train.learning_rate=0.01")
    longer += (f"public_pretrain.max_shared_records={len(pairs)}",)  # two words and the same ending make a record
    given = (*longer, *(f"data.{name}={json.dumps(value)}" for name, value in values.items()))
    printed = launch(config, folder, *model, *given)
    released = AutoModelForCausalLM.from_pretrained(folder / "out" / "public_pretrain" if model else folder / "out")
    released = PeftModel.from_pretrained(released, folder / "out") if model else released
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    data = DataConfig(**{**values, "path": str(folder / "pairs.jsonl")}, max_length=16)
    _, records = load_train_and_eval(data)
    rows = tokenize_records(records, tokenizer, data, (), "causal_lm", None)
    held_out = HeldOut(HeldOutRows(records, rows, RowCollator(pad_token_id=tokenizer.pad_token_id), data, tokenizer))
    figures = held_out.measure(released).figures
    assert min(figures.values()) > 0  # otherwise any text would pass
    for name, value in figures.items():
        shown = re.search(rf"held-out {name} after\s+([0-9.]+)", printed)
        assert shown and float(shown[1]) == pytest.approx(value, rel=1e-3)


@pytest.mark.deep
def test_a_state_space_model_under_zero3_trains_adapters_and_refuses_modules_that_run_row_by_row(folder):
    """Trained mixers run row by row, which processes with other numbers of rows cannot do together."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    mixers = {"d_ssm": 64, "n_heads": 8, "d_head": 8, "d_state": 8, "n_groups": 1, "chunk_size": 8}
    config = {"model_type": "falcon_h1", "max_position_embeddings": 32, "num_key_value_heads": 2, **sizes}
    model = f"model.config={json.dumps({**config, **{f'mamba_{name}': size for name, size in mixers.items()}})}"
    with pytest.raises(AssertionError):
        launch("cpu_zero3", folder, model)
    assert re.search(r"error: model\.layers\.0\.mamba has to run row by row.*Use FSDP2", (folder / "log").read_text())
    shutil.rmtree(folder / "out")
    launch("cpu_zero3", folder, model, LORA.replace("all-linear", "[q_proj, in_proj]"))
    assert charged(folder) == 6


def charged(folder: Path) -> int:
    path = folder / "out" / "privacy_ledger.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def process_of_rank(launcher: children.Child, rank: int) -> psutil.Process:
    """The process of a run that has this rank."""
    for child in psutil.Process(launcher.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"no process of rank {rank}")


def kill_in_mid_run(config: str, folder: Path, after: int, *overrides: str) -> int:
    """Kill rank 1 when some steps are charged; returns how many are in the end."""
    launcher = start(config, folder, *overrides)
    try:
        children.wait_for(lambda: charged(folder) >= after or launcher.poll() is not None)
        process_of_rank(launcher, 1).send_signal(signal.SIGKILL)
        assert launcher.wait(children.LIMIT) != 0  # the other rank ends as well
    finally:
        launcher.kill()
    return charged(folder)


@pytest.mark.deep
@pytest.mark.parametrize("config", ["cpu_ddp", "cpu_fsdp2"])
def test_after_a_kill_a_run_resumes_on_one_and_on_two_processes(config, folder, tmp_path_factory):
    """Steps that were lost stay charged, ε keeps its target, and the loss goes on where the checkpoint was."""
    steps = ("train.max_steps=14", "train.save_steps=4")
    lost = kill_in_mid_run(config, folder, 6, *steps)
    checkpoint, _ = latest_whole(folder / "out")
    saved = int(checkpoint.name.rpartition("-")[2])
    assert 6 <= lost < 14 and saved <= lost and saved in (4, 8)
    before = losses(folder)
    for num_processes in (1, 2):
        again = tmp_path_factory.mktemp("resumed")
        shutil.copytree(folder, again, dirs_exist_ok=True, symlinks=True)
        adopt(again / "out")  # each copy goes on by itself
        printed = launch(config, again, *steps, "train.resume_from_checkpoint=true", num_processes=num_processes)
        ledger = read_ledger(again / "out" / "privacy_ledger.jsonl")
        assert ledger.num_steps == 14 and len(ledger.runs) == 2 and ledger.end == "completed"
        assert len({run["run"] for run in ledger.runs}) == 2
        told = re.search(r"private steps\s+14 of 14(?: charged, (\d+) in the released weights)?", printed)
        assert int(told[1] or 14) == saved + 14 - lost  # the cost of the lost steps is not spent again
        epsilon = float(re.search(r"guarantee\s+ε = ([0-9.]+)", printed)[1])
        assert epsilon <= 8
        report = json.loads((again / "out" / "privacy_report.json").read_text())
        assert report["statement"]["epsilon"] == pytest.approx(epsilon, abs=1e-4)
        after = losses(again)
        assert after[:saved] == before[:saved]
        assert abs(after[saved] - before[saved - 1]) < 1.0  # not as at the start, and not from nothing


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.deep
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_nodes_find_each_other(rendezvous, folder):
    """Two agents of one process each make one run; they meet at an endpoint, or know their numbers."""
    port = free_port()
    (folder / "accelerate_configs").symlink_to(ROOT / "accelerate_configs")
    agents = []
    for node in range(2):
        with open(folder / f"log.{node}", "wb") as log:
            variables = {
                "NNODES": "2",
                "NODE_RANK": str(node),
                "NPROC_PER_NODE": "1",
                "RDZV_ENDPOINT": f"127.0.0.1:{port}",
                "ACCELERATE": str(Path(sys.executable).with_name("accelerate")),
            }
            recipe = Path(__file__).with_name("tiny.yaml")
            config = str(ROOT / "accelerate_configs" / "cpu_ddp.yaml")
            known = f"--config_file {config} --num_machines 2 --num_processes 2 --machine_rank {node}"
            address = f"--main_process_ip 127.0.0.1 --main_process_port {port} {ROOT / 'recipes' / 'finetune.py'}"
            static = [variables["ACCELERATE"], "launch", *known.split(), *address.split(), "--config", str(recipe)]
            command = [
                *([str(ROOT / "launch" / "torchrun.sh"), str(recipe), config] if rendezvous == "c10d" else static),
                f"train.output_dir={folder / 'out'}",
                f"data.path={folder / 'private.jsonl'}",
                f"public_pretrain.data.path={folder / 'public.txt'}",
            ]
            agents.append(
                children.Child(command, stdout=log, stderr=log, cwd=folder, env={**environment(), **variables})
            )
        if node == 0 and rendezvous == "c10d":
            children.wait_for(lambda: is_open(port))  # on one machine either agent could open the rendezvous
    codes = children.wait_all(agents)
    printed = [(folder / f"log.{node}").read_text(errors="replace") for node in range(2)]
    assert codes == [0, 0], "\n".join(text[-3000:] for text in printed)
    assert len(re.findall(r"guarantee\s+ε = ([0-9.]+)", "".join(printed))) == 1  # one run, told once
    assert re.search(r"processes\s+2", "".join(printed))
    ledger = read_ledger(folder / "out" / "privacy_ledger.jsonl")
    assert ledger.num_steps == 6 and len(ledger.runs) == 1
