"""All outputs of a private run that the Trainer makes: logged figures, the model card, uploads to the Hub.

Place in the flow: between transformers' ``Trainer`` and `dpllm.DPTrainer`. Each of the Trainer's own outlets is
overridden here: a figure that ε does not cover is counted in the ledger, the card keeps the guarantee, and an upload
takes files from an allow-list (`dpllm.report.publishing`).
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel
from transformers import Trainer
from transformers.utils import logging

from dpllm.config import TASKS, ConfigError
from dpllm.engines.processes import Processes
from dpllm.models.loading import changes_of_base
from dpllm.models.tasks import is_of_transformers, loading_class, task_of
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.rounding import epsilon_to_log
from dpllm.report.disclosures import (
    DESTINATIONS,
    EVALUATION_DURING,
    EVALUATION_OUTSIDE,
    GRADIENT_NORM,
    PREDICTION,
    Evaluating,
    not_covered,
    own_callbacks,
    own_methods,
    own_metrics,
    receivers,
)
from dpllm.report.model_card import CARD_FILE, keep_own_card, write_model_card
from dpllm.report.models import PrivacyReport
from dpllm.report.publishing import PublishError, files_to_publish, note_uploaded, require_publishable, upload
from dpllm.report.statement import ReleaseNotes, notes_in, write_report
from dpllm.training.noted import PrivateSources
from dpllm.training.shared_ledger import SharedLedger

logger = logging.get_logger(__name__)

LOST_NOTES = (
    "An earlier report in this folder could not be read, so this one lacks the notes in it (an audit, other uses of "
    "the data). Note them again with `dpllm report`, or confirm that there were none."
)


@dataclasses.dataclass(frozen=True)
class StartingModel:
    """The model as it was given to the Trainer, which a card names.

    Attributes:
        name: name under which it was loaded. None: it was not loaded.
        task: see `dpllm.models.tasks.task_of`.
    """

    name: str | None
    task: str | None

    @classmethod
    def of(cls, model: Any) -> StartingModel:
        """Read name and task before training changes the model."""
        return cls(getattr(getattr(model, "config", None), "_name_or_path", None), task_of(model))

    def write_card(
        self, folder: Path, report: PrivacyReport, trained: Any, base_model: str | None = None, **metadata: Any
    ) -> None:
        """Write the card of the trained model.

        Args:
            folder: folder of the report.
            report: the privacy report.
            trained: the trained model.
            base_model: the base model's Hub id. None: `name`.
            metadata: other arguments of `dpllm.report.model_card.write_model_card`.
        """
        config, adapter = getattr(trained, "config", None), isinstance(trained, PeftModel)
        arguments, rows = changes_of_base(trained) if adapter else ({}, None)
        name = trained.active_adapter if adapter else "default"
        inner = trained.get_base_model() if adapter else trained
        known = is_of_transformers(inner)
        write_model_card(
            folder,
            report,
            base_model=base_model or self.name or None,
            task=self.task,
            adapter=adapter,
            num_labels=getattr(config, "num_labels", None) if self.task and TASKS[self.task].needs_labels else None,
            base_arguments=arguments,
            embedding_rows=rows,
            subfolder=name if isinstance(name, str) and name != "default" else None,
            loading_class=loading_class(inner) if known else None,
            own_class=None if known else type(inner).__name__,
            **metadata,
        )


class Outlets(Trainer):
    """The Trainer's outputs, with the guarantee; `dpllm.DPTrainer` is the class to use."""

    notes: ReleaseNotes
    hub_model_id: Any
    declared_points: Sequence[str] = ()
    """Open points of the report that follow from declarations outside of the Trainer; set them before ``train()``."""
    sources: PrivateSources
    """What the run was given beside its rows; a program that read the records adds to it before ``train()``."""
    _start: StartingModel
    _evaluating: Evaluating | None = None
    _predictions: int = 0  # calls of `predict` that run

    # ------------------------------------------- parts of the run, which DPTrainer has

    @property
    def ledger(self) -> SharedLedger | None:
        """The ledger of the run."""
        raise NotImplementedError

    @property
    def plan(self) -> PrivacyPlan:
        """The constants of the run."""
        raise NotImplementedError

    @property
    def processes(self) -> Processes:
        """All processes of the run."""
        raise NotImplementedError

    @property
    def _steps_began(self) -> float | None:
        """The time at which the model was hooked, after the callbacks at the start of training; None: not yet."""
        raise NotImplementedError

    # ------------------------------------------------------------------ figures

    @property
    def epsilon(self) -> float:
        """Return ε spent so far at the plan's δ."""
        raise NotImplementedError

    def disclose(self, what: str, count: int = 1) -> None:
        """Note in the ledger an output that the guarantee does not cover; the report lists it.

        Args:
            what: the output, for instance "evaluation on private rows".
            count: number of outputs.
        """
        if self.ledger is None:
            raise ValueError("There is no ledger yet: call train() first, which opens it.")
        self.ledger.append_disclosure(what, count)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the ε spent so far beside the loss, and count every figure that ε does not cover.

        The Trainer's ``grad_norm`` is logged as ``noisy_grad_norm``: it is the norm of the private gradient, clipped
        and with noise, which ε covers.
        """
        if "grad_norm" in logs:
            logs[GRADIENT_NORM] = logs.pop("grad_norm")
        if "loss" in logs:
            logs["epsilon"] = epsilon_to_log(self.epsilon)
        if "train_runtime" in logs and self._steps_began is not None:
            _count_from(logs, time.time() - self._steps_began)
        for what, count in not_covered(logs, self._evaluating, self.is_in_train).items():
            self._note(what, count)
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as ``Trainer`` does; the ledger counts it, unless the rows were declared public.

        Args:
            eval_dataset: rows; or None or the name of one of several: the ``eval_dataset`` of the constructor.
                ``eval_is_public`` is a declaration about that one only.
            ignore_keys: as for ``Trainer``.
            metric_key_prefix: as for ``Trainer``.
        """
        several = self.eval_dataset.values() if isinstance(self.eval_dataset, Mapping) else ()
        declared = (None, self.eval_dataset, *several)  # the Trainer calls this method for each of several
        own = isinstance(eval_dataset, str) or any(eval_dataset is one for one in declared)
        outer = self._evaluating  # of which a callback runs another one
        self._evaluating = Evaluating(metric_key_prefix, own and self._eval_is_public)
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._evaluating = outer
            if outer is None:
                self._renew_report()

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """Predict as ``Trainer`` does; the ledger counts it, unless the rows were declared public."""
        if not (test_dataset is self.eval_dataset and self._eval_is_public):
            self._note(PREDICTION, 1)
        self._predictions += 1
        try:
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._predictions -= 1
            self._renew_report()

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as ``Trainer`` does; a call by a program counts as an evaluation."""
        outer = self._evaluating is None and not self._predictions
        public = self._eval_is_public and getattr(dataloader, "dataset", None) is self.eval_dataset
        if outer and not public:
            self._note(EVALUATION_DURING if self.is_in_train else EVALUATION_OUTSIDE, 1)
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            if outer:
                self._renew_report()

    @property
    def _eval_is_public(self) -> bool:
        return bool(getattr(self, "eval_is_public", False))

    def _note(self, what: str, count: int) -> None:
        """Count a disclosure, including one from before the ledger was opened."""
        if self.ledger is None:
            self._noted_before[what] += count
        else:
            self.disclose(what, count)

    @property
    def _noted_before(self) -> Counter[str]:
        return self.__dict__.setdefault("_noted_before_the_ledger", Counter())

    def _note_outlets(self, ledger: SharedLedger) -> None:
        """Write the destinations of figures, the declarations and the earlier outputs into an open ledger."""
        ledger.append_fact(DESTINATIONS, receivers(self.callback_handler.callbacks))
        self.sources.note(ledger, self.model, self.plan)
        for point in self.declared_points:
            ledger.append_open_point(point)
        for name in own_callbacks(self.callback_handler.callbacks):
            ledger.append_open_point(
                f"The callback {name} runs within training, where it can read losses of private rows: make sure that "
                "neither learning rate, nor weights, nor the end of training follow them."
            )
        for name in own_methods(self):
            ledger.append_open_point(
                f"The method {name} of a Trainer of one's own runs within training, where it can read losses of "
                "private rows: make sure that neither learning rate, nor weights, nor the end of training follow them."
            )
        for name in own_metrics(self):
            ledger.append_open_point(
                f"The function {name} computes metrics within training, where it reads losses or outputs of private "
                "rows: make sure that neither learning rate, nor weights, nor the end of training follow them."
            )
        for what, count in self._noted_before.items():
            ledger.append_disclosure(what, count)
        self._noted_before.clear()

    def _renew_report(self) -> None:
        """Write the report and card of a finished run again, because something was counted after they were made."""
        if self.ledger is None or self.is_in_train or not self.processes.is_main:
            return
        folder = self.ledger.path.parent
        contents = read_ledger(self.ledger.path)
        if contents.end is not None:
            self._write_guarantee(folder, with_card=(folder / CARD_FILE).is_file())

    # --------------------------------------------------------- report and card

    def _write_guarantee(self, folder: Path, with_card: bool = True, trained: Any = None, **metadata: Any) -> None:
        """Write plan, ledger so far, report and card beside the model; for one process.

        Additions of people or of an audit to the folder's report are kept, unless `notes` replaces them.

        Args:
            folder: of the model.
            with_card: whether to write the card.
            trained: the model in the folder. None: the Trainer's.
            metadata: as for `StartingModel.write_card`.
        """
        assert self.ledger is not None
        folder.mkdir(parents=True, exist_ok=True)
        opened = self.ledger if folder.resolve() == self.ledger.path.parent.resolve() else None
        if opened is None:
            self.plan.save(folder / PLAN_FILE)
            (folder / LEDGER_FILE).write_bytes(self.ledger.path.read_bytes())
        notes = self._notes_for(folder)  # first: its findings are open points of this report
        report = write_report(folder, self.plan, read_ledger(self.ledger.path), notes, opened=opened)
        if with_card:
            model = self.model if trained is None else trained
            self._start.write_card(folder, report, model, ledger=opened, **metadata)

    def _notes_for(self, folder: Path) -> ReleaseNotes:
        assert self.ledger is not None
        if folder.resolve() != self.ledger.path.parent.resolve():  # another run may have been saved there
            return self.notes
        try:
            earlier = notes_in(folder)
        except (ValueError, OSError):  # the report is written anyway, and states the notes it lacks
            self.ledger.append_open_point(LOST_NOTES)
            return self.notes
        fields = (item.name for item in dataclasses.fields(ReleaseNotes))
        return dataclasses.replace(
            self.notes, **{name: getattr(earlier, name) for name in fields if not getattr(self.notes, name)}
        )

    @property
    def _is_adapter(self) -> bool:
        return isinstance(self.model, PeftModel)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write the model card with the guarantee (`dpllm.report.model_card`) into the folder, from the ledger so far.

        The Trainer's own card lists training and evaluation losses, which ε does not cover, and no guarantee.

        Args:
            language: ISO code.
            license: the Hub's identifier.
            tags: tags in addition to those of dpllm.
            model_name: not used; the card says "this model".
            finetuned_from: the base model's Hub id. None: the name under which it was loaded.
            tasks: refused, like all arguments for ``model-index``.
            dataset_tags: public data sets' Hub ids, for the metadata.
            dataset: the same.
            dataset_args: refused.

        Raises:
            ValueError: before `train`, or one of the refused arguments.
        """
        del model_name
        refused = [name for name, value in (("tasks", tasks), ("dataset_args", dataset_args)) if value]
        if refused:
            raise ConfigError(
                f"create_model_card({refused[0]}=...) is for a card's evaluation results, which ε does not cover. "
                "Leave it out; figures for the report go into DPTrainer.notes"
            )
        if self.ledger is None:
            raise ValueError("There is no guarantee for a card before train(): call it first.")
        if not self.processes.is_main:
            return
        keep_own_card(Path(str(self.args.output_dir)))
        self._write_guarantee(
            Path(str(self.args.output_dir)),
            base_model=finetuned_from,
            language=language,
            license=license,
            tags=_listed(tags),
            datasets=[*_listed(dataset_tags), *_listed(dataset)],
        )

    # ------------------------------------------------------------------ uploads

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository of ``hub_model_id`` if it does not exist; with ``push_to_hub`` before any step.

        Raises:
            ConfigError: its name cannot be one of the Hub's, or there is no token.
        """
        if not self.is_world_process_zero():
            return
        name = self.args.hub_model_id or Path(str(self.args.output_dir)).absolute().name
        try:
            validate_repo_id(name)
            if HF_HUB_OFFLINE and self.ledger is None:  # an upload comes later, if ever
                logger.warning("HF_HUB_OFFLINE is set: whether %s can be uploaded to was not checked", name)
                return
            url = HfApi().create_repo(
                name,
                token=token if token is not None else self.args.hub_token,
                private=private if private is not None else self.args.hub_private_repo,
                exist_ok=True,
            )
        except HFValidationError as error:
            raise ConfigError(
                f"train.hub_model_id: {name!r} is no name of the Hub: write owner/name, of letters, digits, '-', '_' "
                "and '.'"
            ) from error
        except LocalTokenNotFoundError as error:
            raise ConfigError(
                f"train.push_to_hub: there is no token for {name}: log in with `hf auth login`, or set HF_TOKEN"
            ) from error
        self.hub_model_id, self.push_in_progress = url.repo_id, None

    def push_to_hub(  # type: ignore[override]  # the Trainer swallows any keyword
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        *,
        force_open_points: bool = False,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
    ) -> Any:
        """Save the model with its guarantee, and upload it: weights, tokenizer, card, report, plan and ledger only.

        No other file of the folder is uploaded (`dpllm.report.publishing.files_to_publish`). Called by all processes
        together.

        Args:
            commit_message: message of the commit.
            blocking: whether to wait for the upload.
            token: token for the Hub. None: ``hub_token``.
            revision: the branch; None: ``hub_revision``.
            private: whether a new repository is visible to its owner only.
            force_open_points: upload although points of the report are open; the card lists them.
            language: as for `create_model_card`.
            license: as for `create_model_card`.
            tags: as for `create_model_card`.
            model_name: as for `create_model_card`.
            finetuned_from: as for `create_model_card`.
            dataset_tags: as for `create_model_card`.
            dataset: as for `create_model_card`.

        Returns:
            The commit, or its future if not ``blocking``; None on all processes except the first.

        Raises:
            PublishError: an open point, a run that is not private, a failed audit, files that contradict each other.
        """
        if self.ledger is None:
            raise PublishError("There is nothing to publish before train(): call it first; a model needs its guarantee")
        folder = Path(str(self.args.output_dir))
        self._save_whole(folder)
        self.create_model_card(
            language=language,
            license=license,
            tags=tags,
            model_name=model_name,
            finetuned_from=finetuned_from,
            dataset_tags=dataset_tags,
            dataset=dataset,
        )

        def checked() -> list[str]:
            require_publishable(folder, force_open_points=force_open_points)
            vocabulary = getattr(self.processing_class, "vocab_files_names", None) or {}
            adapters = self.model.peft_config if isinstance(self.model, PeftModel) else ()
            found = files_to_publish(
                folder, adapter=self._is_adapter, vocabulary=vocabulary.values(), adapters=adapters
            )
            note_uploaded(folder, found, self.ledger)
            return found

        names = self.processes.from_main(checked)
        if not self.is_world_process_zero():
            return None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        assert self.hub_model_id is not None
        logger.warning("uploading to %s: %s", self.hub_model_id, ", ".join(names))
        return upload(
            folder,
            names,
            self.hub_model_id,
            message=commit_message or "End of training",
            token=token if token is not None else self.args.hub_token,
            revision=revision if revision is not None else self.args.hub_revision,
            blocking=blocking,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload nothing during training: the report is not complete, and checkpoints hold more than ε covers."""
        del checkpoint_folder

    def _save_whole(self, folder: Path) -> None:
        """Save the whole model with its guarantee; on all processes."""
        raise NotImplementedError


def _count_from(logs: dict[str, float], seconds: float) -> None:
    """Replace the running time of a training by that of its steps, and its rates with it.

    The Trainer also counts what callbacks do before the first step, such as the evaluation before a recipe's training.
    """
    if seconds <= 0:
        return
    share = logs["train_runtime"] / seconds
    for name in logs:
        if name.startswith("train_") and name.endswith("_per_second"):
            logs[name] = round(logs[name] * share, 3)
    logs["train_runtime"] = round(seconds, 4)


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
