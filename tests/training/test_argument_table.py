"""The table of TrainingArguments: complete, as it says, and without a way past the mechanism."""

from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, Seq2SeqTrainingArguments, TrainingArguments

from dpllm import DPTrainer, PrivacyConfig
from dpllm.config import ConfigError
from dpllm.training.argument_table import (
    ARGUMENTS,
    IGNORED,
    REFUSED,
    TOPICS,
    WORKS,
    document,
    refuse_by_table,
    unlisted,
)
from dpllm.training.arguments import private_arguments, refuse_options
from tests import trl_data
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.training.test_trainer import arguments

pytestmark = pytest.mark.usefixtures("rows_not_compared")

INSTALLED = {item.name for item in fields(Seq2SeqTrainingArguments) if item.init}

# A value other than the default for each option that works or is ignored, where one process on a CPU can use it.
EXAMPLES = {
    "output_dir": "elsewhere",
    "per_device_train_batch_size": 3,
    "num_train_epochs": 2.0,
    "max_steps": 3,
    "learning_rate": 2e-2,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {},
    "warmup_steps": 1,
    "optim": "sgd",
    "optim_args": "second_moment=corrected",
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-6,
    "optim_target_modules": ["q_proj"],
    "average_tokens_across_devices": False,
    "max_grad_norm": 1e-9,
    "bf16": True,
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "torch_compile": True,
    "torch_compile_backend": "aot_eager",
    "torch_compile_mode": "default",
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "use_cache": True,
    "torch_empty_cache_steps": 1,
    "seed": 7,
    "data_seed": 7,
    "length_column_name": "labels",
    "label_names": ["labels"],
    "remove_unused_columns": False,
    "logging_strategy": "epoch",
    "logging_steps": 1,
    "logging_first_step": True,
    "log_on_each_node": False,
    "logging_nan_inf_filter": False,
    "log_level": "error",
    "log_level_replica": "error",
    "disable_tqdm": False,
    "report_to": [],
    "run_name": "mine",
    "project": "mine",
    "trackio_space_id": "mine",
    "trackio_bucket_id": "mine",
    "trackio_static_space_id": "mine",
    "skip_memory_metrics": False,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "eval_delay": 1,
    "per_device_eval_batch_size": 2,
    "prediction_loss_only": True,
    "eval_on_start": True,
    "eval_do_concat_batches": False,
    "eval_use_gather_object": True,
    "eval_accumulation_steps": 1,
    "include_for_metrics": ["inputs"],
    "batch_eval_metrics": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
    "save_only_model": True,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 1,
    "resume_from_checkpoint": "checkpoint-1",
    "restore_callback_states_from_checkpoint": True,
    "ignore_data_skip": True,
    "hub_token": "hf_mine",
    "hub_private_repo": True,
    "hub_model_id": "me/mine",
    "hub_strategy": "end",
    "hub_always_push": True,
    "hub_revision": "other",
    "accelerator_config": {"split_batches": True, "dispatch_batches": False, "even_batches": False},
    "dataloader_num_workers": 1,
    "dataloader_pin_memory": False,
    "dataloader_persistent_workers": True,
    "dataloader_prefetch_factor": 2,
    "dataloader_multiprocessing_context": "fork",
    "dataloader_in_order": False,
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 1,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "ddp_timeout": 60,
    "do_train": True,
    "do_eval": True,
    "do_predict": True,
    "local_rank": 0,
}
# Tested elsewhere: engines with several processes, a GPU, a stand-in for the Hub (tests.training.test_trainer_outputs).
ELSEWHERE = {"use_cpu", "tf32", "fsdp", "fsdp_config", "deepspeed", "parallelism_config", "ddp_backend", "push_to_hub"}
# Options that decide, with the noise and the draws fixed, what is trained. No other one may change a weight.
DECIDE = {
    *("num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16"),
}
TOGETHER = {  # options without which TrainingArguments refuses the example
    "activation_checkpointing_kwargs": {"activation_checkpointing": True},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing": True},
    "dataloader_persistent_workers": {"dataloader_num_workers": 1},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
    "dataloader_multiprocessing_context": {"dataloader_num_workers": 1},
    "dataloader_in_order": {"dataloader_num_workers": 1},
}
OFF = {  # a value of each refused option
    "gradient_accumulation_steps": 2,
    "label_smoothing_factor": 0.1,
    "liger_kernel_config": {"rope": True},
    "neftune_noise_alpha": 5.0,
    "train_sampling_strategy": "sequential",
    "include_num_input_tokens_seen": "all",
    "debug": "underflow_overflow",
    "generation_max_length": 8,
    "generation_num_beams": 2,
    "generation_config": "folder",
}


def weights_after(folder, **changes):
    """Return the weights after private steps with fixed draws and noise, and with evaluation rows."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama_config(num_hidden_layers=1))
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 61, (24, 6), generator=generator).tolist()]
    config = PrivacyConfig(noise_multiplier=1.0, clip_norm=0.5, expected_batch_size=6, delta=1e-3, seed=3)
    args = arguments(folder, max_steps=2, **changes)
    follows = not changes.keys().isdisjoint({"metric_for_best_model", "greater_is_better"})
    public = [{"input_ids": [5, 6], "labels": [5, 6]}]
    run = DPTrainer(model, args, config, rows, eval_dataset=public if follows else rows[:3], eval_is_public=follows)
    run.train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_every_option_of_the_installed_class_is_in_one_table():
    """Also those of Seq2SeqTrainingArguments; a later release must be looked at."""
    assert unlisted(TrainingArguments) == unlisted(Seq2SeqTrainingArguments) == []
    assert sum(len(topic) for topic in TOPICS.values()) == len(ARGUMENTS)


def test_every_reason_is_given():
    """What is ignored or refused says why; a refused option has a value that leaves it off."""
    for name, entry in ARGUMENTS.items():
        assert entry.kind in (WORKS, IGNORED, REFUSED)
        assert entry.kind == WORKS or entry.reason, name
        assert bool(entry.allowed) == (entry.kind == REFUSED), name
        assert entry.reason == entry.reason.strip().rstrip("."), name


def test_the_document_is_the_table():
    """`python -m dpllm.training.argument_table` writes it."""
    file = Path(__file__).resolve().parents[2] / "docs" / "training_arguments.md"
    assert file.read_text(encoding="utf-8") == document()


def test_defaults_are_never_refused(tmp_path):
    """The table knows how the class completes its own defaults."""
    for kind in (TrainingArguments, Seq2SeqTrainingArguments):
        refuse_options(kind(output_dir=str(tmp_path), use_cpu=True))


@kills(
    "options of TrainingArguments that break the guarantee are accepted",
    "dpllm/training/argument_table.py",
    "if entry.kind == REFUSED and hasattr(args, name):",
    "if False:",
)
@pytest.mark.parametrize("name", [name for name, entry in ARGUMENTS.items() if entry.kind == REFUSED])
def test_a_refused_option_is_refused_before_data_are_read(tmp_path, name):
    """By name, with the reason of the table. It is set on finished arguments, whose class refuses some itself."""
    if name not in INSTALLED:
        pytest.skip("not in this release")
    args = arguments(tmp_path, Seq2SeqTrainingArguments)
    setattr(args, name, OFF.get(name, True))
    model = LlamaForCausalLM(tiny_llama_config(num_hidden_layers=1))
    config = PrivacyConfig(noise_multiplier=1.0, clip_norm=0.5, expected_batch_size=6, delta=1e-3)
    with pytest.raises(ConfigError, match=f"train.{name}=.* cannot be used in private training: "):
        DPTrainer(model, args, config, trl_data.Unread())
    assert not list(tmp_path.iterdir())


def test_every_option_that_works_has_an_example():
    """Otherwise its claim is not tested."""
    claimed = {name for name, entry in ARGUMENTS.items() if entry.kind != REFUSED}
    assert claimed == EXAMPLES.keys() | ELSEWHERE and not EXAMPLES.keys() & ELSEWHERE


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name in INSTALLED])
def test_an_option_that_works_or_is_ignored_can_be_set(tmp_path, name):
    """The arguments are made, checked and kept."""
    changes = {name: EXAMPLES[name], **{k: v for k, v in TOGETHER.get(name, {}).items() if k in INSTALLED}}
    private_arguments(arguments(tmp_path, **{"eval_strategy": "no", **changes}))


def harmless():
    return [name for name, entry in ARGUMENTS.items() if name in EXAMPLES and name in INSTALLED and name not in DECIDE]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return weights_after(tmp_path_factory.mktemp("plain"))


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
@pytest.mark.deep
@pytest.mark.parametrize("name", harmless())
def test_no_other_option_changes_a_weight(tmp_path, plain, name):
    """Draws and noise fixed, rows, losses, clipping, scaling and update are the same with and without the option."""
    changes = {name: EXAMPLES[name], **{k: v for k, v in TOGETHER.get(name, {}).items() if k in INSTALLED}}
    if name == "output_dir":
        changes = {name: str(tmp_path / "elsewhere")}
    torch.testing.assert_close(weights_after(tmp_path, **changes), plain, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["max_grad_norm", "average_tokens_across_devices", "use_cache", "data_seed"])
def test_options_that_touch_gradients_or_draws_elsewhere_change_nothing(tmp_path, plain, name):
    """The quick part of the test above. On some processors the last bits of a product depend on where it is stored."""
    torch.testing.assert_close(weights_after(tmp_path, **{name: EXAMPLES[name]}), plain, rtol=0, atol=2e-6)


def test_the_comparison_can_fail(tmp_path, plain):
    """An option that decides what is trained changes the weights."""
    assert not torch.allclose(weights_after(tmp_path, weight_decay=0.1), plain, rtol=0, atol=2e-6)


@dataclass
class Later(TrainingArguments):
    """A later release, or a class of one's own."""

    packing: bool = False
    sampler_kwargs: dict = field(default_factory=dict)
    filled_in: int | None = None

    def __post_init__(self):
        super().__post_init__()
        self.filled_in = self.filled_in or 8


@kills(
    "an option that nobody has looked at is accepted",
    "dpllm/training/argument_table.py",
    "    for name in unlisted(type(args), table):",
    "    for name in ():",
)
def test_an_unknown_option_is_refused_unless_it_has_its_default(tmp_path):
    """Its effect on the guarantee is not known."""
    refuse_by_table(arguments(tmp_path, Later))
    for change in ({"packing": True}, {"sampler_kwargs": {"a": 1}}, {"filled_in": 9}):
        with pytest.raises(ConfigError, match=f"train.{next(iter(change))}=.* of Later"):
            refuse_by_table(arguments(tmp_path, Later, **change))
        table = {**ARGUMENTS, next(iter(change)): ARGUMENTS["learning_rate"]}
        refuse_by_table(arguments(tmp_path, Later, **change), table)
