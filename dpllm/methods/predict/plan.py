"""The public numbers of a private prediction, and their cost, before anything is paid.

Place in the flow: between the recipe and the run. It needs the number of units and no record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dpllm.config import ConfigError
from dpllm.methods.predict.scores import Scoring
from dpllm.methods.predict.section import PredictConfig
from dpllm.methods.predict.token_draw import TokenDraw

_ORDER = {
    "invisible-ink": ("clip", "group_size", "temperature"),
    "logits": ("group_size", "temperature", "clip"),
}
"""Which number follows from the noise: the first that the recipe leaves out."""
_DEFAULTS = {
    "invisible-ink": {"group_size": 8, "temperature": 1.0},
    "logits": {"temperature": 2.0, "clip": 10.0},
}
_DIGITS = 6


@dataclass(frozen=True)
class TokenPlan:
    """Groups, clip and temperature, and the tokens that they are charged for.

    >>> from dpllm.methods.predict.section import PredictConfig
    >>> TokenPlan.of(PredictConfig(clip=0.5), 1000, 1, 16.0).scoring.temperature
    1.0
    """

    scoring: Scoring
    groups: int
    """Groups that make texts."""
    texts_of_group: int
    """The most texts of one group; its units bear the cost of all of them."""
    max_new_tokens: int
    """T."""

    @property
    def tokens(self) -> int:
        """The tokens charged to each unit: those of its group's texts at their longest."""
        return self.texts_of_group * self.max_new_tokens

    @property
    def event(self) -> TokenDraw:
        """The charge of one token."""
        return TokenDraw(noise_multiplier=self.scoring.noise_multiplier)

    @classmethod
    def of(cls, tokens: PredictConfig, num_units: int, texts_of_group: int, noise: float) -> TokenPlan:
        """Return the plan with this noise multiplier, or slightly more where a number is rounded.

        Args:
            tokens: the recipe's numbers.
            num_units: N.
            texts_of_group: texts of one group.
            noise: sτ/c.

        Raises:
            ConfigError: all three numbers are given and have less noise, or the units do not suffice.
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
        """Return the number of texts that the units allow at the same ε."""
        return num_units // self.scoring.units * self.texts_of_group


def plan_tokens(tokens: PredictConfig, num_units: int, noise_for: Callable[[int], float]) -> TokenPlan:
    """Return the plan with the fewest texts of one group.

    Every text of a group costs its units more, and texts of other groups cost them nothing. So each group makes one
    text if the units suffice; if they do not, two, and so on.

    Args:
        tokens: the recipe's numbers.
        num_units: N.
        noise_for: from the tokens charged to a unit to the noise multiplier of each.

    Raises:
        ConfigError: no number of texts of a group is enough.
    """
    for texts_of_group in range(1, tokens.texts + 1):
        try:
            return TokenPlan.of(tokens, num_units, texts_of_group, noise_for(texts_of_group * tokens.max_new_tokens))
        except ConfigError:
            if texts_of_group == tokens.texts:
                raise
    raise AssertionError("there is one text at least")


def _rounded(value: float, how: Callable[[float], int]) -> float:
    """Return a value with six digits, rounded by `math.floor` or `math.ceil`: the noise is then no smaller."""
    scale = 10 ** (_DIGITS - 1 - math.floor(math.log10(value)))
    return how(value * scale * (1 - 1e-15 if how is math.ceil else 1.0)) / scale
