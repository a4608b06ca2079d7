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
    "the load-balancing loss is an average over the tokens of all rows, so a unit's gradient would depend on others. "
    "Leave it out: the loss of a row has no such term",
    None,
    0,
)
_OFFLOADING = refused(
    "activations on the CPU were not tried with the hooks that compute the norms. Set gradient_checkpointing=True",
    False,
)
_PADDING_FREE = "rows would be concatenated by TRL's collator"
_MULTIPLE = ignored("rows are padded to the longest of their microbatch; it has no influence on the result")
_PAD_TOKEN = works("sets the tokenizer's padding token; TRL 1.1 deprecated it")

SHARED: Mapping[str, Argument] = {
    "model_init_kwargs": works("arguments of from_pretrained, if the model is given by its name"),
    "trust_remote_code": works("if the model is given by its name"),
    "router_aux_loss_coef": _ROUTER,
    "dataset_num_proc": ignored("each process prepares all rows, one after the other"),
    "max_length": works("the most tokens of a row"),
    "truncation_mode": works("keep_start or keep_end"),
    "pad_to_multiple_of": _MULTIPLE,
    "activation_offloading": _OFFLOADING,
    "pad_token": _PAD_TOKEN,
}
"""Arguments that `trl.SFTConfig` and `trl.DPOConfig` have in common."""

SFT: Mapping[str, Argument] = {
    **SHARED,
    "chat_template_path": works(
        "a Jinja file. A tokenizer's folder is refused: trl.clone_chat_template(model, tokenizer, path) returns the "
        "model and the tokenizer to pass"
    ),
    "dataset_text_field": works("the column of texts"),
    "dataset_kwargs": works("skip_prepare_dataset takes rows as they are; other keys are refused"),
    "eos_token": works("sets the token that ends texts, in tokenizer and model"),
    "shuffle_dataset": ignored("the sampler of the plan draws the rows of each step"),
    "packing": refused(
        "rows of several units would share a sequence. Pass pack_rows=True to DPSFTTrainer: it concatenates the rows "
        "of a microbatch, and attention and norms keep them apart",
        False,
    ),
    "packing_strategy": ignored("packing is refused; pack_rows has no strategy"),
    "padding_free": refused(f"{_PADDING_FREE}. Pass pack_rows=True to DPSFTTrainer", False),
    "eval_packing": refused("an evaluation pads its rows. Leave it out", None, False),
    "completion_only_loss": works("by default, if there are completions"),
    "assistant_only_loss": works("takes TRL's training template where the tokenizer's own does not mark the words"),
    "loss_type": refused(
        "only 'nll' has a loss per row here, the mean over the row's own tokens. TRL's 'dft' is divided by the tokens "
        "of the batch. Leave it out",
        "nll",
    ),
}
"""Arguments of `trl.SFTConfig`."""


DPO: Mapping[str, Argument] = {
    **SHARED,
    "disable_dropout": works("sets every dropout of the model to 0"),
    "padding_free": refused(f"{_PADDING_FREE}; TRL itself pads at present. Leave it out", False),
    "precompute_ref_log_probs": ignored("the reference is always computed once, before the first step"),
    "precompute_ref_batch_size": ignored("each call of the reference has one pair, so that no other pair changes it"),
    "loss_type": works(
        f"the losses of one pair: {', '.join(KINDS)}. {', '.join(COUPLED)} couple pairs and are refused"
    ),
    "loss_weights": works("one for each loss"),
    "ld_alpha": works("weights the tokens beyond the length of the shorter answer"),
    "f_divergence_type": works("reverse_kl, forward_kl, js_divergence or alpha_divergence"),
    "f_alpha_divergence_coef": works("of alpha_divergence"),
    "label_smoothing": works("of exo_pair and robust"),
    "beta": works("the strength of the tie to the reference"),
    "use_weighting": refused(
        "WPO's weights need the squared probabilities of the whole vocabulary, which the loss does not form. Leave it "
        "out",
        False,
    ),
    "discopop_tau": works("of discopop"),
    "sync_ref_model": refused("the reference is computed once, before the first step. Leave it out", False),
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

In a recipe, `train.trainer: sft` or `dpo` adds the names of these configurations to the section `train`. The recipes
`sft_replies` and `dpo_replies` run on a CPU. `dpllm plan suggest` takes a recipe with `sft`. Rehearsals,
`dpllm methods tune` and `recipes/compare.py` make rows and losses themselves, and refuse both trainers.

- **Data**: texts, prompts with completions, conversations and preferences, in TRL's columns. Each row is made of one
  example. TRL reads the shape of all examples from the first one, and here another shape is an error. Examples without
  a target are an error too, because N would depend on them.
- **Conversations**: in the forms of OpenAI, ShareGPT and LLaMA-Factory, with the columns `system`, `tools`, `documents`
  and `chat_template_kwargs` beside them. What the chat template would leave out of an example is an error.
- **Loss of SFT**: the mean over a row's own targets. TRL divides by the targets of the batch.
- **Loss of DPO**: one for each pair, with TRL's formulas. Losses that sort or average over the batch are refused.
- **Unit of DPO**: one pair, with its prompt and both answers. A prompt in several pairs needs
  a column with the prompt's id, named in `PrivacyConfig(unit=...)`. Otherwise the report has an open point.
- **Reference of DPO**: the model before the first step, or `ref_model`, or the columns `ref_chosen_logps` and
  `ref_rejected_logps`. Its log-probabilities are computed once, with one pair in each call. This takes one forward pass
  over all pairs before the first step.
- **Figures**: rewards, margins and accuracies are computed on `eval_dataset` only, and the report counts them. Rewards
  on training pairs are not computed.
- **Several processes**: a loss of two calls has the same clipped sum on DDP, FSDP2, ZeRO-1, -2 and -3.
- **Not here**: KTO, GRPO, reward models and images. Packing is `pack_rows=True` of `DPSFTTrainer`.

The options of `TrainingArguments` are in [another table](training_arguments.md).
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
