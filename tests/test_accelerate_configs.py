"""Accelerate configs: accelerate reads each, and none holds a setting that would change the private sum."""

import copy
import json
import math
import os
import sys
import warnings
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from dpllm.engines import private_config
from tests import children

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "accelerate_configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
DEEPSPEED = sorted((FOLDER / "deepspeed").glob("*.json"))
GPU = {"ddp", "fsdp2", "fsdp2_hybrid", "zero1", "zero2", "zero3", "zero3_offload"}
CPU = {"cpu_ddp", "cpu_fsdp2", "cpu_zero1", "cpu_zero2", "cpu_zero3"}


def read(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def deepspeed_of(name):
    return json.loads((ROOT / read(name)["deepspeed_config"]["deepspeed_config_file"]).read_text())


def test_every_engine_has_one():
    """The files are those that the README names."""
    assert {path.stem for path in CONFIGS} == {"single"} | GPU | CPU
    assert {path.stem for path in DEEPSPEED} == {name for name in GPU if name.startswith("zero")}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_it(path):
    """Accelerate knows every key; processes, use of the CPU and machines are as the name says."""
    config = ClusterConfig.from_yaml_file(str(path))
    assert config.num_machines == 1
    assert config.num_processes == (1 if path.stem == "single" else 2 if path.stem in CPU else 8)
    assert config.use_cpu == (path.stem in CPU)
    # Precision is the recipe's; beside a DeepSpeed file accelerate refuses the key, even when it says "no".
    raw = read(path.stem)
    assert raw.get("mixed_precision") == (None if raw["distributed_type"] == "DEEPSPEED" else "no")


@pytest.mark.parametrize("name", sorted(n for n in GPU | CPU if "zero" in n))
def test_deepspeed(name):
    """ZeRO: the stage of the name, no clipping of its own, no loss scaler, one update per step, sums in float32."""
    config, settings = read(name), deepspeed_of(name)
    zero = settings["zero_optimization"]
    assert zero["stage"] == int(name.removeprefix("cpu_")[4])
    # Private training makes it 0; the public pretraining, by the same file, takes its own train.max_grad_norm.
    assert settings["gradient_clipping"] == "auto"
    assert "fp16" not in settings and "amp" not in settings
    assert settings["gradient_accumulation_steps"] == 1
    assert settings["communication_data_type"] == settings["data_types"]["grad_accum_dtype"] == "fp32"
    assert zero["contiguous_gradients"] is False  # its buffers would round sums to the parameters' dtype
    assert settings["train_batch_size"] == settings["train_micro_batch_size_per_gpu"] == "auto"
    assert settings["bf16"] == {"enabled": "auto"}
    assert "optimizer" not in settings and "scheduler" not in settings  # the recipe's
    assert config["deepspeed_config"]["zero3_init_flag"] == (zero["stage"] == 3)
    assert zero.get("stage3_gather_16bit_weights_on_model_save", False) == (zero["stage"] == 3)
    assert ("offload_optimizer" in zero) == name.endswith("offload")
    # Any other launcher of DeepSpeed would go around accelerate on several nodes (pdsh over ssh).
    assert config["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.stem)
def test_engine_accepts_it(path):
    """The engine's own check of a DeepSpeed configuration has nothing to refuse; it sets clipping and leaf modules."""
    settings = json.loads(path.read_text())
    checked = copy.deepcopy(settings)
    private_config(checked)
    zero = {**settings["zero_optimization"], "leaf_module": {"classes": []}}
    assert {key: checked[key] for key in settings} == {**settings, "gradient_clipping": 0.0, "zero_optimization": zero}
    neutral = {"gradient_predivide_factor": 1.0}
    added = {key: value for key, value in checked.items() if key not in settings}
    assert added == {key: value for key, value in neutral.items() if key in added}


@pytest.mark.parametrize("name", sorted(n for n in GPU | CPU if "fsdp2" in n))
def test_fsdp2(name):
    """FSDP2: blocks wrapped one by one and freed after the forward pass; checkpoints sharded."""
    config = read(name)
    assert config["distributed_type"] == "FSDP"
    sizes = config.get("parallelism_config", {})
    assert math.prod(sizes.values()) == (8 if name == "fsdp2_hybrid" else 1)
    assert config["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": name in GPU,
        "fsdp_offload_params": False,
        "fsdp_activation_checkpointing": False,
    }


def launched(monkeypatch, name, num_processes=4):
    """The environment that `accelerate launch` would give to the processes, from its own functions."""
    from accelerate.commands import launch
    from accelerate.utils import launch as environments

    monkeypatch.chdir(ROOT)
    parser = launch.launch_command_parser()
    flags = ["--num_processes", str(num_processes), "--main_process_port", "0"]
    arguments = parser.parse_args(["--config_file", f"accelerate_configs/{name}.yaml", *flags, "program.py"])
    arguments, defaults, from_file = launch._validate_launch_command(arguments)
    assert arguments.num_processes == num_processes
    if arguments.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return environments.prepare_deepspeed_cmd_env(arguments)[1]
    assert arguments.use_fsdp or arguments.multi_gpu
    return environments.prepare_multi_gpu_env(arguments)


@pytest.mark.parametrize("name", sorted(GPU | CPU))
def test_what_the_processes_see(monkeypatch, name):
    """What is in the file reaches the processes; the number of processes on the command line wins."""
    seen = launched(monkeypatch, name)
    assert seen["ACCELERATE_MIXED_PRECISION"] == "no"
    assert (seen.get("ACCELERATE_USE_FSDP") == "true") == ("fsdp2" in name)
    assert (seen.get("ACCELERATE_USE_DEEPSPEED") == "true") == ("zero" in name)
    if "fsdp2" in name:
        assert (seen["FSDP_VERSION"], seen["FSDP_RESHARD_AFTER_FORWARD"]) == ("2", "true")
        assert seen["FSDP_STATE_DICT_TYPE"] == "SHARDED_STATE_DICT"


@pytest.mark.parametrize("name", sorted(n for n in GPU | CPU if "zero" in n))
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerates_plugin(monkeypatch, name, precision):
    """Accelerate's plugin takes the file: it adds no clipping and no scaler, and bf16 is what the recipe says."""
    pytest.importorskip("deepspeed")
    from accelerate.utils import DeepSpeedPlugin

    for key, value in launched(monkeypatch, name).items():
        if key.startswith("ACCELERATE_"):
            monkeypatch.setenv(key, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(precision)
    settings = plugin.deepspeed_config
    assert settings["gradient_clipping"] == "auto" and settings["communication_data_type"] == "fp32"
    assert settings["bf16"]["enabled"] == (precision == "bf16")
    assert not settings["fp16"]["enabled"]
    assert plugin.zero3_init_flag == ("zero3" in name)


PROGRAM = """
import os
from accelerate import Accelerator
state = Accelerator()
with open(os.environ["SEEN"] + os.environ["RANK"], "w") as file:
    print(state.distributed_type.value, state.num_processes, state.device.type, file=file)
state.end_training()
"""


@pytest.mark.deep
def test_two_processes_on_the_cpu(tmp_path):
    """Launched as the file's head says, the two processes know of each other."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    children.run(
        [
            *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"),
            *("--config_file", "accelerate_configs/cpu_ddp.yaml", str(program)),
        ],
        cwd=ROOT,
        env={**environment, "SEEN": str(tmp_path / "rank")},
    )
    for rank in "01":
        assert (tmp_path / f"rank{rank}").read_text().split() == ["MULTI_CPU", "2", "cpu"]
