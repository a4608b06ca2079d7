"""Noisy counts of the labels of a training run's private records.

Place in the flow: the one step of a synthetic data set that reads private records. The records are those that the run
was trained on, by its own recipe; each unit's rows are cut as in the training. Counts get exact discrete Gaussian noise
once, and everything after it looks at the noisy counts only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpllm.config import RECIPE_FILE, ConfigError, load_recipe
from dpllm.config.values import between
from dpllm.data.records import check_column, contents_of, load_train_and_eval
from dpllm.data.rows import unit_index_of
from dpllm.mechanism.limits import MAX_NOISE, MIN_NOISE
from dpllm.mechanism.query import Query
from dpllm.mechanism.sampling import secret_rng
from dpllm.methods.count.counting import CHARGE, REPLACED, LabelledUnits, charge_and_count
from dpllm.methods.queries.run import QueryRun
from dpllm.methods.synthesize.labels import LabelShares, check_classes, shares_of
from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.privacy.query_plan import Charge, QueryPlan, Value
from dpllm.privacy.run_folder import compare_records

COUNTS_FILE = "label_counts.json"


@dataclass(frozen=True, kw_only=True)
class CountedLabels:
    """Labels whose shares are counted with noise.

    Raises:
        ConfigError: a value is out of range, or the classes are not different names.
    """

    classes: tuple[str, ...]
    """All public classes."""
    column: str
    """Column of the private records that holds the label."""
    noise_multiplier: float = 20.0
    """Standard deviation of the noise of a count, over the largest change of the counts by one unit."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_classes(self.classes)
        between("--count-noise", self.noise_multiplier, MIN_NOISE, MAX_NOISE)

    @property
    def charge(self) -> Charge:
        """The charge: one answer about all units, as `dpllm methods count` charges it."""
        event = Query(noise_multiplier=float(self.noise_multiplier), replaced=REPLACED, discrete=True)
        return Charge(name=CHARGE, event=event, count=1)

    def settings(self, rows_per_unit: int) -> tuple[tuple[str, Value], ...]:
        """Return the public settings on which the sensitivity rests."""
        return (
            ("rows of a unit that are counted, at most", rows_per_unit),
            ("noise of a count (standard deviation)", float(self.noise_multiplier * rows_per_unit)),
            ("classes", len(self.classes)),
        )


def read_labels(folder: str | Path, plan: QueryPlan, counted: CountedLabels) -> tuple[LabelledUnits, str | None]:
    """Return the labels of the records that a run was trained on, and a doubt if the records cannot be compared.

    Nothing is charged yet. The column of the labels may have been added after the training.

    Args:
        folder: of the training run, with its recipe.
        plan: of the data set, with the training run's unit.
        counted: classes and column.

    Raises:
        ConfigError: the folder has no recipe, the records cannot be read, have no such column, or are others than those
            of the training.
        LedgerError: they have other contents than those of the training.
    """
    path = Path(folder) / RECIPE_FILE
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no {RECIPE_FILE}, so the records whose labels are counted are unknown: count in the "
            "folder of the run itself, or give the shares as public"
        )
    recipe = load_recipe(path)
    records, _ = load_train_and_eval(recipe.data, recipe.privacy)
    check_column(records.column_names, counted.column, recipe.data.path, records)
    units = unit_index_of(records, recipe.privacy, secret_rng())
    if units.num_units != plan.num_units or units.max_rows > (plan.max_rows_per_unit or 1):
        raise ConfigError(
            f"{recipe.data.path} does not have the {plan.num_units:,} units that the run in {folder} was trained on: "
            "restore the records of the training. The guarantee of both together needs the same people"
        )
    doubt = compare_records(Path(folder) / LEDGER_FILE, contents_of(records))
    return LabelledUnits(counted.classes, [str(label) for label in records[counted.column]], units), doubt


def count_noisily(run: QueryRun, units: LabelledUnits, exact: Sequence[int]) -> LabelShares:
    """Charge the counts, add their noise, write them, and return the shares that they give.

    Guarantee: only the noisy counts leave this function, and they were charged before the noise was drawn.

    Args:
        run: whose plan has the charge of `CountedLabels.charge`.
        units: as `read_labels` returns them.
        exact: their exact counts.

    Raises:
        ConfigError: no noisy count is above 0.
    """
    noisy = charge_and_count(run, units, exact)
    path = run.folder / COUNTS_FILE
    path.write_text(json.dumps(noisy, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return shares_of(list(noisy), np.array(list(noisy.values()), dtype=np.float64))
