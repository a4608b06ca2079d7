"""The plan that all runs of a private tuning share.

Place in the flow: before the draws. Each run is one execution of the same randomised algorithm, so all candidates must
have the same privacy event on the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dpllm.config import ConfigError, Recipe
from dpllm.data.rows import load_train_and_eval, unit_index_of
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.arguments import plan_for, training_arguments
from dpllm.training.preflight import check_recipe, to_plan

_SAME = (
    *("history", "event", "num_steps", "delta", "adjacency", "unit", "unit_column", "num_units"),
    *("max_rows_per_unit", "rows_kept", "sampling", "num_examples", "dataset"),
)


def common_plan(recipes: Sequence[Recipe], words: Callable[[int], str]) -> PrivacyPlan:
    """Return the plan of the first recipe, after checking that all have the same event on the same data.

    Args:
        recipes: of all candidates.
        words: a function from the number of a candidate to its description.

    Raises:
        ConfigError: a candidate could not be trained, or costs something else than the first one.
    """
    privacy = recipes[0].privacy
    records, held_out = load_train_and_eval(recipes[0].data, privacy)
    if held_out is None:
        raise ConfigError(
            "a tuning compares its runs on held-out rows, and the recipe has none: set data.eval_path or "
            "data.eval_split to rows that are public, and data.eval_is_public=true"
        )
    units, first = unit_index_of(records, privacy), None
    for number, recipe in enumerate(recipes):
        try:
            check_recipe(recipe, to_train=False)
            arguments = training_arguments(to_plan(recipe.train))
            plan = plan_for(arguments, recipe.privacy, units, average=recipe.train.get("average"))
        except ValueError as error:
            raise ConfigError(f"the candidate {words(number)}: {error}") from error
        first = first or plan
        differing = [name for name in _SAME if _of(plan, name) != _of(first, name)]
        if differing:
            raise ConfigError(
                f"the candidate {words(number)} differs from {words(0)} in {', '.join(differing)} of its plan: all "
                "runs of a tuning need the same noise, sampling and number of steps, since ε is that of any of them. "
                "Leave it out, or tune it in a tuning of its own"
            )
    assert first is not None
    return first


def _of(plan: PrivacyPlan, name: str) -> object:
    value = getattr(plan, name)
    if name == "event":  # its clip norm does not change ε
        return value.rounds(plan.num_steps)
    return [(event.rounds(count)) for event, count in value] if name == "history" else value
