"""The plan of a PATE run and its inputs: private records, public texts, and the public parameters of the vote.

Nothing is trained or charged here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import datasets

from dpllm.config import ConfigError, DataConfig, ModelConfig, RecordFormat
from dpllm.config.formats.catalogue import TextFormat, formats_of
from dpllm.config.formats.record_format import Completion, Text, TextLabel
from dpllm.config.query_recipe import QueryRecipe
from dpllm.data.records import load_records, load_train_and_eval
from dpllm.data.rows import num_labels_of, unit_index_of
from dpllm.data.shared_records import (
    refuse_private_parts,
    refuse_shared_held_out,
    refuse_shared_records,
    shared_records_point,
)
from dpllm.methods.pate.votes import LABELS, TOKENS, Vote
from dpllm.methods.queries.run import plan_from
from dpllm.methods.sections import PateConfig
from dpllm.models.starting_point import refuse_private_start
from dpllm.privacy.query_plan import QueryPlan, Value
from dpllm.training.arguments import check_optimizer, training_arguments

METHOD, TOKEN_METHOD = "public labels by PATE", "public completions by PATE"
TEACHERS, CLASSES, PROMPTS, THRESHOLD = "teachers", "classes", "public texts", "votes for a label, threshold"
NEW_TOKENS, CANDIDATES = "tokens of a text, at most", "candidates of a token"
TOKEN_THRESHOLD, PUBLIC_VOTES = "votes for a token, threshold", "votes of the public model"
"""Names of settings of the plan."""
QUIET = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "log_level": "error",  # the number of a teacher's rows would be logged, also with TRANSFORMERS_VERBOSITY=info
}
"""Options with which a training writes and shows nothing of its data."""
_KEYS = ("pate.public_prompts", "pate.max_shared_records")


@dataclass(frozen=True)
class Prepared:
    """Inputs and plan of a run before the first teacher is trained.

    Attributes:
        recipe: of the run.
        private: the private records.
        held_out: records to measure the student on; None without them.
        prompts: the public texts.
        prompts_data: how the public texts are read.
        num_classes: number of public classes; None if teachers vote on tokens.
        vote: the public numbers of the vote.
        plan: the plan.
        points: open points for the report.
    """

    recipe: QueryRecipe
    private: datasets.Dataset
    held_out: datasets.Dataset | None
    prompts: datasets.Dataset
    prompts_data: DataConfig
    num_classes: int | None
    vote: Vote
    plan: QueryPlan
    points: tuple[str, ...]

    @property
    def options(self) -> PateConfig:
        """The section ``pate``."""
        options = self.recipe.options
        assert isinstance(options, PateConfig)
        return options

    @property
    def model(self) -> ModelConfig:
        """The section ``model``."""
        assert self.recipe.model is not None, "check_teaching has seen to it"
        return self.recipe.model

    @property
    def tokens(self) -> bool:
        """Whether teachers vote on tokens instead of classes."""
        return self.num_classes is None

    @property
    def new_tokens(self) -> int:
        """T, the most tokens after a public text."""
        return self.options.max_new_tokens or 0


def check_teaching(recipe: QueryRecipe) -> None:
    """Check a recipe without reading records.

    Raises:
        ConfigError: format, task and options match neither classes nor tokens, or a training option is wrong.
    """
    options = recipe.options
    assert isinstance(options, PateConfig)
    if options.public_prompts is None:
        raise ConfigError(
            "pate.public_prompts is missing: name the file of public texts, without labels, that the teachers label"
        )
    if recipe.model is None:
        raise ConfigError("dpllm methods pate needs the section model: the public model that every teacher starts from")
    _check_kind(recipe.model.task, recipe.data.form, options)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "dpllm methods pate trains one teacher after the other in one process: start it without a launcher"
        )
    refuse_private_start(recipe.model.name, recipe.model.start_is_independent)
    for section in (options.train, options.student_train or {}):
        check_optimizer(training_arguments({**section, **QUIET, "output_dir": recipe.output_dir}))


def _check_kind(task: str, form: RecordFormat, options: PateConfig) -> None:
    """Check that task, format and options are all for classes or all for tokens."""
    if task == "sequence_classification" and form.holds is TextLabel:
        if options.max_new_tokens is not None:
            raise ConfigError(
                f"pate.max_new_tokens={options.max_new_tokens} is for completions, and teachers of this recipe vote "
                "for a class of a text: leave it out, or set model.task=causal_lm and data.format=text"
            )
    elif task == "causal_lm" and form.holds in (Text, Completion):
        if options.max_new_tokens is None:
            raise ConfigError(
                "pate.max_new_tokens is missing: teachers vote for each token after a public text, and all of them "
                "are charged. Set their largest number"
            )
    else:
        raise ConfigError(
            f"model.task={task!r}, data.format={form.name!r}: teachers vote for a class of a text, or for its next "
            f"tokens. Set model.task=sequence_classification and data.format={' or '.join(formats_of(TextLabel))}, or "
            f"model.task=causal_lm and data.format={' or '.join(formats_of(Text, Completion))}"
        )


def prepare(recipe: QueryRecipe) -> Prepared:
    """Read the records and the public texts, and plan the run.

    Raises:
        ConfigError: `check_teaching` refuses the recipe, the number of classes is unknown, or there are fewer units
        than
            teachers.
        DataError: records or texts cannot be used, or the public texts hold private records.
        ValueError: no noise reaches the target ε.
    """
    check_teaching(recipe)
    options = recipe.options
    assert isinstance(options, PateConfig) and recipe.model is not None
    private, held_out = load_train_and_eval(recipe.data, recipe.privacy)
    num_classes = None if recipe.model.task == "causal_lm" else _num_classes(recipe.model, private, recipe.data)
    num_units = unit_index_of(private, recipe.privacy).num_units
    if options.teachers > num_units:
        raise ConfigError(
            f"pate.teachers={options.teachers} for {num_units} units: a teacher needs at least one unit. Take fewer "
            "teachers"
        )
    prompts_data = prompts_of(recipe)
    prompts = load_records(prompts_data)
    most = options.max_shared_records  # they would be published with their labels
    refuse_shared_records(private, recipe.data, prompts, prompts_data, most, _KEYS, recipe.privacy)
    refuse_shared_held_out(held_out, recipe.data, prompts, prompts_data, most, _KEYS)
    refuse_private_parts(recipe, private, held_out)
    places, answers = len(prompts), LABELS
    if num_classes is None:
        places, answers = len(prompts) * (options.max_new_tokens or 0), TOKENS
    vote = Vote(places, options.threshold, options.max_answers, options.check_noise, answers)
    method, settings = METHOD, settings_of(options, vote, num_classes or 0)
    if num_classes is None:
        method, settings = TOKEN_METHOD, token_settings_of(options, vote, len(prompts))
    plan = plan_from(recipe, method, num_units, vote.charges, settings=settings)
    points = tuple(shared_records_point(options.max_shared_records, prompts_data, _KEYS))
    return Prepared(recipe, private, held_out, prompts, prompts_data, num_classes, vote, plan, points)


def _num_classes(model: ModelConfig, private: datasets.Dataset, data: DataConfig) -> int:
    """Return the public number of classes.

    Raises:
        ConfigError: neither recipe nor data set names it.
    """
    found = model.num_labels or num_labels_of(private, data)
    if found is None:
        raise ConfigError(
            "the number of classes is not known: set model.num_labels, or name the classes as data.class_names. They "
            "are public facts; the private labels are not counted"
        )
    return found


def prompts_of(recipe: QueryRecipe) -> DataConfig:
    """Return how the public texts are read: one text for each record, cut to the length of the private ones."""
    options, data = recipe.options, recipe.data
    return DataConfig(
        path=options.public_prompts,
        split=options.prompts_split,
        max_length=data.max_length,
        format=TextFormat.name,
        columns={"text": options.prompts_column or data.form.texts[0]},
        limit=options.max_prompts,
        encoding=data.encoding,
    )


def settings_of(options: PateConfig, vote: Vote, num_classes: int) -> list[tuple[str, Value]]:
    """Return the public parameters of the vote on labels, by name, for plan and report."""
    settings: list[tuple[str, Value]] = [
        (TEACHERS, options.teachers),
        (CLASSES, num_classes),
        (PROMPTS, vote.num_prompts),
        ("labels at most", vote.most_labels),
    ]
    if vote.threshold is not None:
        settings += [
            (THRESHOLD, vote.threshold),
            ("noise of a check over that of a label", vote.check_noise),
        ]
    return settings


def token_settings_of(options: PateConfig, vote: Vote, num_prompts: int) -> list[tuple[str, Value]]:
    """Return the public parameters of the vote on tokens, by name, for plan and report."""
    settings: list[tuple[str, Value]] = [
        (TEACHERS, options.teachers),
        (PROMPTS, num_prompts),
        (NEW_TOKENS, options.max_new_tokens or 0),
        ("tokens by vote, at most", vote.most_labels),
        (CANDIDATES, "all tokens" if options.candidates is None else options.candidates),
        ("temperature of teachers and public model", options.temperature),
        (PUBLIC_VOTES, options.public_votes),
    ]
    if vote.threshold is not None:
        settings += [
            (TOKEN_THRESHOLD, vote.threshold),
            ("noise of a check over that of a token", vote.check_noise),
        ]
    return settings
