"""DPSFTTrainer and DPDPOTrainer: private training with the options and the data shapes of TRL's trainers.

They make rows from examples (`dpllm.data.examples`) or from pairs of answers with their references
(`dpllm.data.examples`), and pass them to `dpllm.DPTrainer`, from which they inherit steps, checks and report. TRL
prepares conversations and templates. They inherit from no class of TRL's trainers, so no option is silently ignored
(`dpllm.training.trl_arguments`). Guarantee, model and tokenizer are checked before any data are read.

`dpllm.training.finetune` calls `trainer_of` for a recipe with ``train.trainer``, instead of tokenizing and making a
`dpllm.DPTrainer`: its records have TRL's shapes, and ``train`` has TRL's options. The columns that the recipe names get
the names that TRL gives them.

`PairLosses` computes the losses of preference pairs. The reference is the model at the start of the
training, or another one, and does not change. Its log-probabilities are computed once for each pair, before the first
step, with no other pair in the call, so a pair's loss is a function of that pair and the weights. This needs no second
model next to the trained one, and works alike on every engine.

Shape suffixes: B pairs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from datasets.utils import tqdm
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from dpllm.config import ConfigError, DataConfig, PrivacyConfig, Recipe
from dpllm.config.tasks import Score
from dpllm.config.values import flag
from dpllm.data.examples import LOG_PROBS, PairCollator, Preferences, Supervised, Tokens, reference_in, shares_prompts
from dpllm.data.messages import BESIDE, OPTIONS, read_beside
from dpllm.data.rows import RowCollator
from dpllm.engines.processes import Processes
from dpllm.models.inputs import align_padding
from dpllm.models.load import load_pretrained, not_loaded
from dpllm.models.preference import PairLoss, answer_tokens, pair_log_probs
from dpllm.models.starting_point import check_start, edited_start
from dpllm.models.tasks import RowLoss, task_of
from dpllm.training.argument_table import ARGUMENTS, Argument, refused
from dpllm.training.arguments import checked_arguments, read_privacy
from dpllm.training.choose_clipper import in_mode
from dpllm.training.evaluation import HeldOut, HeldOutRows, Measurement, sums_over
from dpllm.training.ledger_notes import scores_in
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.trainer import DPTrainer
from dpllm.training.trl_arguments import DPO, SFT, checked_config, pair_loss_of

PREFERENCE_ACCURACY = Score("preference accuracy", larger_is_better=True)


class PairLosses:
    """Calls the model with both answers of each pair and returns one loss per pair (B,).

    Args:
        loss: computes the loss from log-probabilities.
    """

    def __init__(self, loss: PairLoss) -> None:
        """Store the loss."""
        self.loss = loss

    def attention(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context without effect: pairs are padded."""
        del model
        return contextlib.nullcontext()

    def after(self, prepare: Callable[[Any], Any]) -> Callable[[Any, Mapping[str, Any]], Tensor]:
        """Return this function on inputs that are prepared first, for instance moved to the model's device."""
        return lambda model, inputs: self(model, prepare(dict(inputs)))

    def __call__(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return the losses (B,) with a graph; each is computed from its own pair.

        Args:
            model: model to call.
            inputs: inputs by `dpllm.data.examples.PairCollator`, on the model's device.
        """
        return self.scored(model, inputs)[0]

    def scored(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the losses (B,), and the rewards (B, 2): β times the log-ratios of the two answers."""
        log_probs_B2 = pair_log_probs(model, inputs, self.loss.tail_weight)
        reference_B2 = inputs[LOG_PROBS].to(log_probs_B2)
        loss_B = self.loss(log_probs_B2, reference_B2, answer_tokens(inputs))
        return loss_B, self.loss.beta * (log_probs_B2.detach() - reference_B2)


def reference_log_probs(
    model: Any,
    dataset: Any,
    collate: PairCollator,
    tail_weight: float | None,
    device: torch.device,
    processes: Processes,
    words: str,
) -> np.ndarray:
    """Return (num_rows, 2): the log-probabilities of both answers of each pair. Called by all processes together.

    Guarantee: the numbers of a pair depend only on that pair and the model; each call of the model has one pair. The
    processes divide the pairs, and each gets all numbers.

    Args:
        model: the reference, unsharded.
        dataset: rows of `dpllm.data.examples.Preferences`.
        collate: makes inputs from rows.
        tail_weight: as for `PairLoss`.
        device: device on which the model runs.
        processes: processes of the run.
        words: name of the data set, for the progress bar.

    Raises:
        ConfigError: the model's parameters are sharded over processes.
        DataError: a number is not finite.
    """
    if any(hasattr(p, "ds_id") or hasattr(p, "placements") for p in model.parameters()):
        raise ConfigError(
            "The reference has parameters that are sharded over processes (ZeRO-3), so no process can compute its "
            "log-probabilities alone. Compute them beforehand in one process, and pass them in the columns "
            "ref_chosen_logps and ref_rejected_logps"
        )
    numbers = np.arange(processes.rank, len(dataset), processes.size)
    found = np.zeros((len(numbers), 2))
    with torch.no_grad(), in_mode(model, training=False), _placed(model, device):
        for place, number in enumerate(tqdm(numbers, f"reference of {words}", disable=not processes.is_main or None)):
            inputs = {name: value.to(device) for name, value in collate([dataset[int(number)]]).items()}
            found[place] = pair_log_probs(model, inputs, tail_weight)[0].double().cpu().numpy()
    whole = np.zeros((len(dataset), 2))
    for rank, share in enumerate(processes.gather(found)):
        whole[rank :: processes.size] = share
    return whole


_TIE = 1e-3  # of log-ratios; sums of many rounded log-probabilities differ by less
_PAIRS = 16  # pairs of a forward pass


class HeldOutPairs:
    """Held-out pairs, and the score that is measured on them.

    Attributes:
        size: number of pairs.

    Args:
        losses: losses of the training.
        rows: pairs whose reference the collator has.
        collator: collator of the rows.
    """

    def __init__(self, losses: PairLosses, rows: Any, collator: PairCollator) -> None:
        """Store the pairs."""
        self._losses, self._rows, self._collator = losses, rows, collator
        self.size = len(rows)

    @torch.no_grad()
    def measure(
        self, model: Any, processes: Processes | None = None, moved: Callable[[int], None] | None = None
    ) -> Measurement:
        """Return the share of pairs whose chosen answer gained more probability than the rejected one, and the loss.

        A pair in which both gained equally counts half, so the model before the training has 0.5.

        Args:
            model: model on its device.
            processes: as for `dpllm.training.evaluation.measure`.
            moved: as for `measure`.
        """

        def score(inputs: dict[str, Any]) -> tuple[float, float]:
            loss_B, rewards_B2 = self._losses.scored(model, inputs)
            margin_B = (rewards_B2[:, 0] - rewards_B2[:, 1]) / self._losses.loss.beta
            hits_B = (margin_B > _TIE).double() + 0.5 * (margin_B.abs() <= _TIE).double()
            return float(loss_B.double().sum()), float(hits_B.sum())

        order = np.argsort([-len(ids) for ids in self._rows["chosen_input_ids"]], kind="stable")
        loss, hits = sums_over(model, self._rows, order, self._collator, score, _PAIRS, processes, moved)
        mean = loss / self.size
        return Measurement(score=PREFERENCE_ACCURACY, value=hits / self.size, loss=mean, row_loss=mean)


@contextlib.contextmanager
def _placed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Place a model on a device for the duration of the block, before an engine that shards it has placed it."""
    before = next(model.parameters()).device
    if before.type != device.type:
        model.to(device)
    try:
        yield
    finally:
        if before.type != device.type:
            model.to(before)


# --------------------------------------------------------------------------------------- guarantee, model and tokenizer


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


# ---------------------------------------------------------------------------------------- supervised fine-tuning


_REFUSED_BY_SFT = {
    "compute_loss_func": "its loss is the mean over a row's own target tokens. Use dpllm.DPTrainer for another one",
    "data_collator": "rows are padded, or concatenated with pack_rows=True. Use dpllm.DPTrainer for another one",
}


class DPSFTTrainer(DPTrainer):
    """Fine-tunes a causal language model on texts, completions or conversations with differential privacy.

    Guarantee: that of `dpllm.DPTrainer`. A unit is one example, or with ``PrivacyConfig(unit=COLUMN)`` all examples
    with the same value in this column.

    Args:
        model: a causal language model, PEFT-wrapped or not; or its folder or name on the Hub.
        args: `trl.SFTConfig`. The loss of a row is the mean over its own targets, not over those of the batch.
        privacy: the privacy guarantee.
        train_dataset: a `datasets.Dataset` with a column of texts, ``prompt`` and ``completion``, ``messages`` or
            ``conversations`` (texts or conversations), or token ids in ``input_ids``.
        eval_dataset: examples for evaluation, or several data sets by name; their results are not covered.
        processing_class: the tokenizer. None: the model's own.
        peft_config: description of an adapter for the model.
        options: other arguments of `dpllm.DPTrainer`, such as ``pack_rows`` and ``eval_is_public``.

    Raises:
        ConfigError, ValueError: an option would make the guarantee untrue, or cannot be used; raised before any data
            are read.
        DataError: an example cannot be used.
    """

    argument_table: ClassVar[Mapping[str, Argument]] = {**ARGUMENTS, **SFT}

    def __init__(
        self,
        model: Any,
        args: Any,
        privacy: PrivacyConfig | Mapping[str, Any],
        train_dataset: Any,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **options: Any,
    ) -> None:
        """Make the rows, compute the plan, and set up the Trainer."""
        checked_config(args, "SFTConfig", SFT, "DPSFTTrainer")
        self._skips = _skips_preparation(args)
        inputs = inputs_of(self, args, privacy, model, processing_class, peft_config, options, _REFUSED_BY_SFT)
        privacy, model, tokenizer = inputs.privacy, inputs.model, inputs.tokenizer
        take_template(tokenizer, args.chat_template_path)
        self._supervised = Supervised(
            tokens=Tokens(tokenizer, marking_template(tokenizer) if args.assistant_only_loss else None),
            text_column=args.dataset_text_field,
            completion_only=args.completion_only_loss,
            assistant_only=args.assistant_only_loss,
            max_length=args.max_length,
            keep_end=args.truncation_mode == "keep_end",
        )
        keep = [privacy.unit] if privacy.unit else []
        given = train_dataset
        if not self._skips:
            train_dataset = Processes().together(lambda: self._supervised.rows(train_dataset, keep=keep))
        super().__init__(
            model,
            args,
            privacy,
            train_dataset,
            eval_dataset=self._rows_of(eval_dataset),
            processing_class=tokenizer,
            **options,
        )
        self.sources.training.append(given)

    def row_maker(self, model: Any, tokenizer: Any, keys: Mapping[str, Any]) -> None:
        """Return None: the constructor has already made the rows."""

    def _rows_of(self, dataset: Any) -> Any:
        """Return the rows of examples for evaluation; a name, or tokenised rows, are returned unchanged."""
        if isinstance(dataset, Mapping):
            return {name: self._rows_of(one) for name, one in dataset.items()}
        columns = getattr(dataset, "column_names", None) or ()
        if self._skips or dataset is None or isinstance(dataset, str) or {"input_ids", "labels"} <= {*columns}:
            return dataset
        return Processes().together(lambda: self._supervised.rows(dataset, "eval_dataset"))

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as `dpllm.DPTrainer` does; examples are prepared as those of the constructor."""
        return super().evaluate(self._rows_of(eval_dataset), ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """Predict as `dpllm.DPTrainer` does; examples are prepared as those of the constructor."""
        return super().predict(self._rows_of(test_dataset), ignore_keys, metric_key_prefix)


def _skips_preparation(args: Any) -> bool:
    """Return whether rows are given as token ids and need no preparation.

    Raises:
        ConfigError: ``dataset_kwargs`` has an unsupported key, or a value that is neither true nor false.
    """
    if not isinstance(args.dataset_kwargs, Mapping | None):
        raise ConfigError(f"dataset_kwargs must be a dictionary, got {type(args.dataset_kwargs).__name__}")
    given = dict(args.dataset_kwargs or {})
    skips = given.pop("skip_prepare_dataset", False)
    flag("dataset_kwargs['skip_prepare_dataset']", skips)
    if given:
        raise ConfigError(
            f"dataset_kwargs has the key {next(iter(given))!r}; only 'skip_prepare_dataset' has an effect"
        )
    return bool(skips)


# --------------------------------------------------------------------------------------- preference optimization


LOSS_FACT, REFERENCE_FACT = "loss of a pair", "reference of the loss"
"""Names of facts in the ledger."""
GIVEN_REFERENCE = (
    "The log-probabilities under the reference came with the pairs. Confirm that those of a pair were computed from "
    "that pair only, by a model that contains no information about the private pairs."
)
"""The open point about a reference that was not computed by dpllm."""
SHARED_PROMPTS = (
    "Several pairs have the same prompt. Each pair is its own unit here, so a prompt that is in k pairs is "
    "protected k times less. Give the pairs of one prompt, or of one person, one id (PrivacyConfig.unit, in "
    "a recipe data.columns.unit), or confirm that prompts need no protection."
)
"""The open point about data in which pairs share prompts."""
_TRAINING = "train_dataset"
_WHOLE = {
    "batch_eval_metrics": refused(
        "the rewards of all pairs of an evaluation are averaged at once; leave it out", False
    ),
    "include_for_metrics": refused("the figures of an evaluation are computed of its rewards; leave it out", []),
}
_REFUSED_BY_DPO = {
    "compute_loss_func": "args.loss_type names the loss of a pair",
    "data_collator": "a row is a pair, and the trainer itself collates pairs",
    "pack_rows": "a row has two sequences, which are not concatenated. Leave it out",
    "compute_metrics": "an evaluation computes the rewards, their margin and their accuracy",
}


class DPDPOTrainer(DPTrainer):
    """Tunes a causal language model on preferences with differential privacy.

    Guarantee: that of `dpllm.DPTrainer`. A unit is one pair: its prompt and both answers. With
    ``PrivacyConfig(unit=COLUMN)`` it is all pairs with the same value in this column. Pairs that share a prompt need
    such an id if the prompt is to be protected as one unit.

    The reference is the model as it is given, with its adapter if it has one, or ``ref_model``. Its log-probabilities
    are computed once for each pair, before the first step, or are read from the columns ``ref_chosen_logps`` and
    ``ref_rejected_logps``.

    Args:
        model: a causal language model, PEFT-wrapped or not; or its folder or name on the Hub.
        args: `trl.DPOConfig`. Losses that couple pairs are refused (`dpllm.models.preference.COUPLED`).
        privacy: the privacy guarantee.
        train_dataset: a `datasets.Dataset` with ``chosen`` and ``rejected``, texts or conversations, and ``prompt``;
            without it, the prompt is the beginning that both answers have in common.
        eval_dataset: pairs for evaluation, or several data sets by name. Loss, rewards, margins and accuracies on them
            are not covered. Rewards on training pairs are not computed.
        processing_class: the tokenizer. None: the model's own.
        peft_config: description of an adapter for the model.
        ref_model: another reference, which must be independent of the private pairs. None: the model at the start.
        options: other arguments of `dpllm.DPTrainer`, such as ``eval_is_public``.

    Raises:
        ConfigError, ValueError: an option would make the guarantee untrue, or cannot be used; raised before any data
            are read.
        DataError: an example cannot be used.
    """

    argument_table: ClassVar[Mapping[str, Argument]] = {**ARGUMENTS, **DPO, **_WHOLE}

    def __init__(
        self,
        model: Any,
        args: Any,
        privacy: PrivacyConfig | Mapping[str, Any],
        train_dataset: Any,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        ref_model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        """Make the pairs, compute the plan, set up the Trainer, and compute the reference."""
        checked_config(args, "DPOConfig", DPO, "DPDPOTrainer")
        self.loss = pair_loss_of(args)
        inputs = inputs_of(self, args, privacy, model, processing_class, peft_config, options, _REFUSED_BY_DPO)
        privacy, model, tokenizer = inputs.privacy, inputs.model, inputs.tokenizer
        if ref_model is model or not isinstance(ref_model, nn.Module | None):
            raise ConfigError(
                f"ref_model is {'the model itself' if ref_model is model else f'of type {type(ref_model).__name__}'}: "
                "leave it out to use the model as it is at the start, or pass another model"
            )
        if args.disable_dropout:
            without_dropout(model)
        self._preferences = Preferences(
            tokens=Tokens(tokenizer), max_length=args.max_length, keep_end=args.truncation_mode == "keep_end"
        )
        self._reference_points: list[str] = []
        if ref_model is not None:
            independent = bool(options.get("start_is_independent"))
            self._reference_points += check_start(ref_model, args.output_dir, independent)
            self._reference_points += Processes().from_main(lambda: edited_start(ref_model, independent))
        examples = {_TRAINING: train_dataset, **_named(eval_dataset)}
        keep = [privacy.unit] if privacy.unit else []
        pairs = Processes().together(lambda: self._pairs(examples, keep))
        self._shares_prompts = privacy.protects == "sequence" and shares_prompts(train_dataset)
        held_out: Any = {name: pairs[name] for name in _named(eval_dataset)}
        self.collator = collate = PairCollator(tokenizer.pad_token_id)
        super().__init__(
            model,
            args,
            privacy,
            pairs[_TRAINING],
            eval_dataset=held_out if isinstance(eval_dataset, Mapping) else next(iter(held_out.values()), None),
            processing_class=tokenizer,
            data_collator=collate,
            **options,
        )
        self.sources.training.append(train_dataset)
        self.sources.preprocessing += scores_in(train_dataset)
        reference = self._module if ref_model is None else ref_model
        self._reference_words = "the model before the first step" if ref_model is None else _name_of(ref_model)
        collate.reference = np.concatenate(
            [self._reference_of(reference, examples[name], pairs[name], collate, name) for name in examples]
        )
        self.compute_metrics = rewards_of

    def row_maker(self, model: Any, tokenizer: Any, keys: Mapping[str, Any]) -> None:
        """Return None: the constructor has already made the rows."""

    def _pairs(self, examples: Mapping[str, Any], keep: list[str]) -> dict[str, Any]:
        """Return the rows of each data set, numbered consecutively; those for evaluation keep no column."""
        made: dict[str, Any] = {}
        first = 0
        for name, dataset in examples.items():
            own = keep if name == _TRAINING else []
            made[name] = self._preferences.rows(dataset, name, own, first)
            first += len(made[name])
        return made

    def _reference_of(self, reference: Any, examples: Any, pairs: Any, collate: PairCollator, name: str) -> np.ndarray:
        given = reference_in(examples)
        if given is not None:
            if name == _TRAINING:
                self._reference_words = "log-probabilities that came with the pairs"
                self._reference_points = [GIVEN_REFERENCE]
            return given
        with self.compute_loss_context_manager():
            return reference_log_probs(
                reference, pairs, collate, self.loss.tail_weight, self.args.device, self.processes, name
            )

    def _row_losses(self, model: nn.Module, compute_loss_func: RowLoss | None, pack_rows: bool) -> Any:
        """Return the losses of pairs."""
        del model, compute_loss_func, pack_rows
        if self._head == "chunks":
            raise ConfigError('head="chunks" is for losses of single texts, not of pairs. Leave it out')
        return PairLosses(self.loss)

    def _note_outputs(self, ledger: SharedLedger) -> None:
        super()._note_outputs(ledger)
        ledger.append_fact(LOSS_FACT, self.loss.words())
        ledger.append_fact(REFERENCE_FACT, self._reference_words)
        for point in [*self._reference_points, *([SHARED_PROMPTS] if self._shares_prompts else [])]:
            ledger.append_open_point(point)

    def _set_signature_columns_if_needed(self) -> None:
        """Name the columns of a pair, none of which the model's forward takes."""
        self._signature_columns: Any = list(self._prepared.dataset.column_names)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the mean loss of the pairs of a batch, and their rewards (B, 2)."""
        del ignore_keys
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss_B, rewards_B2 = PairLosses(self.loss).scored(model, inputs)
        if prediction_loss_only:
            return loss_B.mean(), None, None
        return loss_B.mean(), rewards_B2, torch.zeros_like(loss_B)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as `dpllm.DPTrainer` does, on pairs of the constructor, whose reference was computed."""
        self._refuse_unknown(eval_dataset)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """Return the rewards of pairs of the constructor; the ledger counts it."""
        self._refuse_unknown(test_dataset)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def _refuse_unknown(self, dataset: Any) -> None:
        """Refuse pairs whose reference was not computed before the training, since the model has changed.

        Raises:
            ConfigError: the pairs are not those of the constructor.
        """
        several = self.eval_dataset.values() if isinstance(self.eval_dataset, Mapping) else ()
        known = (None, self.train_dataset, self.eval_dataset, *several)
        if not isinstance(dataset, str) and not any(dataset is one for one in known):
            raise ConfigError(
                "These pairs are not those of eval_dataset, and their reference, the model before the training, no "
                "longer exists. Pass them as eval_dataset to the constructor; several data sets as a dictionary"
            )


def without_dropout(model: nn.Module) -> None:
    """Set every dropout of a model to 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def rewards_of(prediction: Any) -> dict[str, float]:
    """Return figures of an evaluation from the rewards of its pairs (N, 2): means, accuracy and margin."""
    chosen, rejected = np.asarray(prediction.predictions, dtype=np.float64).T
    return {
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/accuracies": float((chosen > rejected).mean()),
        "rewards/margins": float((chosen - rejected).mean()),
    }


def _name_of(model: Any) -> str:
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return f"another model, {name or 'which has no name'}"


def _named(dataset: Any) -> dict[str, Any]:
    """Return data sets for evaluation by name.

    Raises:
        ConfigError: one has the name of the private pairs and would replace them.
    """
    if dataset is None:
        return {}
    if isinstance(dataset, Mapping) and _TRAINING in dataset:
        raise ConfigError(
            f"eval_dataset has a data set named {_TRAINING!r}, which is the name of the private pairs: give it "
            "another name"
        )
    return dict(dataset) if isinstance(dataset, Mapping) else {"eval_dataset": dataset}


# --------------------------------------------------------------------------------------- the trainer of a recipe


_TRAINERS: dict[str, type[DPTrainer]] = {"sft": DPSFTTrainer, "dpo": DPDPOTrainer}


def trainer_of(
    recipe: Recipe,
    args: Any,
    model: Any,
    tokenizer: Any,
    train_records: datasets.Dataset,
    eval_records: datasets.Dataset | None,
    **options: Any,
) -> tuple[DPTrainer, HeldOut | HeldOutPairs | None]:
    """Return the trainer of a recipe with ``train.trainer``, and its held-out records.

    Args:
        recipe: the recipe.
        args: its ``train`` section as TRL's configuration.
        model: model to train, with its adapter.
        tokenizer: tokenizer of the model.
        train_records: the private records.
        eval_records: the held-out records.
        options: other arguments of `dpllm.DPTrainer`.
    """
    args.max_length = recipe.data.max_length
    kind: Any = _TRAINERS[recipe.train["trainer"]]
    made: DPTrainer = kind(
        model=model,
        args=args,
        privacy=recipe.privacy,
        train_dataset=renamed(train_records, recipe.data, recipe.privacy.unit),
        eval_dataset=None if eval_records is None else renamed(eval_records, recipe.data, None),
        processing_class=tokenizer,
        **options,
    )
    if eval_records is None:
        return made, None
    rows: Any = made.eval_dataset
    if isinstance(made, DPDPOTrainer):
        return made, HeldOutPairs(PairLosses(made.loss), rows, made.collator)
    collator = RowCollator(pad_token_id=tokenizer.pad_token_id)
    return made, HeldOut(HeldOutRows(eval_records, rows, collator, recipe.data, tokenizer))


def renamed(records: datasets.Dataset, config: DataConfig, unit_column: str | None) -> datasets.Dataset:
    """Return the columns that a recipe names, under TRL's names, and the column of units.

    Args:
        records: the records.
        config: format and columns.
        unit_column: column of the units' ids; None: there is none.

    Raises:
        ConfigError: the column of units has a name that TRL gives to another column.
    """
    names = {own: its for own, its in config.form.trl_names.items() if own in records.column_names}
    if unit_column in names or unit_column in names.values():
        raise ConfigError(
            f"data.columns.unit={unit_column!r} is also the name of a text column ({', '.join(names)}): rename the "
            "column with the ids"
        )
    for name in (*BESIDE, "ref_chosen_logps", "ref_rejected_logps", unit_column):
        if name is not None and name in records.column_names:
            names[name] = name
    taken = records.select_columns(list(names))
    taken = taken.rename_columns({own: its for own, its in names.items() if own != its})
    if not config.chat_template_kwargs:
        return taken
    own = taken[OPTIONS] if OPTIONS in names else [None] * len(taken)
    merged = [
        json.dumps(config.chat_template_kwargs | read_beside({OPTIONS: one}, f"record {number}").get(OPTIONS, {}))
        for number, one in enumerate(own)
    ]
    return (taken.remove_columns(OPTIONS) if OPTIONS in names else taken).add_column(OPTIONS, merged)
