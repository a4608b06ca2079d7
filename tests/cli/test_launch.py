"""How `dpllm train` starts a run: the choice of engine and processes, and the wait for them."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from dpllm.cli.launch import Machine, attend, choose, is_first
from dpllm.config import ConfigError, load_recipe
from dpllm.config.shipped import shipped_configs

ROOT = Path(__file__).parents[2]
RECIPE = """
model: {config: {model_type: llama, hidden_size: 1024, intermediate_size: 4096, num_hidden_layers: 8,
                 num_attention_heads: 8, num_key_value_heads: 8, vocab_size: 32000}}
data: {path: data.jsonl, max_length: 128}
privacy: {epsilon: 8, delta: 1.0e-5, clip_norm: 1, expected_batch_size: 64, noise: independent}
train: {output_dir: out, max_steps: 10}
"""
GIB = 2**30


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return lambda *overrides: load_recipe(path, overrides)


@pytest.mark.parametrize(
    ("machine", "overrides", "words"),
    [
        (Machine(0), [], "one process on the CPU"),
        (Machine(1, "A"), [], r"one process on the GPU \(A\)"),
        (Machine(4, memory=GIB), ["train.use_cpu=true"], "one process on the CPU"),
    ],
)
def test_one_process_needs_no_launcher(recipe, machine, overrides, words):
    """It runs in the process of the command."""
    launch = choose(recipe(*overrides), None, None, machine)
    assert launch.config is None and launch.words.startswith("engine: ")
    assert re.search(words, launch.words)


@pytest.mark.parametrize(
    ("gib", "overrides", "engine", "reason"),
    [
        (80, [], "ddp", "the model with its states takes .* computed"),
        (2, [], "fsdp2", "without shards, the model with its states would take .* of a GPU's 2.1 GB, computed"),
        (None, [], "ddp", "memory is unknown"),
        (2, ["privacy.gradients=per_unit"], "ddp", "not sharded"),
        (2, ["train.optim=adafactor"], "ddp", "its memory is not computed: train.optim=adafactor"),
    ],
)
def test_several_gpus_get_shards_only_where_a_copy_does_not_fit(recipe, gib, overrides, engine, reason):
    """The choice and its reason are one line."""
    memory = None if gib is None else gib * GIB
    launch = choose(recipe(*overrides), None, None, Machine(4, memory=memory))
    assert launch.config == shipped_configs()[engine] and launch.processes == 4
    assert re.search(rf"^engine: {engine.upper()} on 4 GPUs \(.*{reason}", launch.words), launch.words
    assert "\n" not in launch.words


def test_the_command_is_that_of_accelerate(recipe):
    """With the config, the number of processes, the program of the package, the recipe and the overrides."""
    launch = choose(recipe(), "fsdp2", 2, Machine(4, memory=GIB))
    words = launch.command("mine.yaml", ["a=1"])
    assert words[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    assert words[3:7] == ["--config_file", str(shipped_configs()["fsdp2"]), "--num_processes", "2"]
    assert words[7:] == ["--quiet", "-m", "dpllm.training", "--config", "mine.yaml", "a=1"]


def test_a_config_decides_the_engine_and_the_machine_the_number(recipe, tmp_path, monkeypatch):
    """The number in a shipped config is an example; that in a config of one's own is meant."""
    assert choose(recipe(), "ddp", None, Machine(2, memory=GIB)).processes == 2
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: MULTI_GPU\nnum_processes: 3\nuse_cpu: false\n", encoding="utf-8")
    assert choose(recipe(), str(own), None, Machine(4)).processes == 3
    on_cpu = choose(recipe(), "cpu_ddp", None, Machine(4))
    assert on_cpu.processes == 2
    assert on_cpu.environment == {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    assert choose(recipe(), "cpu_zero2", None, Machine(4)).environment == {"CUDA_VISIBLE_DEVICES": ""}
    assert choose(recipe(), None, 3, Machine(0)).config == shipped_configs()["cpu_ddp"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    for first in (choose(recipe(), "single", None, Machine(2)), choose(recipe(), None, 1, Machine(2))):
        assert first.processes == 1 and first.environment == {"CUDA_VISIBLE_DEVICES": "5"}


@pytest.mark.parametrize(
    ("config", "processes", "machine", "words"),
    [
        (None, 0, Machine(0), "--processes must be at least 1, got 0"),
        (None, 4, Machine(2), "--processes 4: 2 GPUs are visible"),
        ("fsdp", None, Machine(2), "--config fsdp: cannot be read; did you mean 'fsdp2'"),
        ("fsdp2", None, Machine(0), "needs GPUs, and this machine shows none"),
        ("ddp", 3, Machine(1), "1 GPU is visible; give --processes"),
        ("single", 2, Machine(2), "is for one process, not 2"),
        ("cpu_fsdp2", None, Machine(0), "accelerate shards on GPUs only"),
        ("word.yaml", None, Machine(0), "num_processes must be a whole number above 0, got 'auto'"),
        ("nodes.yaml", None, Machine(2), "for several machines: start launch/torchrun.sh"),
        ("list.yaml", None, Machine(2), "is no accelerate config"),
    ],
)
def test_a_start_that_cannot_be_is_refused_before_anything_is_read(
    recipe, tmp_path, monkeypatch, config, processes, machine, words
):
    """The message has the value and the remedy."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes.yaml").write_text("distributed_type: MULTI_GPU\nnum_machines: 2\n", encoding="utf-8")
    (tmp_path / "list.yaml").write_text("- 1\n", encoding="utf-8")
    (tmp_path / "word.yaml").write_text("use_cpu: true\ndistributed_type: MULTI_GPU\nnum_processes: auto\n")
    with pytest.raises(ConfigError, match=words):
        choose(recipe(), config, processes, machine)


def test_below_a_launcher_the_launcher_has_chosen(recipe, monkeypatch):
    """`accelerate launch -m dpllm train` starts no further processes."""
    monkeypatch.setenv("RANK", "1")
    assert choose(recipe(), None, None).config is None
    with pytest.raises(ConfigError, match="was started by a launcher"):
        choose(recipe(), None, 2)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_process_without_a_number_is_refused_with_the_remedy(monkeypatch, name):
    """By the first look at the environment, before anything is printed."""
    monkeypatch.setenv(name, "abc")
    with pytest.raises(ConfigError, match=f"{name} is 'abc', and a launcher sets it to a number: remove it"):
        is_first()
    monkeypatch.setenv(name, "1")
    assert is_first() == (name != "RANK")


# A launcher whose two workers count the interrupts that they get, and end with 0 soon after the first.
LAUNCHER = """
import subprocess, sys
worker = '''
import signal, sys, time
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
open(sys.argv[1] + ".ready", "w").close()
while not got:
    time.sleep(0.01)
time.sleep(0.5)
open(sys.argv[1], "w").write(str(len(got)))
'''
workers = [subprocess.Popen([sys.executable, "-c", worker, f"{sys.argv[1]}/{rank}"]) for rank in (0, 1)]
sys.exit(max(worker.wait() for worker in workers))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_each_worker_once_and_is_the_exit_code(tmp_path, number):
    """The launcher itself gets none, and ends when its workers have."""
    before = [signal.getsignal(one) for one in (signal.SIGINT, number)]

    def send():
        while not all((tmp_path / f"{rank}.ready").exists() for rank in (0, 1)):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    code = attend([sys.executable, "-c", LAUNCHER, str(tmp_path)], {})
    sender.join()
    assert code == 128 + number
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["1", "1"]
    assert [signal.getsignal(one) for one in (signal.SIGINT, number)] == before


def test_the_exit_code_is_the_launchers(tmp_path):
    """Also of one that a signal ended, but that of its workers if they noted it.

    The environment is added to that of this process.
    """
    program = "import os, sys; sys.exit(int(os.environ['CODE']))"
    assert attend([sys.executable, "-c", program], {"CODE": "3"}) == 3
    mistake = "from dpllm.config.launched import note_exit_code as note; import sys; note(2); {} sys.exit(1)"
    for more, code in (("", 2), ("note(1);", 1)):  # a launcher ends with 1 whatever its workers ended with
        assert attend([sys.executable, "-c", mistake.format(more)], {"PYTHONPATH": str(ROOT)}) == code
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert attend([sys.executable, "-c", killed], {}) == 128 + signal.SIGKILL
