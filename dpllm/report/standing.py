"""State the guarantee of a released model's folder in one sentence, and check it against the ledger.

`dpllm generate` does this before it uses the model. It checks the plan, the ledger and the model's
files. `dpllm verify` also checks the report and the card, which takes longer.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.privacy.query_plan import QueryPlan
from dpllm.privacy.stated import stated_guarantee
from dpllm.report.statement import JSON_FILE
from dpllm.report.verify import TOLERANCE, Check, check_ledger
from dpllm.report.verify_release import release_checks

_STATED = "the report states the ε of the ledger"


@dataclass(frozen=True)
class Standing:
    """The guarantee of a folder.

    Attributes:
        words: one sentence.
        private: whether there is a guarantee at all: a run without noise or with a fixed seed has none.
        checks: the checks of plan, ledger, the model's files and the stated ε.
    """

    words: str
    private: bool
    checks: tuple[Check, ...]

    @property
    def failed(self) -> Check | None:
        """The first check that failed; None if none did."""
        return next((check for check in self.checks if not check.ok), None)


def standing_of(folder: str | Path) -> Standing:
    """Return the guarantee of a folder, computed from its ledger.

    Args:
        folder: folder of a run or of a checkpoint, or a copy of a published one.

    Raises:
        ValueError: it is not a folder, or holds no ledger.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Pass the folder of a run, or of a model that a run released")
    if not (folder / LEDGER_FILE).is_file():
        raise ValueError(f"{folder} holds no {LEDGER_FILE}, so there is no guarantee to check")
    checks: list[Check] = []
    plan, contents = check_ledger(folder, checks)
    if plan is None or contents is None:
        return Standing("No guarantee: plan or ledger cannot be read.", False, tuple(checks))
    checks += [Check(*result) for result in release_checks(folder, contents)]
    if isinstance(plan, QueryPlan):
        return Standing("No model: the folder holds the release of a query run.", False, tuple(checks))
    if plan.unplanned(contents) is not None:
        return Standing("No guarantee: the ledger charges steps that are not in the plan.", False, tuple(checks))
    stated = stated_guarantee(plan, contents)
    checks.append(_stated(folder, stated.epsilon))
    if plan.seeded or contents.seeded or not stated.is_finite:
        reason = "no noise was added" if not stated.is_finite else "a fixed seed, which is for tests, made the noise"
        return Standing(f"NOT PRIVATE: {reason}.", False, tuple(checks))
    words = (
        f"{stated} for each {stated.one_unit} of "
        f"{plan.num_units:,}, recomputed from the ledger of {contents.num_steps:,} steps."
    )
    return Standing(words, True, tuple(checks))


def _stated(folder: Path, spent: float) -> Check:
    """Compare the report's ε, within the tolerance for different versions of the numeric packages."""
    try:
        stated = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))["statement"]["epsilon"]
        value = math.inf if stated == "inf" else float(stated)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Check(_STATED, False, f"{JSON_FILE} cannot be read ({type(error).__name__})")
    same = value == spent or math.isclose(value, spent, rel_tol=TOLERANCE)
    return Check(_STATED, same, f"ε = {value:g}" if same else f"it states {value:g}, but the ledger gives {spent:g}")
