"""The section ``teach`` of a recipe: teachers on disjoint units, public texts that they vote on, and a student.

Place in the flow: a method section of `dpllm.config.query_recipe`; `dpllm.methods.pate` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dpllm.config import values
from dpllm.config.topics import Topic
from dpllm.config.train_values import check_train, refuse_own
from dpllm.config.values import ConfigError

MOST_TEACHERS = 100_000
MOST_TOKENS = 1_000_000
SET_BY_TEACH = (
    *("output_dir", "save_strategy", "eval_strategy", "logging_strategy", "report_to", "disable_tqdm", "seed"),
    *("data_seed", "push_to_hub", "load_best_model_at_end", "resume_from_checkpoint", "trainer"),
    *("log_level", "log_level_replica", "debug"),
)
"""Options of trainings that `dpllm methods pate` sets: a teacher's losses, checkpoints and rows are private."""


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
    """The public texts that get labels, or that are continued."""

    public_prompts: str | None = None
    """File, folder or Hub name of texts that anyone may know, without labels or completions; needed. Private records in
    them are refused."""
    prompts_split: str = "train"
    """Split of a Hub data set."""
    prompts_column: str | None = None
    """Column of the text. None: ``data.columns.text``, or ``data.columns.prompt`` for "prompt_completion"."""
    max_prompts: int | None = None
    """Label or continue only this number of texts, from the first on. None: all. Each one costs privacy."""
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
class VotedTokens(Topic):
    """The tokens with which teachers continue the public texts."""

    max_new_tokens: int | None = None
    """The most tokens after a public text, each by a vote. It is needed for ``model.task: causal_lm``, and is left out
    for classes. All of them are charged, also where a text ends before."""
    candidates: int | None = 16
    """The public model names this number of tokens for each place, and teachers vote among them. None: all tokens."""
    temperature: float = 1.0
    """Teachers and public model draw their tokens at this temperature, with common random numbers; 0: the likeliest
    token. The same prompt then gives different texts, and similar teachers still agree."""
    public_votes: float = 0.0
    """Votes that are added to the token of the public model. They cost nothing: it knows no record."""
    rows_per_pass: int = 32
    """The most texts that are written side by side; every teacher keeps keys and values of all of them."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        if self.max_new_tokens is not None:
            values.integer("max_new_tokens", self.max_new_tokens, 1, MOST_TOKENS)
        if self.candidates is not None:
            values.integer("candidates", self.candidates, 2)
        self._set("temperature", values.between("temperature", self.temperature, 0, 100))
        self._set("public_votes", values.between("public_votes", self.public_votes, 0, MOST_TEACHERS))
        values.integer("rows_per_pass", self.rows_per_pass, 1)


@dataclass(frozen=True, kw_only=True)
class TeachConfig(Teachers, PublicPrompts, VotedTokens):
    """Teachers, public texts, the vote, and the student.

    Its keywords are those of `Teachers`, `PublicPrompts` and `VotedTokens`, and these.
    """

    threshold: float | None = None
    """T, in votes: a text gets a label, or a token, only if its largest count, with noise, is T or more (confident
    GNMax). None: every text gets one. In place of a token, the public model's own is taken."""
    max_answers: int | None = None
    """The most labels, or tokens by vote; there is no vote after them. The plan charges all of them. It is needed with
    `threshold`. Without one, it is for tokens only: texts are written until they are used."""
    check_noise: float = 3.0
    """With `threshold`: the noise of the check, in standard deviations of the noise of a label."""
    student: bool = True
    """Whether a model is trained on the labelled or completed texts and released with them."""
    student_train: dict[str, Any] | None = None
    """Names of `TrainingArguments` for the student. None: those of `train`."""

    def __post_init__(self) -> None:
        """Check every value, and that the numbers of the check come with a threshold."""
        super().__post_init__()
        values.flag("student", self.student)
        if self.student_train is not None:
            _check_training("student_train", self.student_train)
        self._set("check_noise", values.between("check_noise", self.check_noise, 0, 1000, above=True))
        if self.max_answers is not None:
            values.integer("max_answers", self.max_answers, 1)
        if self.threshold is None:
            if self.max_answers is not None and self.max_new_tokens is None:
                raise ConfigError("max_answers belongs to threshold: without one, every text is labelled; leave it out")
            return
        self._set("threshold", values.between("threshold", self.threshold, 0, self.teachers))
        if self.max_answers is None:
            raise ConfigError(
                "threshold needs max_answers: how many votes pass the check depends on the private records, so the "
                "largest number of labels or tokens is fixed, and charged, beforehand"
            )


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
                f"{name}.{key} is set by dpllm methods pate: a teacher's losses, checkpoints and rows are private, "
                "and are neither written nor shown. Leave it out"
            )
