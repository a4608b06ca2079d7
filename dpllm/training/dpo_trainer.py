"""DPDPOTrainer: private preference tuning with the options and the data shapes of TRL's ``DPOTrainer``.

It makes a row from each pair of answers (`dpllm.data.examples`), computes the reference of each pair, and passes
both to `dpllm.DPTrainer`, from which it inherits steps, checks and report. It inherits from no class of TRL's trainers,
so no option is silently ignored (`dpllm.training.trl_arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dpllm.config import ConfigError, PrivacyConfig
from dpllm.data.examples import PairCollator, Preferences, Tokens, reference_in, shares_prompts
from dpllm.engines.processes import Processes
from dpllm.models.starting_point import check_start, edited_start
from dpllm.models.tasks import RowLoss
from dpllm.training.argument_table import ARGUMENTS, Argument, refused
from dpllm.training.ledger_notes import scores_in
from dpllm.training.pair_losses import PairLosses, reference_log_probs
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.trainer import DPTrainer
from dpllm.training.trl_arguments import DPO, checked_config, pair_loss_of
from dpllm.training.trl_inputs import inputs_of

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
_TAKEN = {
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
        inputs = inputs_of(self, args, privacy, model, processing_class, peft_config, options, _TAKEN)
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
