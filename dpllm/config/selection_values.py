"""Check the key ``privacy.selection``: the distribution of the number of runs of which only the best is released.

Place in the flow: a part of `dpllm.config.privacy_section`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpllm.config.values import ConfigError

if TYPE_CHECKING:
    from dpllm.config.privacy_section import PrivacyConfig


def checked_selection(privacy: PrivacyConfig) -> Any:
    """Return the selection as plain values.

    Raises:
        ConfigError: it is not one, or no selection of such runs is accounted for.
    """
    from dpllm.mechanism.parts import Spec
    from dpllm.mechanism.selection import Selection

    try:
        spec = Spec.of(privacy.selection)
        Selection.of(spec)
    except ValueError as error:
        words = str(error)
        raise ConfigError(words if words.startswith("selection") else f"selection: {words}") from error
    wrong = {
        "seed: the fixed seed makes every run the same": privacy.seed is not None,
        "sampling=example: no Rényi bound is known for rows of a unit that are drawn singly": (
            privacy.sampling == "example" and privacy.max_rows_per_unit != 1
        ),
        "max_batch_size: no Rényi bound is known for truncated samples": privacy.max_batch_size is not None,
        "stop=independent: the ε of a selection is that of complete runs": privacy.stop != "planned",
        "both target_epsilon and noise_multiplier: the selection has one σ, from one of them": (
            privacy.target_epsilon is not None and privacy.noise_multiplier is not None
        ),
        "budget_file: `dpllm tune` charges it, and not each of the runs": privacy.budget_file is not None,
    }
    for what, holds in wrong.items():
        if holds:
            raise ConfigError(f"selection cannot be combined with {what}. Leave it out")
    return spec.to_plain()
