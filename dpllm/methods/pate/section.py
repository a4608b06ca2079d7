"""The section ``pate`` of a recipe: teachers on disjoint units, public texts that they vote on, and a student.

Place in the flow: a method section of `dpllm.config.query_recipe`; `dpllm.methods.pate` carries it out.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from dpllm.config.sections import Count, Number, Text, Whole, section
from dpllm.config.train_values import check_train, refuse_own
from dpllm.config.values import ConfigError

MOST_TEACHERS = 100_000
MOST_TOKENS = 1_000_000
SET_BY_PATE = (
    *("output_dir", "save_strategy", "eval_strategy", "logging_strategy", "report_to", "disable_tqdm", "seed"),
    *("data_seed", "push_to_hub", "load_best_model_at_end", "resume_from_checkpoint", "trainer"),
    *("log_level", "log_level_replica", "debug"),
)
"""Options of trainings that `dpllm methods pate` sets: a teacher's losses, checkpoints and rows are private."""


def _check_training(name: str, section: Any) -> None:
    """Check the options of a training without privacy.

    Raises:
        ConfigError: a value cannot be used, or the command sets the option itself.
    """
    check_train(name, section)
    refuse_own(name, section)
    for key in SET_BY_PATE:
        if key in section:
            raise ConfigError(
                f"{name}.{key} is set by dpllm methods pate: a teacher's losses, checkpoints and rows are private, "
                "and are neither written nor shown. Leave it out"
            )


def _training(name: str) -> Any:
    """Return the validator of a section of a training without privacy."""

    def check(given: Any) -> Any:
        if given is not None:
            _check_training(name, given)
        return given

    return BeforeValidator(check)


@section
class PateConfig:
    """The teachers and their trainings, the public texts, the vote, and the student."""

    teachers: Annotated[Whole, Field(ge=2, le=MOST_TEACHERS)] = 50
    """k: number of teachers. Each learns from N/k units, which no other teacher sees. More teachers hide one better;
    fewer are better teachers."""
    train: Annotated[Any, _training("train")] = Field(default_factory=dict)
    """Names of TrainingArguments for the training of a teacher, which is ordinary and has no noise."""
    public_prompts: Text | None = None
    """File, folder or Hub name of texts that anyone may know, without labels or completions; needed. Private records in
    them are refused."""
    prompts_split: Text = "train"
    """Split of a Hub data set."""
    prompts_column: Text | None = None
    """Column of the text. null: data.columns.text, or data.columns.prompt for prompt_completion."""
    max_prompts: Count | None = None
    """Label or continue only this number of texts, from the first on. null: all. Each one costs privacy."""
    max_shared_records: Annotated[Whole, Field(ge=0)] = 0
    """Number of private records that may occur in the public texts and are declared public."""
    max_new_tokens: Annotated[Count, Field(le=MOST_TOKENS)] | None = None
    """The most tokens after a public text, each by a vote. It is needed for model.task: causal_lm, and is left out for
    classes. All of them are charged, also where a text ends before."""
    candidates: Annotated[Whole, Field(ge=2)] | None = 16
    """The public model names this number of tokens for each place, and teachers vote among them. null: all tokens."""
    temperature: Annotated[Number, Field(ge=0, le=100)] = 1.0
    """Teachers and public model draw their tokens at this temperature, with common random numbers; 0: the likeliest
    token. The same prompt then gives different texts, and similar teachers still agree."""
    public_votes: Annotated[Number, Field(ge=0, le=MOST_TEACHERS)] = 0.0
    """Votes that are added to the token of the public model. They cost nothing: it knows no record."""
    rows_per_pass: Count = 32
    """The most texts that are written side by side; every teacher keeps keys and values of all of them."""
    threshold: Annotated[Number, Field(ge=0)] | None = None
    """T, in votes: a text gets a label, or a token, only if its largest count, with noise, is T or more (confident
    GNMax). null: every text gets one. In place of a token, the public model's own is taken."""
    max_answers: Count | None = None
    """The most labels, or tokens by vote; there is no vote after them. The plan charges all of them. It is needed with
    threshold. Without one, it is for tokens only: texts are written until they are used."""
    check_noise: Annotated[Number, Field(gt=0, le=1000)] = 3.0
    """With threshold: the noise of the check, in standard deviations of the noise of a label."""
    student: bool = True
    """Whether a model is trained on the labelled or completed texts and released with them."""
    student_train: Annotated[Any, _training("student_train")] = None
    """Names of TrainingArguments for the student. null: those of train."""

    def __post_init__(self) -> None:
        """Check that the numbers of the check come with a threshold."""
        if self.threshold is None:
            if self.max_answers is not None and self.max_new_tokens is None:
                raise ConfigError("max_answers belongs to threshold: without one, every text is labelled; leave it out")
            return
        if self.threshold > self.teachers:
            raise ConfigError(f"threshold must be at most teachers={self.teachers}, got {self.threshold:g}")
        if self.max_answers is None:
            raise ConfigError(
                "threshold needs max_answers: how many votes pass the check depends on the private records, so the "
                "largest number of labels or tokens is fixed, and charged, beforehand"
            )
