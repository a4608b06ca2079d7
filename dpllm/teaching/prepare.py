"""The plan of a PATE run, and what it is made of: private records, public texts, and the public numbers of the vote.

Place in the flow: first, in `dpllm plan` and `dpllm teach`. Nothing is trained here and nothing is charged.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import datasets

from dpllm.config import ConfigError, DataConfig, ModelConfig
from dpllm.config.query_recipe import QueryRecipe
from dpllm.config.teach_section import TeachConfig
from dpllm.data.records import load_records, load_train_and_eval
from dpllm.data.rows import num_labels_of, unit_index_of
from dpllm.models.starting_point import refuse_private_start, refuse_shared_records, shared_records_point
from dpllm.privacy.query_plan import QueryPlan, Value
from dpllm.queries.planned import plan_from
from dpllm.teaching.trainings import QUIET
from dpllm.teaching.votes import Vote
from dpllm.training.arguments import check_optimizer, training_arguments

METHOD = "public labels by PATE"
TEACHERS, CLASSES, PROMPTS, THRESHOLD = "teachers", "classes", "public texts", "votes for a label, threshold"
"""Names of settings of the plan."""
_KEYS = ("teach.public_prompts", "teach.max_shared_records")


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before the first teacher is trained.

    Attributes:
        recipe: of the run.
        private: the private records.
        held_out: records to measure the student on; None without them.
        prompts: the public texts.
        prompts_data: how they are read.
        num_classes: number of public classes.
        vote: the public numbers of the vote.
        plan: the plan.
        points: open points for the report.
    """

    recipe: QueryRecipe
    private: datasets.Dataset
    held_out: datasets.Dataset | None
    prompts: datasets.Dataset
    prompts_data: DataConfig
    num_classes: int
    vote: Vote
    plan: QueryPlan
    points: tuple[str, ...]

    @property
    def options(self) -> TeachConfig:
        """The section ``teach``."""
        options = self.recipe.options
        assert isinstance(options, TeachConfig)
        return options

    @property
    def model(self) -> ModelConfig:
        """The section ``model``."""
        assert self.recipe.model is not None, "check_teaching has seen to it"
        return self.recipe.model


def check_teaching(recipe: QueryRecipe) -> None:
    """Check the parts of a recipe that need no records.

    Raises:
        ConfigError: the model is no classifier, the records have no classes, or an option of a training is wrong.
    """
    options = recipe.options
    assert isinstance(options, TeachConfig)
    if options.public_prompts is None:
        raise ConfigError(
            "teach.public_prompts is missing: name the file of public texts, without labels, that the teachers label"
        )
    if recipe.model is None:
        raise ConfigError("dpllm teach needs the section model: the public model that every teacher starts from")
    if recipe.model.task != "sequence_classification" or recipe.data.format != "classification":
        raise ConfigError(
            f"model.task={recipe.model.task!r}, data.format={recipe.data.format!r}: teachers vote for a class of a "
            "text. Set model.task=sequence_classification and data.format=classification"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("dpllm teach trains one teacher after the other in one process: start it without a launcher")
    refuse_private_start(recipe.model.name, recipe.model.start_is_independent)
    for section in (options.train, options.student_train or {}):
        check_optimizer(training_arguments({**section, **QUIET, "output_dir": recipe.output_dir}))


def prepare(recipe: QueryRecipe) -> Prepared:
    """Read the records and the public texts, and compute the plan.

    Raises:
        ConfigError: `check_teaching` refuses the recipe, the number of classes is not known, or there are fewer units
            than teachers.
        DataError: records or texts cannot be used, or the public texts hold private records.
        ValueError: no noise reaches the target ε.
    """
    check_teaching(recipe)
    options = recipe.options
    assert isinstance(options, TeachConfig) and recipe.model is not None
    private, held_out = load_train_and_eval(recipe.data, recipe.privacy)
    num_classes = recipe.model.num_labels or num_labels_of(private, recipe.data)
    if num_classes is None:
        raise ConfigError(
            "the number of classes is not known: set model.num_labels, or name the classes as data.class_names. They "
            "are public facts; the private labels are not counted"
        )
    num_units = unit_index_of(private, recipe.privacy).num_units
    if options.teachers > num_units:
        raise ConfigError(
            f"teach.teachers={options.teachers} for {num_units} units: a teacher needs at least one unit. Take fewer "
            "teachers"
        )
    prompts_data = prompts_of(recipe)
    prompts = load_records(prompts_data)
    refuse_shared_records(private, recipe.data, prompts, prompts_data, options.max_shared_records, _KEYS)
    if held_out is not None and not recipe.data.eval_is_public:  # they would be published with their labels
        refuse_shared_records(
            held_out, _held_out_data(recipe), prompts, prompts_data, options.max_shared_records, _KEYS
        )
    vote = Vote(len(prompts), options.threshold, options.max_answers, options.check_noise)
    plan = plan_from(recipe, METHOD, num_units, vote.charges, settings=settings_of(options, vote, num_classes))
    points = tuple(shared_records_point(options.max_shared_records, prompts_data, _KEYS))
    return Prepared(recipe, private, held_out, prompts, prompts_data, num_classes, vote, plan, points)


def _held_out_data(recipe: QueryRecipe) -> DataConfig:
    """Return the section of the held-out records, which names their file in a message."""
    data = recipe.data
    return dataclasses.replace(
        data, path=data.eval_path or data.path, eval_path=None, eval_split=None, eval_fraction=0.0
    )


def prompts_of(recipe: QueryRecipe) -> DataConfig:
    """Return how the public texts are read: as texts, one for each record, cut as the private ones."""
    options, data = recipe.options, recipe.data
    return DataConfig(
        path=options.public_prompts,
        split=options.prompts_split,
        max_length=data.max_length,
        format="text",
        text_column=options.prompts_column or data.text_column,
        limit=options.max_prompts,
        encoding=data.encoding,
    )


def settings_of(options: TeachConfig, vote: Vote, num_classes: int) -> list[tuple[str, Value]]:
    """Return the public numbers of the vote, by name, for plan and report."""
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
