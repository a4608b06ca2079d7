"""The section ``teach`` of a recipe: teachers on disjoint units, the public texts that they label, and a student.

Place in the flow: a method section of `dpllm.config.query_recipe`; `dpllm.teaching` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dpllm.config import values
from dpllm.config.topics import Topic
from dpllm.config.train_values import check_train, refuse_own
from dpllm.config.values import ConfigError

MOST_TEACHERS = 100_000
SET_BY_TEACH = (
    *("output_dir", "save_strategy", "eval_strategy", "logging_strategy", "report_to", "disable_tqdm", "seed"),
    *("data_seed", "push_to_hub", "load_best_model_at_end", "resume_from_checkpoint", "trainer"),
)
"""Options of the trainings that `dpllm teach` sets itself: a teacher's losses and checkpoints are private."""


@dataclass(frozen=True, kw_only=True)
class Teachers(Topic):
    """The teachers and their trainings."""

    teachers: int = 50
    """k: number of teachers. Each learns from N/k units, which no other teacher sees. More teachers hide one better;
    fewer are better teachers."""
    train: dict[str, Any] = field(default_factory=dict)
    """Names of `TrainingArguments` for the training of a teacher, which is ordinary and has no noise."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        values.integer("teachers", self.teachers, 2, MOST_TEACHERS)
        _check_training("train", self.train)


@dataclass(frozen=True, kw_only=True)
class PublicPrompts(Topic):
    """The public texts that get labels."""

    public_prompts: str | None = None
    """File, folder or Hub name of texts that anyone may know, without labels; needed. Private records in them are
    refused."""
    prompts_split: str = "train"
    """Split of a Hub data set."""
    prompts_column: str | None = None
    """Column of the text. None: ``data.text_column``."""
    max_prompts: int | None = None
    """Label only this number of texts, from the first on. None: all. Each one costs privacy."""
    max_shared_records: int = 0
    """Number of private records that may occur in the public texts and are declared public."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        if self.public_prompts is not None:
            values.text("public_prompts", self.public_prompts)
        values.text("prompts_split", self.prompts_split)
        if self.prompts_column is not None:
            values.text("prompts_column", self.prompts_column)
        if self.max_prompts is not None:
            values.integer("max_prompts", self.max_prompts, 1)
        values.integer("max_shared_records", self.max_shared_records, 0)


@dataclass(frozen=True, kw_only=True)
class TeachConfig(Teachers, PublicPrompts):
    """Teachers, public texts, the vote, and the student.

    Its keywords are those of `Teachers` and `PublicPrompts`, and these.
    """

    threshold: float | None = None
    """T, in votes: a text gets a label only if its largest count, with noise, is T or more (confident GNMax). None:
    every text gets one."""
    max_answers: int | None = None
    """With `threshold`: the most labels; no text is labelled after them. The plan charges all of them."""
    check_noise: float = 3.0
    """With `threshold`: the noise of the check, in standard deviations of the noise of a label."""
    student: bool = True
    """Whether a model is trained on the labelled texts and released with them."""
    student_train: dict[str, Any] | None = None
    """Names of `TrainingArguments` for the student. None: those of `train`."""

    def __post_init__(self) -> None:
        """Check every value, and that the numbers of the check come with a threshold."""
        super().__post_init__()
        values.flag("student", self.student)
        if self.student_train is not None:
            _check_training("student_train", self.student_train)
        self._set("check_noise", values.between("check_noise", self.check_noise, 0, 1000, above=True))
        if self.threshold is None:
            if self.max_answers is not None:
                raise ConfigError("max_answers belongs to threshold: without one, every text is labelled; leave it out")
            return
        self._set("threshold", values.between("threshold", self.threshold, 0, self.teachers))
        if self.max_answers is None:
            raise ConfigError(
                "threshold needs max_answers: how many texts pass the check depends on the private records, so the "
                "largest number of labels is fixed, and charged, beforehand"
            )
        values.integer("max_answers", self.max_answers, 1)


def _check_training(name: str, section: Any) -> None:
    """Check the options of a training without privacy.

    Raises:
        ConfigError: a value cannot be used, or the command sets the option itself.
    """
    check_train(name, section)
    refuse_own(name, section)
    for key in SET_BY_TEACH:
        if key in section:
            raise ConfigError(
                f"{name}.{key} is set by dpllm teach: a teacher's losses and checkpoints are private, and are neither "
                "written nor shown. Leave it out"
            )
