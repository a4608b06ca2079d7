"""Check guarantee, model and tokenizer of a trainer that takes TRL's configurations, before any data are read.

`dpllm.DPSFTTrainer` and `dpllm.DPDPOTrainer` call it first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from dpllm.config import ConfigError, PrivacyConfig
from dpllm.models.inputs import align_padding
from dpllm.models.load import load_pretrained, not_loaded
from dpllm.models.tasks import task_of
from dpllm.training.arguments import checked_arguments, read_privacy

logger = logging.get_logger(__name__)

_TEMPLATES = (".jinja", ".j2")


@dataclass(frozen=True)
class Inputs:
    """The checked arguments of a trainer that takes TRL's configurations.

    Attributes:
        privacy: the privacy guarantee.
        model: model to train, with its adapter.
        tokenizer: its tokenizer, with the tokens of the arguments.
    """

    privacy: PrivacyConfig
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase


def inputs_of(
    trainer: Any,
    args: Any,
    privacy: Any,
    model: Any,
    tokenizer: Any,
    peft_config: Any,
    options: Mapping[str, Any],
    taken: Mapping[str, str],
) -> Inputs:
    """Check the arguments of a trainer, and load its model and tokenizer if they are given by name.

    Args:
        trainer: the trainer, whose ``argument_table`` names the options of ``args``.
        args: configuration of TRL, after `dpllm.training.trl_arguments.checked_config`.
        privacy: as for `dpllm.DPTrainer`.
        model: as for `model_for`.
        tokenizer: as for `tokenizer_for`.
        peft_config: as for `model_for`.
        options: other arguments of `dpllm.DPTrainer`.
        taken: arguments that the trainer sets itself, with the reasons.

    Raises:
        ConfigError: an argument cannot be used.
    """
    name = type(trainer).__name__
    read = read_privacy(privacy)
    refuse_taken(options, taken, name)
    own_optimizer = (options.get("optimizers") or (None,))[0] is not None
    checked_arguments(args, own_optimizer, trainer.argument_table)
    made = model_for(model, args, peft_config, name)
    return Inputs(read, made, tokenizer_for(tokenizer, made, args))


def model_for(model: Any, args: Any, peft_config: Any, purpose: str) -> nn.Module:
    """Return the model to train, loaded if it is given by name, with an adapter if one is described.

    Args:
        model: the model, its folder, or its name on the Hub. A name loads float32 weights, unless
            ``args.model_init_kwargs`` has another ``dtype``.
        args: configuration of TRL.
        peft_config: configuration of PEFT. None: the model is trained without a new adapter.
        purpose: the trainer, for messages.

    Raises:
        ConfigError: it cannot be loaded, is not a causal language model, or already has an adapter.
    """
    if isinstance(model, str):
        options = {"dtype": "float32", "trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
        model = load_pretrained(AutoModelForCausalLM, model, new_head=False, **options)
    elif args.model_init_kwargs or args.trust_remote_code:
        raise ConfigError(
            "args.model_init_kwargs and args.trust_remote_code are for a model that is given by its name, but this one "
            f"is of type {type(model).__name__}: leave them out"
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is of type {type(model).__name__}: pass a model, or its name")
    if task_of(model) != "causal_lm":
        raise ConfigError(
            f"{purpose} trains causal language models, but this is a {type(model).__name__}. Use dpllm.DPTrainer"
        )
    if peft_config is None:
        return model
    if not isinstance(peft_config, PeftConfig):
        raise ConfigError(
            f"peft_config is of type {type(peft_config).__name__}: pass a PEFT configuration, such as "
            "peft.LoraConfig(r=16, target_modules='all-linear')"
        )
    if isinstance(model, PeftModel):
        raise ConfigError("peft_config describes an adapter, but the model already has one: leave peft_config out")
    adapted: nn.Module = get_peft_model(model, peft_config)
    return adapted


def tokenizer_for(tokenizer: Any, model: Any, args: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with the tokens and the template of the arguments; the model gets the same tokens.

    Args:
        tokenizer: the tokenizer. None: the one stored with the model's weights.
        model: model to train.
        args: configuration of TRL.

    Raises:
        ConfigError: there is none, it is not a tokenizer, or it lacks a token or a template.
    """
    if tokenizer is None:
        name = str(getattr(model.config, "_name_or_path", "") or "")
        if not name:
            raise ConfigError("the model has no name, so its tokenizer is unknown: pass processing_class")
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)
        except MemoryError:
            raise
        except Exception as error:  # any: tokenizers raises plain Exception for an unreadable file
            raise not_loaded("tokenizer", name, error) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"processing_class is of type {type(tokenizer).__name__}, but texts need a tokenizer: pass the processor's "
            "tokenizer (processor.tokenizer)"
        )
    ends = getattr(args, "eos_token", None)
    for field, token in (("eos_token", ends), ("pad_token", args.pad_token)):
        if token is not None:
            if token not in tokenizer.get_vocab():
                raise ConfigError(f"{field}={token!r} is not in the tokenizer's vocabulary: use one of its tokens")
            setattr(tokenizer, field, token)
    if tokenizer.eos_token is None:
        raise ConfigError("the tokenizer has no end-of-sequence token, which ends each text: set one in it")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    align_padding(model, tokenizer)
    if ends is not None:
        _end_with(model, tokenizer.eos_token_id)
    return tokenizer


def _end_with(model: Any, token: int | list[int]) -> None:
    """Make a model end its texts with this token too."""
    model.config.get_text_config().eos_token_id = token
    known = getattr(model.generation_config, "eos_token_id", None)
    others = known if isinstance(known, list) else [known]
    model.generation_config.eos_token_id = [token, *(one for one in others if one not in (None, token))]


def take_template(tokenizer: Any, path: str | None) -> None:
    """Set a tokenizer's chat template from a file.

    Raises:
        ConfigError: it is not a Jinja file, or not UTF-8 text.
    """
    if path is None:
        return
    if not path.endswith(_TEMPLATES) or not Path(path).is_file():
        raise ConfigError(
            f"chat_template_path={path!r} is not a Jinja file. For the template of another tokenizer, which may add "
            "tokens, call model, tokenizer, _ = trl.clone_chat_template(model, tokenizer, path) first, and pass both"
        )
    try:
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat_template_path={path!r} is not UTF-8 text: save it as UTF-8") from error


def marking_template(tokenizer: Any) -> str | None:
    """Return TRL's template that marks the assistant's words; None if the tokenizer's own does.

    Raises:
        ConfigError: there is none for this tokenizer.
    """
    from trl.chat_template_utils import (
        get_training_chat_template,
        has_generation_markers,
        is_chat_template_stop_token_trained,
    )

    if not tokenizer.chat_template:
        raise ConfigError(
            "assistant_only_loss=True needs a chat template, but the tokenizer has none: set chat_template_path"
        )
    template = None
    if not has_generation_markers(tokenizer.chat_template):
        try:
            template = get_training_chat_template(tokenizer)
        except ValueError as error:
            raise ConfigError(
                "assistant_only_loss=True: the chat template does not mark the assistant's words, and TRL has no "
                "version of it that does. Put {% generation %} and {% endgeneration %} around them in the template"
            ) from error
    if not is_chat_template_stop_token_trained(tokenizer, chat_template=template):
        logger.warning(
            "The chat template leaves the end of the assistant's turn out of the words that enter the loss, so the "
            "model may not learn to stop. Move the end-of-turn token before {%% endgeneration %%}."
        )
    return template


def refuse_taken(options: Mapping[str, Any], taken: Mapping[str, str], trainer: str) -> None:
    """Refuse arguments of `dpllm.DPTrainer` that a trainer sets itself.

    Args:
        options: arguments passed to the trainer.
        taken: names of such arguments, with the reasons.
        trainer: its name.

    Raises:
        ConfigError: one of them is passed.
    """
    for name, reason in taken.items():
        if options.get(name):
            raise ConfigError(f"{trainer} does not take {name}: {reason}")
