"""A DeepSpeed configuration gets the options of private training; options that break privacy are refused by name."""

import copy

import pytest
from torch import nn

from dpllm.engines import EngineError, private_config
from dpllm.engines.deepspeed import _NEEDED, _REFUSED, refuse_leaves
from tests.mutations import kills

# For each option that private training sets, a value that a configuration may ask for instead.
OTHER_VALUES = {
    "gradient_clipping": 1.0,
    "communication_data_type": "bf16",
    "gradient_accumulation_steps": 8,
    "zero_optimization.contiguous_gradients": True,
    "data_types.grad_accum_dtype": "bf16",
}
# For each option that is refused, a value that turns it on, and values that leave it off.
SWITCHED = {
    "fp16.enabled": (True, [False, "auto"]),
    "bf16.bf16_master_weights_and_grads": (True, [False]),
    "torch_autocast.enabled": (True, [False]),
    "prescale_gradients": (True, [False]),
    "gradient_predivide_factor": (2.0, [1, 1.0]),
    "sparse_gradients": (True, [False]),
    "zero_optimization.round_robin_gradients": (True, [False]),
    "zero_optimization.zero_quantized_gradients": (True, [False]),
    "zero_optimization.mics_shard_size": (2, [-1]),
    "zero_optimization.zenflow": ({"topk_ratio": 0.1}, [None]),
    "compression_training": ({"weight_quantization": {}}, [{}]),
    "sequence_parallel_size": (2, [1]),
    "zero_optimization.offload_optimizer.super_offload": (True, [False]),
    "zero_optimization.offload_param.device": ("nvme", ["cpu", "none"]),
    "pipeline": ({"stages": 2}, [{}]),
    "tensor_parallel": ({"autotp_size": 2}, [{"autotp_size": 0}, {"autotp_size": 1}]),
}


def config_with(path=None, value=None, stage=2):
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    if path is not None:
        *folders, name = path.split(".")
        section = config
        for folder in folders:
            section = section.setdefault(folder, {})
        section[name] = value
    return config


def look_up(config, path):
    for name in path.split("."):
        config = config[name]
    return config


def test_every_option_has_a_case_here():
    """An option added to either table needs one."""
    assert set(OTHER_VALUES) == set(_NEEDED)
    assert set(SWITCHED) == set(_REFUSED)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_private_training_needs_is_set_and_the_rest_stays(stage):
    """No other setting is needed: the same file works for ordinary training."""
    config = config_with(stage=stage)
    before = copy.deepcopy(config)
    private_config(config)
    for path, (needed, _) in _NEEDED.items():
        assert look_up(config, path) == needed
    assert config["zero_optimization"]["stage"] == stage and config["bf16"] == before["bf16"]
    again = copy.deepcopy(config)
    private_config(again)
    assert again == config


@pytest.mark.parametrize("path", _NEEDED)
def test_auto_is_filled_in_and_another_value_is_refused(path):
    """ "auto" permits setting it; an explicit value is never overridden."""
    config = config_with(path, "auto")
    private_config(config)
    assert look_up(config, path) == _NEEDED[path][0]
    with pytest.raises(EngineError, match=rf"sets {path}={OTHER_VALUES[path]!r}, which cannot be used .*Remove it"):
        private_config(config_with(path, OTHER_VALUES[path]))


@pytest.mark.parametrize("path", _REFUSED)
def test_what_would_change_the_sum_is_refused_by_name(path):
    """With the reason; switched off it is harmless."""
    value, harmless = SWITCHED[path]
    with pytest.raises(EngineError, match=rf"sets {path}=.*: {_REFUSED[path][1].replace('(', '.').replace(')', '.')}"):
        private_config(config_with(path, value))
    for off in harmless:
        private_config(config_with(path, off))


@pytest.mark.parametrize("stage", [0, None, 4])
def test_a_stage_without_zero_is_refused(stage):
    """Its reduction is different; DistributedDataParallel is the engine for replicas."""
    config = config_with(stage=stage)
    if stage is None:
        del config["zero_optimization"]["stage"]
    with pytest.raises(EngineError, match=rf"zero_optimization\.stage={stage or 0},.* 1, 2 and 3.*--config ddp"):
        private_config(config)
    with pytest.raises(EngineError, match=r"zero_optimization\.stage=0"):
        private_config({})


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam", "Muon"])
def test_optimizers_that_compress_gradients_are_refused(kind):
    """They communicate the update themselves, outside the reduction of the sum."""
    with pytest.raises(EngineError, match=f"the optimizer '{kind.lower()}', which compresses or transforms"):
        private_config({**config_with(), "optimizer": {"type": kind, "params": {"lr": 1e-3}}})
    private_config({**config_with(), "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})


@kills(
    "DeepSpeed makes a leaf module of a mixture of experts",
    "dpllm/engines/deepspeed.py",
    'leaves.setdefault("classes", [])',
    "pass",
)
def test_the_leaf_modules_that_deepspeed_chooses_by_itself_are_switched_off():
    """It takes the gradients of trained experts in them in the wrong pass; a user's own are kept, and checked later."""
    config = config_with(stage=3)
    private_config(config)
    assert config["zero_optimization"]["leaf_module"] == {"classes": []}
    own = {"classes": ["Frozen"], "names": ["model.vision"]}
    config = config_with("zero_optimization.leaf_module", copy.deepcopy(own), stage=3)
    private_config(config)
    assert config["zero_optimization"]["leaf_module"] == own


@kills(
    "trained parameters in a leaf module of ZeRO-3 are accepted",
    "dpllm/engines/deepspeed.py",
    "if leaf is not None and parameter.requires_grad:",
    "if False:",
)
def test_trained_parameters_in_a_leaf_module_are_refused_by_name():
    """Frozen ones are accepted."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model[0].weight.ds_z3_leaf_module = model[0]  # as DeepSpeed marks it
    with pytest.raises(EngineError, match=r"0\.weight"):
        refuse_leaves(model)
    refuse_leaves(model.requires_grad_(False))
