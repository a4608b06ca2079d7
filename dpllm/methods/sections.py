"""The sections of recipes that the methods add: `count`, `federated`, `predict`, `evolve`, `pate` and `aggregate`.

`dpllm.registry` loads each by its place. All values are public. Nothing in ``federated`` changes ε: the guarantee is in
``privacy``, whose ``noise`` says who adds the noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from dpllm.config.sections import Count, Number, OneOf, OwnFile, Share, Text, Whole, section
from dpllm.config.train_values import check_train, refuse_own
from dpllm.config.values import ConfigError, nearest, shown


@section
class CountConfig:
    """How the records of each class are counted. The classes are ``data.class_names``, in ``data.columns.label``."""

    file: Annotated[Text, OwnFile(".json")] = "counts.json"
    """Name of the released file, in the run's folder."""


OPTIMIZERS = ("sgd", "adam")
LORA = ("freeze_a", "alternate")


@section
class FederatedConfig:
    """How clients train and how the server updates the weights."""

    local_steps: Count = 8
    """Steps of a client in a round, each over train.per_device_train_batch_size of its rows."""
    local_learning_rate: Annotated[Number, Field(gt=0)] = 0.1
    """Learning rate of a client; that of the server is train.learning_rate."""
    local_optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "sgd"
    """sgd or adam; a client begins it again in each round."""
    server_optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "sgd"
    """sgd or adam, on the noisy mean of the updates."""
    server_momentum: Share = 0.0
    """Momentum of the server's sgd."""
    lora: Annotated[str, OneOf(LORA)] = "freeze_a"
    """With an adapter: freeze_a trains its factor B only; alternate trains B in even rounds and A in odd ones. The
    average of both factors is not the average of their products."""
    simulated_dropouts: Share = 0.0
    """Probability with which a simulated client leaves a round before its end."""

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if self.server_momentum and self.server_optimizer != "sgd":
            raise ConfigError(f"server_momentum={self.server_momentum:g} belongs to server_optimizer=sgd: leave it out")


PREDICTIONS = ("invisible-ink", "logits")
MAX_TEMPERATURE = 100.0
MAX_LOGIT_CLIP = 1e4
_MOST_TOKENS = 1_000_000


@section
class PredictConfig:
    """How texts are made from private records.

    The noise multiplier of a token is s τ/c. One of `group_size`, `temperature` and `clip` may follow from the noise:
    the first that is left out, in the order clip, group_size, temperature for "invisible-ink", and group_size,
    temperature, clip for "logits". The others have defaults: 8, 1 and, for "logits", a temperature of 2 and a clip
    of 10.
    """

    kind: Annotated[str, OneOf(PREDICTIONS)] = "invisible-ink"
    """The quantity that is clipped: invisible-ink, the difference to the logits of the model without a record
    (arXiv:2507.02974), or logits, a record's logits themselves (arXiv:2407.12108)."""
    texts: Annotated[Count, Field(le=_MOST_TOKENS)] = 20
    """The number of texts. More than one text of each group costs more; `dpllm plan` says how many cost the same."""
    max_new_tokens: Annotated[Count, Field(le=_MOST_TOKENS)] = 64
    """T: the most tokens of a text. All of them are charged, however long the texts become."""
    group_size: Count | None = None
    """s: the units whose logits are averaged for a text."""
    temperature: Annotated[Number, Field(ge=1e-6, le=MAX_TEMPERATURE)] | None = None
    """τ: the sum is divided by it before the softmax."""
    clip: Annotated[Number, Field(ge=1e-6, le=MAX_LOGIT_CLIP)] | None = None
    """c: the most that one unit adds to the logit of a token, or takes off it, before the division by s."""
    top_k: Count | None = 50
    """Draw only from the model's k likeliest tokens without a record, and those within 2c/s of them; costs no ε.
    null: from all tokens."""
    context: Text | None = None
    """The text before the prompt for one record, with names of columns in braces, such as "Review: {text}". null: the
    text columns of data, and an end of line. A context longer than data.max_length tokens loses its end."""
    public_context: str = ""
    """The same for the model without a record."""
    prompts: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: [""])
    """Public beginnings of the texts, used in turn."""
    stop: Annotated[str, Field(min_length=1)] | None = "\n"
    """A text ends before this. null: only where the model ends it."""
    rows_per_pass: Count = 32
    """The most records of one forward pass; fewer need less memory."""
    cached: bool = True
    """Keep keys and values of all records of a group in memory. false: compute them again for every token."""
    file: Annotated[Text, OwnFile(".jsonl")] = "texts.jsonl"
    """Name of the released file, in the run's folder."""


FILE_FORMATS = ("jsonl", "parquet")
_LABEL_PLACE = "{label}"
_Most = Annotated[Count, Field(le=1_000_000)]
_Part = Annotated[Number, Field(ge=0, le=1)]


@section
class EvolveConfig:
    """The texts of an evolution: how many, after which prompts, how they are drawn, and how the evolution goes."""

    number: _Most = 200
    """Texts of the result."""
    prompts: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: [""])
    """Public beginnings of the texts, which share them evenly; one with {label} if there are classes."""
    classes: Annotated[list[Text], Field(min_length=2)] | None = None
    """Public classes of the records. A record votes among texts of its own class; the classes share the texts
    evenly."""
    label_column: Text | None = None
    """Column of the private records that holds the class; needed with classes."""
    max_new_tokens: _Most = 64
    """The most tokens of a text after its prompt."""
    temperature: Annotated[Number, Field(gt=0, le=100)] = 1.0
    """1 draws from the model's own distribution."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens with this much probability together."""
    file_format: Annotated[str, OneOf(FILE_FORMATS)] = "jsonl"
    """Of the file of texts: jsonl or parquet."""
    steps: Annotated[Count, Field(le=10_000)] = 10
    """T: histograms of votes. Each costs privacy."""
    variations: Annotated[Count, Field(le=1000)] = 3
    """Variations of each kept text that are candidates of the next step, in addition to the text itself."""
    keep_from: _Part = 0.2
    """A variation keeps at least this share of the words of a text, from its beginning."""
    keep_to: _Part = 0.8
    """A variation keeps at most this share."""
    embedding: Text | None = None
    """Public model whose embeddings decide which text is nearest: a folder or a Hub id. null: model.name."""
    batch_size: Count = 32
    """The most texts that are made together."""

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if self.keep_from > self.keep_to:
            raise ConfigError(
                f"keep_from={self.keep_from:g} is above keep_to={self.keep_to:g}: a variation keeps a share between "
                "them"
            )
        if self.classes is None:
            if self.label_column is not None:
                raise ConfigError("label_column needs classes: list all public classes, or leave it out")
            return
        if len(set(self.classes)) < len(self.classes):
            raise ConfigError(f"classes must be at least two different names, got {self.classes!r}")
        if self.label_column is None:
            raise ConfigError("classes needs label_column, the column of the records that holds the class")
        if len(self.prompts) != 1 or _LABEL_PLACE not in self.prompts[0]:
            raise ConfigError(f"prompts must be one prompt with {_LABEL_PLACE} for all classes, got {self.prompts!r}")


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


QUESTION_KINDS = ("number", "choice", "open")
_FARTHEST = 1e12
_MOST_GROUPS = 1_000_000
_Bound = Annotated[Number, Field(ge=-_FARTHEST, le=_FARTHEST)]


def _answers(given: Any) -> Any:
    if given is None:
        return None
    listed = list(given) if isinstance(given, list | tuple) else []
    if len(listed) < 2 or not all(isinstance(one, str) and one.strip() for one in listed):
        raise ValueError("must be a list of two texts or more")
    return tuple(listed)


@section
class Question:
    """A question, and how the groups' answers are combined.

    Raises:
        ConfigError: a value is missing, of the wrong kind or out of range.
    """

    name: Text
    """Of the answer, in plan, report and file: a few words."""
    ask: Text
    """The text after the records of a group; the model continues it, or answers it."""
    kind: Annotated[str, OneOf(QUESTION_KINDS)]
    """number: the mean of numbers in a public range. choice: how many groups find each of the listed answers the
    likeliest. open: answers of a few words that many groups give."""
    low: _Bound | None = None
    """number: the smallest number that counts; smaller ones count as this."""
    high: _Bound | None = None
    """number: the largest number that counts."""
    answers: Annotated[tuple[str, ...] | None, BeforeValidator(_answers)] = None
    """choice: all answers."""

    def __post_init__(self) -> None:
        """Check that a question has the values of its kind and no others."""
        if self.name != " ".join(self.name.split()):
            raise ConfigError(f"a question has a name of one line, got {shown(self.name)}")
        for names, kind in ((("low", "high"), "number"), (("answers",), "choice")):
            for name in names:
                if (getattr(self, name) is None) == (self.kind == kind):
                    verb = "needs" if self.kind == kind else "has no"
                    raise ConfigError(f"question {self.name!r} of the kind {self.kind!r} {verb} {name}")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ConfigError(f"question {self.name!r}: low={self.low:g} must be below high={self.high:g}")
        if self.answers is not None and len(set(self.answers)) < len(self.answers):
            raise ConfigError(f"question {self.name!r} lists an answer twice: {shown(self.answers)}")

    @classmethod
    def of(cls, value: Any, number: int) -> Question:
        """Return a question from a mapping of a recipe.

        Raises:
            ConfigError: it is no mapping, or a key is unknown or missing.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"question {number} must be a mapping with name, ask and kind, got {shown(value)}")
        known = [item.name for item in dataclasses.fields(cls)]
        for key in value:
            if key not in known:
                raise ConfigError(
                    f"question {number}: unknown key {key!r}{nearest(str(key), known)} Known here: {', '.join(known)}"
                )
        for key in ("name", "ask", "kind"):
            if value.get(key) is None:
                raise ConfigError(f"question {number}: missing key {key!r}; it has no default")
        try:
            return cls(**value)
        except ConfigError as error:
            words = str(error)
            raise ConfigError(words if "question" in words else f"question {number}: {words}") from error


def _questions(given: Any) -> Any:
    if not isinstance(given, list):
        raise ValueError("must be a list")
    made = [Question.of(value, number) for number, value in enumerate(given, 1)]
    names = [question.name for question in made]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two questions have the name {repeated[0]!r}: give each its own")
    return made


@section
class AggregateConfig:
    """How groups of private records answer questions.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    groups: Annotated[Whole, Field(ge=2, le=_MOST_GROUPS)] = 200
    """m: the number of groups. A unit is in one at most. More groups have less noise, and need more time."""
    group_size: Count = 4
    """s: the units of a group, whose records the model reads together."""
    questions: Annotated[list[Any], BeforeValidator(_questions)] = Field(default_factory=list)
    """Each a mapping with name, ask, kind, and the values of its kind: number (low, high), choice (answers) or open.
    Every one costs privacy."""
    max_new_tokens: Annotated[Count, Field(le=10_000)] = 16
    """The most tokens of an answer that the model writes."""
    max_words: Annotated[Count, Field(le=100)] = 3
    """The most words of an answer to an open question that count."""
    context: Text | None = None
    """The text for one record, with names of columns in braces, such as "Review: {text}\\n". null: the text columns of
    data, and an end of line. A text longer than data.max_length tokens loses its end."""
    opening: str = ""
    """Public text before the records of a group."""
    rows_per_pass: Count = 16
    """The most groups of one forward pass; fewer need less memory."""
    cached: bool = True
    """Keep keys and values of a pass in memory. false: compute them again for every token."""
    file: Annotated[Text, OwnFile(".json")] = "answers.json"
    """Name of the released file, in the run's folder."""
