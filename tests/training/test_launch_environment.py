"""Settings of an accelerate configuration that break privacy are refused by name, from its environment."""

from pathlib import Path

import pytest

from dpllm.config import ConfigError
from dpllm.training.arguments import find_deepspeed_config, private_arguments, refuse_environment, training_arguments

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "sets dynamo_backend .ACCELERATE_DYNAMO_BACKEND=INDUCTOR"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "sets mixed_precision to fp16 .* its loss scaler"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "sets mixed_precision to fp8 .* chosen over all rows"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP version 1"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP version 1"),
        ({"PARALLELISM_CONFIG_CP_SIZE": "2"}, "parallelism_config_cp_size to 2: context parallelism"),
        ({"PARALLELISM_CONFIG_SP_SIZE": "4"}, "parallelism_config_sp_size to 4: sequence parallelism"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "parallelism_config_tp_size to 2: tensor parallelism"),
    ],
)
def test_the_environment_of_a_launch_is_checked_before_data_are_touched(variables, match, monkeypatch, tmp_path):
    """Through the arguments of every run, and the function itself."""
    args = training_arguments({"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=match):
        private_arguments(args)
    with pytest.raises(ConfigError, match=match):
        refuse_environment(variables)


def test_what_the_shipped_configurations_set_is_accepted():
    """No compiler, no scaler, FSDP2, data parallelism."""
    refuse_environment({})
    refuse_environment(
        {
            **{"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "true"},
            **{"FSDP_VERSION": "2", "PARALLELISM_CONFIG_TP_SIZE": "1", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"},
        }
    )


def test_a_deepspeed_file_is_found_from_any_folder(tmp_path, monkeypatch):
    """A missing path is resolved from the repository; a path that exists in the working directory is unchanged."""
    monkeypatch.chdir(tmp_path)
    name, variable = "accelerate_configs/deepspeed/zero2.json", "ACCELERATE_DEEPSPEED_CONFIG_FILE"
    found = {variable: name}
    find_deepspeed_config(ROOT, found)
    assert found == {variable: str(ROOT / name)}
    (tmp_path / "own.json").write_text("{}")
    for own in ("own.json", "nowhere.json", "e30="):
        kept = {variable: own}
        find_deepspeed_config(ROOT, kept)
        assert kept == {variable: own}
