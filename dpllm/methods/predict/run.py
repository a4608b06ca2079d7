"""A private prediction from a recipe: its public numbers and plan, its groups, and one text after the other.

The plan needs the number of units and no record. All tokens are charged before a record reaches the model. A model that
does not load, has no room for the tokens, couples rows or does not fit into memory is refused before that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from dpllm.config import ConfigError
from dpllm.config.query_recipe import QueryRecipe
from dpllm.data.units import Int64Array
from dpllm.methods.predict.inputs import (
    PrivateRecords,
    load_public_model,
    model_section,
    read_records,
    require_independent_rows,
    require_memory,
    secret_groups,
)
from dpllm.methods.predict.sampler import GroupSampler, Scoring, TextLimits
from dpllm.methods.predict.token_draw import TokenDraw
from dpllm.methods.queries.run import QueryCommand, QueryRun, begin_from, plan_with
from dpllm.methods.sections import PredictConfig
from dpllm.privacy.calibration import least_noise
from dpllm.privacy.query_plan import QueryPlan, Value
from dpllm.training.screen import Phases

_ORDER = {
    "invisible-ink": ("clip", "group_size", "temperature"),
    "logits": ("group_size", "temperature", "clip"),
}
"""The first of these that the recipe leaves out is computed from the noise."""
_DEFAULTS = {
    "invisible-ink": {"group_size": 8, "temperature": 1.0},
    "logits": {"temperature": 2.0, "clip": 10.0},
}
_DIGITS = 6


@dataclass(frozen=True)
class TokenPlan:
    """Groups, clip and temperature, and the tokens that they are charged for.

    >>> from dpllm.methods.sections import PredictConfig
    >>> TokenPlan.of(PredictConfig(clip=0.5), 1000, 1, 16.0).scoring.temperature
    1.0
    """

    scoring: Scoring
    groups: int
    """Number of groups that make texts."""
    texts_of_group: int
    """The most texts of one group, all of which its units pay for."""
    max_new_tokens: int
    """T."""

    @property
    def tokens(self) -> int:
        """The tokens charged to each unit: the most that its group's texts may have."""
        return self.texts_of_group * self.max_new_tokens

    @property
    def event(self) -> TokenDraw:
        """The charge of one token."""
        return TokenDraw(noise_multiplier=self.scoring.noise_multiplier)

    @classmethod
    def of(cls, tokens: PredictConfig, num_units: int, texts_of_group: int, noise: float) -> TokenPlan:
        """Return the plan with this noise multiplier sτ/c, or slightly more where a number is rounded.

        Raises:
            ConfigError: all three numbers are given and result in less noise, or there are too few units.
        """
        given = {name: getattr(tokens, name) for name in _ORDER[tokens.kind]}
        free = next((name for name in _ORDER[tokens.kind] if given[name] is None), None)
        chosen = {
            name: value if value is not None or name == free else _DEFAULTS[tokens.kind][name]
            for name, value in given.items()
        }
        if free == "group_size":
            chosen[free] = max(1, math.ceil(noise * chosen["clip"] / chosen["temperature"] * (1 - 1e-12)))
        elif free == "clip":
            chosen[free] = _rounded(chosen["group_size"] * chosen["temperature"] / noise, math.floor)
        elif free == "temperature":
            chosen[free] = _rounded(noise * chosen["clip"] / chosen["group_size"], math.ceil)
        scoring = Scoring(
            clip=chosen["clip"],
            units=int(chosen["group_size"]),
            temperature=chosen["temperature"],
            around_public=tokens.kind == "invisible-ink",
            top_k=tokens.top_k,
        )
        if free is None and scoring.noise_multiplier < noise * (1 - 1e-9):
            raise ConfigError(
                f"predict.group_size, temperature and clip have the noise multiplier {scoring.noise_multiplier:.6g}, "
                f"and the privacy section asks for {noise:.6g}: leave {_ORDER[tokens.kind][0]} out, so that it follows "
                "from the noise, or take a larger group_size or temperature, or a smaller clip"
            )
        groups = math.ceil(tokens.texts / texts_of_group)
        if groups * scoring.units > num_units:
            raise ConfigError(
                f"{tokens.texts:,} texts need {groups:,} groups of {scoring.units:,} units each, and there are "
                f"{num_units:,} units: take fewer texts, or a smaller group"
            )
        return cls(scoring, groups, texts_of_group, tokens.max_new_tokens)

    def free_texts(self, num_units: int) -> int:
        """Return the number of texts that N units allow at the same ε."""
        return num_units // self.scoring.units * self.texts_of_group


def plan_tokens(tokens: PredictConfig, num_units: int, noise_for: Callable[[int], float]) -> TokenPlan:
    """Return the plan with the fewest texts per group.

    Each text of a group adds to the cost of its units, and texts of other groups cost them nothing. So each group makes
    one text if there are enough units, otherwise two, and so on.

    Raises:
        ConfigError: there are too few units for any number of texts per group.
    """
    for texts_of_group in range(1, tokens.texts + 1):
        try:
            return TokenPlan.of(tokens, num_units, texts_of_group, noise_for(texts_of_group * tokens.max_new_tokens))
        except ConfigError:
            if texts_of_group == tokens.texts:
                raise
    raise AssertionError("there is one text at least")


def _rounded(value: float, how: Callable[[float], int]) -> float:
    """Round a value to six digits with `math.floor` or `math.ceil`, so that the noise is not smaller."""
    scale = 10 ** (_DIGITS - 1 - math.floor(math.log10(value)))
    return how(value * scale * (1 - 1e-15 if how is math.ceil else 1.0)) / scale


CHARGE = "tokens of one group's texts"
METHOD = "predicted text"
FREE_TEXTS = "texts that the units allow at the same ε"
QUANTITY, AROUND_PUBLIC = "clipped quantity", "difference to the public logits"
CLIP, GROUP_SIZE, TEMPERATURE = "clip c, of a logit", "group size s, units", "temperature τ"
TOKENS, TEXTS_OF_GROUP = "tokens of a text, at most", "texts of one group, at most"
"""Names of settings of the plan, and one value."""
_Text = TypeVar("_Text")


def tokens_of(recipe: QueryRecipe, num_units: int) -> TokenPlan:
    """Return the public parameters of a recipe's tokens.

    Raises:
        ConfigError: the parameters contradict each other, or there are too few units.
    """
    privacy = recipe.privacy

    def noise_for(tokens: int) -> float:
        if privacy.noise_multiplier is not None:
            return privacy.noise_multiplier
        assert privacy.epsilon is not None  # the section has one of the two
        return least_noise(
            privacy.epsilon,
            privacy.delta_for(num_units),
            lambda noise: [(TokenDraw(noise_multiplier=noise), tokens)],
            privacy.adjacency,
            tolerance=1e-6,  # a group has a whole number of units, which rounds up
        )

    return plan_tokens(recipe.options, num_units, noise_for)


def plan_prediction(recipe: QueryRecipe, num_units: int) -> QueryPlan:
    """Plan a recipe from the number of units, without records.

    Raises:
        ConfigError: as `tokens_of`.
        ValueError: δ is out of range.
    """
    tokens, texts = tokens_of(recipe, num_units), recipe.options.texts
    scoring = tokens.scoring
    settings: list[tuple[str, Value]] = [
        (QUANTITY, AROUND_PUBLIC if scoring.around_public else "logits"),
        (CLIP, scoring.clip),
        (GROUP_SIZE, scoring.units),
        (TEMPERATURE, scoring.temperature),
        ("noise multiplier sτ/c", float(f"{scoring.noise_multiplier:.6g}")),
        (TOKENS, tokens.max_new_tokens),
        ("texts", texts),
        (TEXTS_OF_GROUP, tokens.texts_of_group),
        (FREE_TEXTS, tokens.free_texts(num_units)),
        (
            "drawn from",
            "all tokens" if scoring.top_k is None else f"the {scoring.top_k} likeliest public tokens, top-k+",
        ),
    ]
    return plan_with(
        recipe, METHOD, num_units, [(CHARGE, tokens.event, tokens.tokens)], settings=settings, randomness="discrete"
    )


def predict_texts(recipe: QueryRecipe, records: PrivateRecords, plan: QueryPlan, say: Callable[[str], None]) -> Path:
    """Draw the texts and return their file.

    Raises:
        ConfigError: the model does not load, has no room, couples rows or does not fit into memory.
        ValueError: the plan belongs to a different recipe, the budget is too small, or the folder holds a run.
    """
    options, tokens = recipe.options, tokens_of(recipe, records.num_units)
    charge = plan.charge(CHARGE)
    if (charge.event, charge.count, plan.num_units) != (tokens.event, tokens.tokens, records.num_units):
        raise ValueError("the plan does not match this recipe and these records: make it with plan_prediction")
    say(f"loading {model_section(recipe).name}")
    sampler, points = _sampler(recipe, tokens)
    say(
        f"{options.texts:,} texts of at most {tokens.max_new_tokens:,} tokens, each by a group of "
        f"{tokens.scoring.units:,} units; all tokens are charged now"
    )
    with begin_from(recipe, plan, results=[options.file]) as run:
        run.note_units(records.units)
        for point in points:
            run.open_point(point)

        def made(number: int, group: Int64Array) -> dict[str, str]:
            prompt = options.prompts[number % len(options.prompts)]
            text = sampler.text(records.contexts(group), prompt, options.public_context)
            return {"prompt": prompt, "text": text}

        texts = charged_texts(run, tokens, records.num_units, options.texts, made)
        path = run.folder / options.file
        bar = Phases(Console(stderr=True)).bar(options.texts, "text")
        with bar as moved, open(path, "x", encoding="utf-8") as file:
            for text in texts:
                file.write(json.dumps(text, ensure_ascii=False) + "\n")
                moved(1)
        run.release(path)
    return path


def charged_texts(
    run: QueryRun, tokens: TokenPlan, num_units: int, texts: int, made: Callable[[int, Int64Array], _Text]
) -> Iterator[_Text]:
    """Charge all tokens that the texts may have, divide the units in secret, and yield the texts one by one.

    Guarantee: a unit is in one group at most, a group makes at most the texts that were charged, and the charge is on
    the disk before the first of them.
    """
    run.charge(CHARGE, tokens.tokens)
    groups = secret_groups(num_units, tokens.scoring.units, tokens.groups)
    for number in range(texts):
        yield made(number, groups[number % len(groups)])


def _sampler(recipe: QueryRecipe, tokens: TokenPlan) -> tuple[GroupSampler, list[str]]:
    """Load the model; return its sampler and open points about it."""
    options: PredictConfig = recipe.options
    model, tokenizer, points = load_public_model(recipe)
    limits = TextLimits(
        max_new_tokens=options.max_new_tokens,
        stop=options.stop,
        rows_per_pass=options.rows_per_pass,
        rows_per_unit=recipe.privacy.max_rows_per_unit or 1,
        cached=options.cached,
    )
    sampler = GroupSampler(model, tokenizer, tokens.scoring, limits, recipe.data.max_length)
    sampler.require_room(options.prompts)
    length = max(map(sampler.length, options.prompts))
    require_independent_rows(model, length, options.rows_per_pass, options.max_new_tokens)
    if next(model.parameters()).device.type != "cpu":
        rows = tokens.scoring.units * limits.rows_per_unit
        require_memory(model, length + options.max_new_tokens, rows, options.rows_per_pass, options.cached)
    return sampler, points


QUERY = QueryCommand(
    "reading the records",
    read_records,
    lambda recipe, records: plan_prediction(recipe, records.num_units),
    lambda recipe, records, plan, say: {"texts": str(predict_texts(recipe, records, plan, say))},
)
