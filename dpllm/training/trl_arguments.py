"""List the arguments that TRL's configurations add to ``TrainingArguments``, and how private trainers treat each.

`dpllm.DPSFTTrainer` and `dpllm.DPDPOTrainer` consult the tables before any data are read.
`tests/training/test_trl_arguments.py` compares the tables with the installed classes. Statements about TRL hold for
version 1.16. `python -m dpllm.training.trl_arguments` prints docs/trl.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpllm.config import ConfigError
from dpllm.config.values import choice, integer
from dpllm.data.examples import require_trl
from dpllm.models.preference import COUPLED, KINDS, PairLoss
from dpllm.training.argument_table import ARGUMENTS, Argument, ignored, refuse_by_table, refused, works

_ROUTER = refused(
    "the load-balancing loss averages over the tokens of all rows, so a unit's gradient would depend on other units. "
    "Leave it out: the row loss has no such term",
    None,
    0,
)
_OFFLOADING = refused(
    "offloading activations to the CPU has not been tested with the norm computation. Set gradient_checkpointing=True",
    False,
)
_PADDING_FREE = "TRL's collator would concatenate rows"
_MULTIPLE = ignored("rows are padded to the longest row of their microbatch, which does not affect the result")
_PAD_TOKEN = works("sets the tokenizer's padding token; deprecated since TRL 1.1")

SHARED: Mapping[str, Argument] = {
    "model_init_kwargs": works("arguments of from_pretrained, if the model is passed by name"),
    "trust_remote_code": works("if the model is passed by name"),
    "router_aux_loss_coef": _ROUTER,
    "dataset_num_proc": ignored("each process prepares all rows, one after the other"),
    "max_length": works("the maximum number of tokens per row"),
    "truncation_mode": works("keep_start or keep_end"),
    "pad_to_multiple_of": _MULTIPLE,
    "activation_offloading": _OFFLOADING,
    "pad_token": _PAD_TOKEN,
}
"""Arguments that `trl.SFTConfig` and `trl.DPOConfig` have in common."""

SFT: Mapping[str, Argument] = {
    **SHARED,
    "chat_template_path": works(
        "a Jinja file. A tokenizer folder is refused: trl.clone_chat_template(model, tokenizer, path) returns the "
        "model and the tokenizer to pass"
    ),
    "dataset_text_field": works("the text column"),
    "dataset_kwargs": works("skip_prepare_dataset uses rows as they are; other keys are refused"),
    "eos_token": works("sets the end-of-text token of the tokenizer and the model"),
    "shuffle_dataset": ignored("the plan's sampler draws the rows of each step"),
    "packing": refused(
        "a sequence would contain rows of several units. Pass pack_rows=True to DPSFTTrainer: it concatenates the rows "
        "of a microbatch, and attention and norms keep them apart",
        False,
    ),
    "packing_strategy": ignored("packing is refused, and pack_rows has no strategy"),
    "padding_free": refused(f"{_PADDING_FREE}. Pass pack_rows=True to DPSFTTrainer", False),
    "eval_packing": refused("evaluation pads its rows. Leave it out", None, False),
    "completion_only_loss": works("on by default if there are completions"),
    "assistant_only_loss": works(
        "uses TRL's training template if the tokenizer's own does not mark the assistant's tokens"
    ),
    "loss_type": refused(
        "only 'nll' has a loss per row, the mean over the row's own tokens. TRL divides 'dft' by the tokens of the "
        "batch. Leave it out",
        "nll",
    ),
}
"""Arguments of `trl.SFTConfig`."""


DPO: Mapping[str, Argument] = {
    **SHARED,
    "disable_dropout": works("sets every dropout of the model to 0"),
    "padding_free": refused(f"{_PADDING_FREE}, and at present TRL itself pads them. Leave it out", False),
    "precompute_ref_log_probs": ignored(
        "the reference log-probabilities are always computed once, before the first step"
    ),
    "precompute_ref_batch_size": ignored(
        "the reference reads one pair at a time, so no other pair changes its log-probabilities"
    ),
    "loss_type": works(
        f"losses of single pairs: {', '.join(KINDS)}. Losses that couple pairs are refused: {', '.join(COUPLED)}"
    ),
    "loss_weights": works("one weight per loss"),
    "ld_alpha": works("the weight of the tokens beyond the length of the shorter answer"),
    "f_divergence_type": works("reverse_kl, forward_kl, js_divergence or alpha_divergence"),
    "f_alpha_divergence_coef": works("for alpha_divergence"),
    "label_smoothing": works("for exo_pair and robust"),
    "beta": works("how strongly the loss ties the model to the reference"),
    "use_weighting": refused(
        "WPO's weights need the squared probabilities of the whole vocabulary, which dpllm does not compute. Leave it "
        "out",
        False,
    ),
    "discopop_tau": works("for discopop"),
    "sync_ref_model": refused(
        "the reference log-probabilities are computed once, before the first step. Leave it out", False
    ),
    "ref_model_mixup_alpha": ignored("sync_ref_model is refused"),
    "ref_model_sync_steps": ignored("sync_ref_model is refused"),
}
"""Arguments of `trl.DPOConfig`."""


_CONFIGS: Mapping[str, tuple[str, Mapping[str, Argument]]] = {"sft": ("SFTConfig", SFT), "dpo": ("DPOConfig", DPO)}
_ELSEWHERE = {
    "max_length": "data.max_length",
    "dataset_text_field": "data.columns.text",
    "dataset_kwargs": "nothing: records are always prepared",
    "model_init_kwargs": "the section model",
    "trust_remote_code": "nothing: recipes run no code from the Hub",
}
"""Names of TRL's configurations for which a recipe has another key."""


def config_of(trainer: str) -> Any:
    """Return TRL's configuration for a recipe's ``train.trainer``.

    Raises:
        ConfigError: TRL is not installed, or there is no such trainer.
    """
    choice("train.trainer", trainer, tuple(_CONFIGS))
    return getattr(require_trl(f"train.trainer={trainer}"), _CONFIGS[trainer][0])


def table_of(trainer: str | None) -> Mapping[str, Argument]:
    """Return the table of the arguments of a recipe's ``train`` section."""
    return ARGUMENTS if trainer is None else {**ARGUMENTS, **_CONFIGS[trainer][1]}


def refuse_elsewhere(section: Mapping[str, Any]) -> None:
    """Refuse names of a recipe's ``train`` section for which the recipe has another key.

    Raises:
        ConfigError: one of them is set.
    """
    for name in _ELSEWHERE if section.get("trainer") is not None else ():
        if section.get(name) is not None:
            raise ConfigError(f"train.{name} is not read in a recipe: use {_ELSEWHERE[name]}")


def checked_config(args: Any, name: str, table: Mapping[str, Argument], purpose: str) -> None:
    """Check that arguments are a configuration of TRL, and that none of its own values is refused.

    Args:
        args: arguments that were passed to a trainer.
        name: name of TRL's class.
        table: table of its arguments.
        purpose: the trainer, for messages.

    Raises:
        ConfigError: TRL is not installed; the arguments have another class; a value is refused or out of range.
    """
    kind = getattr(require_trl(purpose), name)
    if not isinstance(args, kind):
        raise ConfigError(
            f"args is of type {type(args).__name__}, but {purpose} needs trl.{name}, whose options say how rows are "
            f"made: args=trl.{name}(output_dir=..., max_steps=...)"
        )
    refuse_by_table(args, {**ARGUMENTS, **table})
    if args.max_length is not None:
        integer("args.max_length", args.max_length, 2)  # the first token of a row is not a target
    choice("args.truncation_mode", args.truncation_mode, ("keep_start", "keep_end"))


def pair_loss_of(args: Any) -> PairLoss:
    """Return the loss that a `trl.DPOConfig` describes.

    Raises:
        ConfigError: it couples pairs, is unknown, or an option cannot be used.
    """
    return PairLoss(
        kinds=tuple(args.loss_type or ()),
        weights=None if args.loss_weights is None else tuple(args.loss_weights),
        beta=args.beta,
        label_smoothing=args.label_smoothing,
        discopop_tau=args.discopop_tau,
        f_divergence=args.f_divergence_type,
        f_alpha=args.f_alpha_divergence_coef,
        tail_weight=args.ld_alpha,
    )


_HEAD = """# TRL in private training

`dpllm.DPSFTTrainer` and `dpllm.DPDPOTrainer` take the options and the data of TRL's `SFTTrainer` and `DPOTrainer`
(`pip install 'dpllm[trl]'`, TRL 1.16 or newer). Their steps, checks and reports are those of `DPTrainer`.

```python
import torch
from trl import DPOConfig, SFTConfig
from dpllm import DPDPOTrainer, DPSFTTrainer, PrivacyConfig

privacy = PrivacyConfig(epsilon=8, delta=1e-6, clip_norm=1.0, expected_batch_size=1024)
shared = {"max_steps": 100, "bf16": torch.cuda.is_available()}  # TRL takes bf16, which needs a GPU, by default
tuned = DPSFTTrainer("model", SFTConfig("runs/sft", **shared), privacy, conversations, peft_config=lora)
tuned = DPDPOTrainer("model", DPOConfig("runs/dpo", **shared), privacy, preferences, peft_config=lora)
```

[Python trainers](tutorials/trainer.md#supervised-fine-tuning-and-preferences) explains losses and units. In a recipe,
`train.trainer: sft` or `dpo` adds the options of these configurations to the section `train`; the recipes `sft_replies`
and `dpo_replies` run on a CPU. Rehearsals, `dpllm methods tune` and `recipes/compare.py` compute rows and losses
themselves and refuse both trainers, and `dpllm plan suggest` refuses `dpo`.

- **Data**: texts, prompts with completions, conversations and preferences, in TRL's columns;
  [conversations](../recipes/README.md#chats) in the forms of a recipe. Each example becomes one row. TRL infers the
  shape of all examples from the first one; dpllm refuses examples of a different shape, and examples without a target,
  because N would depend on them.
- **DPO reference**: the model before the first step, or `ref_model`, or the columns `ref_chosen_logps` and
  `ref_rejected_logps`. dpllm computes its log-probabilities once, in one forward pass over all pairs before the first
  step.
- **Figures**: dpllm computes rewards, margins and accuracies on `eval_dataset` only, and the report counts them.
- **Not supported**: KTO, GRPO, reward models and images.

The options of `TrainingArguments` are in [their own table](training_arguments.md).
"""


def document() -> str:
    """Return the text of docs/trl.md."""
    parts = [_HEAD]
    for name, table in _CONFIGS.values():
        parts.append(f"\n## {name}\n\n| option | in private training | meaning or reason |\n| --- | --- | --- |\n")
        parts += [f"| `{option}` | {entry.kind} | {entry.reason} |\n" for option, entry in sorted(table.items())]
    return "".join(parts)


if __name__ == "__main__":
    print(document(), end="")
