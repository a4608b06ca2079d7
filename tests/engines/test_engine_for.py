"""The engine that a model gets in one process, and the settings that are refused by name; several:
`tests.distributed.test_agreement`."""

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from torch import nn

from dpllm.engines import EngineError, SingleProcess, engine_for, model_inside


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class DeepSpeedEngine(nn.Module):
    """The interface of DeepSpeed's engine that `dpllm.engines` uses, set up for private training."""

    def __init__(self, **changes):
        super().__init__()
        self.module = nn.Linear(3, 2)
        self.optimizer = optimizer_of(self.module)
        self.answers = {
            "gradient_clipping": 0.0,
            "gradient_accumulation_steps": 1,
            "fp16_enabled": False,
            "bfloat16_enabled": False,
            "zero_contiguous_gradients": False,
            "zero_offload_optimizer": None,
            "zero_optimization_stage": 2,
            **changes,
        }
        self.communication_data_type = self.answers.pop("communication_data_type", torch.float32)
        stage = {"stage": self.answers["zero_optimization_stage"]}
        self.config = self.answers.pop("config", {"zero_optimization": stage})

    def __getattr__(self, name):
        answers = self.__dict__.get("answers", {})
        return (lambda: answers[name]) if name in answers else super().__getattr__(name)


class PipelineEngine(DeepSpeedEngine):
    """DeepSpeed's class of that name derives from its engine, too."""


def test_a_plain_module_in_one_process():
    """The whole model, the whole sum."""
    model = nn.Linear(3, 2)
    assert type(engine_for(model, optimizer_of(model))) is SingleProcess and model_inside(model) is model


def test_deepspeed_is_known_by_name():
    """Without importing it; the module inside is the one to hook. Its configuration, already in use, stays."""
    prepared = DeepSpeedEngine()
    engine = engine_for(prepared, prepared.optimizer)
    assert type(engine).__name__ == "DeepSpeedZero" and model_inside(prepared) is prepared.module
    assert prepared.config == {"zero_optimization": {"stage": 2}}


def test_a_pipeline_of_deepspeed_is_refused():
    """The layers of one unit, and so its norm, would be on different processes."""
    with pytest.raises(EngineError, match="spreads"):
        engine_for(PipelineEngine(), None)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"gradient_clipping": 1.0}, r"gradient_clipping=1\.0, but private training needs 0\.0: it would rescale"),
        ({"communication_data_type": torch.bfloat16}, r"communication_data_type=torch\.bfloat16.*rounded before"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4.*expected_batch_size"),
        ({"fp16_enabled": True}, r"fp16\.enabled=True.*loss scaler"),
        ({"bfloat16_enabled": True, "zero_contiguous_gradients": True}, "contiguous_gradients=True.*round the sums"),
        (
            {"bfloat16_enabled": True, "zero_offload_optimizer": object()},
            r"ZeRO-2 with zero_optimization\.offload_optimizer copies gradients.*--config zero3_offload",
        ),
        (
            {"bfloat16_enabled": True, "zero_offload_optimizer": object(), "zero_optimization_stage": 1},
            r"ZeRO-1 with zero_optimization\.offload_optimizer",
        ),
        ({"config": {"zero_optimization": {"stage": 2}, "prescale_gradients": True}}, "prescale_gradients=True"),
        ({"config": {"zero_optimization": {"stage": 0}}}, r"zero_optimization\.stage=0"),
    ],
)
def test_deepspeed_is_refused_as_it_understood_its_configuration(changes, match):
    """A default value counts like an explicit one."""
    with pytest.raises(EngineError, match=match):
        engine_for(DeepSpeedEngine(**changes), None)


@pytest.mark.parametrize(
    "changes",
    [
        {"bfloat16_enabled": True, "zero_optimization_stage": 1, "zero_contiguous_gradients": True},
        {"bfloat16_enabled": True, "zero_optimization_stage": 3, "zero_offload_optimizer": object()},
        {"zero_contiguous_gradients": True},
        {"zero_offload_optimizer": object()},
    ],
)
def test_deepspeed_options_that_leave_the_sum_alone_are_allowed(changes):
    """Float32 buffers do not round; ZeRO-1's sums are formed outside; ZeRO-3 offloads in float32."""
    prepared = DeepSpeedEngine(**changes)
    assert engine_for(prepared, prepared.optimizer).processes.size == 1


def test_a_model_over_several_devices_is_refused():
    """transformers' device_map is a pipeline within one process."""
    model = nn.Linear(3, 2)
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(EngineError, match="device_map"):
        engine_for(model, optimizer_of(model))
    model.hf_device_map = {"": "cpu"}
    assert type(engine_for(model, optimizer_of(model))) is SingleProcess


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("_mixed_precision", "fp16", "created with mixed_precision='fp16'"),
        ("_mixed_precision", "fp8", "created with mixed_precision='fp8'"),
        ("parallelism_config", ParallelismConfig(cp_size=2), "created with cp_size=2: tensor, context and sequence"),
        ("parallelism_config", ParallelismConfig(sp_size=2), "created with sp_size=2"),
    ],
)
def test_what_the_accelerator_was_made_with_is_checked_when_a_model_is_attached(name, value, match, monkeypatch):
    """A custom loop has no TrainingArguments to check."""
    model = nn.Linear(3, 2)
    monkeypatch.setitem(AcceleratorState._shared_state, name, value)
    with pytest.raises(EngineError, match=match):
        engine_for(model, optimizer_of(model))


def test_a_refused_gradient_does_not_reach_the_sum():
    """The engine checks before it adds the next microbatch."""
    model = nn.Linear(3, 2)
    engine, parameters = SingleProcess(optimizer_of(model)), dict(model.named_parameters())

    def add_one(parameter, total):
        total.filled().add_(1.0)

    engine.collect(parameters, add_one, last=False, scale=0.5)
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(EngineError, match="weight received"):
        engine.collect(parameters, add_one, last=True, scale=0.5)
    model.zero_grad()
    engine.collect(parameters, add_one, last=True, scale=0.5)
    assert all((p.grad == 1.0).all() for p in model.parameters())
