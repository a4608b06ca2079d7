"""DPSFTTrainer: private supervised fine-tuning with the options and the data shapes of TRL's ``SFTTrainer``.

It makes rows from examples (`dpllm.data.examples`) and passes them to `dpllm.DPTrainer`, from which it inherits
steps, checks and report. TRL prepares conversations and templates. DPSFTTrainer inherits from no class of TRL's
trainers, so no option is silently ignored (`dpllm.training.trl_arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dpllm.config import ConfigError, PrivacyConfig
from dpllm.config.values import flag
from dpllm.data.examples import Supervised, Tokens
from dpllm.engines.processes import Processes
from dpllm.training.argument_table import ARGUMENTS, Argument
from dpllm.training.trainer import DPTrainer
from dpllm.training.trl_arguments import SFT, checked_config
from dpllm.training.trl_inputs import inputs_of, marking_template, take_template

_TAKEN = {
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
        inputs = inputs_of(self, args, privacy, model, processing_class, peft_config, options, _TAKEN)
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
