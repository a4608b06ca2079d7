"""Keep the privacy budget of one data set over all runs on it, in a file.

Before a run trains, it charges all its planned steps to the file. When it has ended, it settles with the steps that its
ledger charged. In between, and after a crash, the reservation remains. All entries are composed as one history, at the
file's δ and under its adjacency. The ε of the data set is therefore known at any time, and a run that would exceed the
budget does not start.

    create_budget("chats.budget.json", dataset="chats", epsilon=8.0, delta=1e-6, unit="user", num_units=50_000, ...)
    entry = charge("chats.budget.json", plan, dataset="chats")     # before training, or BudgetError
    check_entry("chats.budget.json", entry, plan)                  # before the run is resumed, or BudgetError
    settle("chats.budget.json", entry, ledger.num_steps)           # after it has ended

The file is changed under a lock (the file ``<name>.lock`` next to it, which is never deleted) and replaced atomically
and durably. It contains a hash of its contents to detect accidents and careless edits; the hash is not a signature. An
older copy of the file is refused if its lock file has recorded a later one.

The file cannot record two things. First, runs that never charged it: the guarantee only covers runs whose recipe names
the file. Second, why a plan was chosen: composition is proved for plans (σ, q, T) that do not depend on the releases of
earlier runs. A search that sets a run's noise or length from the results of the previous run needs a privacy filter
instead (Rogers, Roth, Ullman, Vadhan, arXiv:1605.08294).

**The lock file** holds the name of the process that locked it last, and the number and the hash of the
budget's last write. A budget that was restored from an older copy (git, a backup) lacks the runs that were charged
since then. It has a lower number, and is refused.

Only the system call is filelock's (`lock_descriptor`). Its class `FileLock` does not expose its descriptor, so no note
could be written under the lock; it refuses a lock file that a different user created, although reading it is enough;
and on a file system without locks it uses a file instead, which remains after its process dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import filelock

from dpllm.config import UNITS
from dpllm.config.files import write_file
from dpllm.config.values import between, choice, integer
from dpllm.config.versions import has_format, other_format
from dpllm.mechanism.catalogue import from_fields, to_fields
from dpllm.mechanism.events import Event
from dpllm.mechanism.limits import ADJACENCIES, MAX_TARGET_EPSILON
from dpllm.mechanism.query import Several
from dpllm.privacy import accounting
from dpllm.privacy.accounting import History, merge
from dpllm.privacy.calibration import steps_within
from dpllm.privacy.chained_file import is_at
from dpllm.privacy.ledger import LedgerError, read_ledger
from dpllm.privacy.ledger_reader import LedgerHead, require_prefix
from dpllm.privacy.plan import Plan, PrivacyPlan
from dpllm.privacy.query_plan import QueryPlan
from dpllm.privacy.rounding import down, format_delta, format_delta_limit, format_epsilon

_LOCK_PATIENCE, _LOCK_LIMIT = 2.0, 600.0  # seconds
_MOST = 4096  # bytes of the lock file


class BudgetError(ValueError):
    """Error: the budget does not allow a run, belongs to another data set, or was changed after it was written."""


@dataclass(frozen=True)
class BudgetLock:
    """A lock that this process holds."""

    budget: Path
    """The file that it locks."""
    path: Path
    descriptor: int

    def require_latest(self, written: int, sha256: str) -> None:
        """Check that the budget is the file that was written last, or a later one.

        Args:
            written: number of the write that made it.
            sha256: hash of its contents.

        Raises:
            BudgetError: it is an older copy, or a different file with the same number of writes.
        """
        noted = _noted(self.descriptor)
        if noted is None or written > noted[0] or (written, sha256) == noted:
            return
        raise BudgetError(
            f"{self.budget} is not the file that was written here last (write {written} of {noted[0]}): it was "
            "restored from a different copy and lacks the charges of later runs. Replace it with the latest copy; if "
            f"that is lost and this file has every run, delete {self.path}"
        )

    def note(self, written: int, sha256: str) -> None:
        """Record a write."""
        _put(self.descriptor, {"written": written, "sha256": sha256})

    def require_held(self) -> None:
        """Check, before the budget is replaced, that no other process can hold the lock as well.

        Raises:
            BudgetError: the lock file was removed, so another process may have made a new one.
        """
        if not is_at(self.descriptor, self.path):
            raise BudgetError(
                f"{self.path} was removed while it was locked, so another process may be writing {self.budget}. This "
                "process has not changed it. Do not remove the lock file, and start again"
            )


@contextlib.contextmanager
def locked(budget: Path) -> Iterator[BudgetLock]:
    """Hold the lock of a budget file; the system releases it when the process dies.

    Raises:
        BudgetError: the folder does not allow it, or another process has held the lock for minutes.
    """
    path = budget.with_name(f"{budget.name}.lock")
    while True:
        descriptor = _opened(path, budget)
        try:
            _wait_for_lock(descriptor, budget)
            if is_at(descriptor, path):
                yield BudgetLock(budget, path, descriptor)
                return
        finally:
            os.close(descriptor)


def _opened(path: Path, budget: Path) -> int:
    try:
        try:
            return os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except PermissionError:  # another user of the folder made it; reading is enough to lock it
            return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise BudgetError(
            f"{budget} cannot be locked ({error.strerror}). Its folder must exist, and every run on the data must have "
            "permission to write there"
        ) from error


def _wait_for_lock(descriptor: int, budget: Path) -> None:
    """Take the lock. After a wait of two seconds, print the name of its holder; after ten minutes, give up.

    Raises:
        BudgetError: another process has held it for all that time, or the file system has no locks.
    """
    began, told = time.monotonic(), False
    try:
        while not filelock.lock_descriptor(descriptor, blocking=False):
            waited = time.monotonic() - began
            holder = "another process"
            with contextlib.suppress(OSError):  # Windows lets only the holder read it
                holder = _lines(descriptor)[0].strip() or holder
            if waited > _LOCK_LIMIT:
                raise BudgetError(
                    f"{budget} has been locked by {holder} for {waited:.0f} s. End that process if it hangs, and start "
                    "again"
                )
            if waited > _LOCK_PATIENCE and not told:
                told = True
                print(f"waiting for {budget}, which is locked by {holder}", file=sys.stderr, flush=True)
            time.sleep(0.05)
    except OSError as error:  # ENOSYS, ENOLCK, EOPNOTSUPP of network file systems
        raise BudgetError(
            f"{budget} cannot be locked ({error.strerror}), so another run could charge it at the same time. Move it "
            "to a file system with locks that hold on all machines (Lustre: mount it with -o flock; NFS: version 4)"
        ) from error
    _put(descriptor, None)


def _lines(descriptor: int) -> list[str]:
    """Return the lines of a lock file, at least one."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, _MOST).decode("utf-8", errors="replace").split("\n")


def _noted(descriptor: int) -> tuple[int, str] | None:
    """Return the number and hash of the last write; None if there is no readable record of it."""
    try:
        noted = json.loads(_lines(descriptor)[1])
        return int(noted["written"]), str(noted["sha256"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _put(descriptor: int, noted: dict[str, int | str] | None) -> None:
    """Write the holder of the lock, and the note; None keeps the note. Nothing depends on the holder's name."""
    with contextlib.suppress(OSError):
        lines = _lines(descriptor)
        kept = json.dumps(noted) if noted is not None else (lines[1] if len(lines) > 1 else "")
        text = f"process {os.getpid()} on {socket.gethostname()}\n{kept}\n".encode()
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, text)
        os.ftruncate(descriptor, len(text))


_FORMAT = 1
_HEAD = ("dataset", "unit", "unit_column", "num_units", "adjacency", "epsilon", "delta", "shared_people")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The charge of one run."""

    id: str
    """Random, in hexadecimal; also written in the run's ledger."""
    plan_hash: str
    step: Event
    steps_reserved: int
    """Steps of all starts together: T of the plan, or the number that the last resume allows."""
    steps_charged: int | None
    """Steps that the run's ledger charges, once it has ended. None: the reservation counts."""
    steps_before: int
    """Steps known to have run; no later settlement may be lower."""
    charged_at: str
    """Time of the first charge, UTC."""
    segments: tuple[int, ...] = ()
    """Steps of each start before the last one, for events whose resume costs extra (`Event.restarts`)."""
    steps_planned: int | None = None
    """T of the plan, if a resume allows a different number. None: as many as are reserved."""
    head: dict[str, Any] | None = None
    """The run's ledger head (`LedgerHead`) at the last start, resumption, save or end. None: not started."""

    def __post_init__(self) -> None:
        """Check the counts and the head."""
        counts = {"steps_reserved": self.steps_reserved, "steps_before": self.steps_before}
        counts |= {"steps_charged": self.steps_charged or 0, "steps_planned": self.steps_planned or 0}
        for name, count in counts.items():
            integer(name, count, 0)
        object.__setattr__(self, "segments", tuple(integer("segments", count, 1) for count in self.segments))
        if self.head is not None:
            LedgerHead.of(self.head)

    @property
    def num_steps(self) -> int:
        """Steps that count against the budget."""
        return self.steps_reserved if self.steps_charged is None else self.steps_charged

    @property
    def history(self) -> list[tuple[Event, int]]:
        """The steps that count, by start: those whose ε the run's report states (`dpllm.privacy.stated`)."""
        taken = (*self.segments, max(0, self.num_steps - sum(self.segments)))
        if self.num_steps < self.steps_reserved:  # the stop was declared independent
            return accounting.of_starts(self.step, taken)
        return accounting.of_starts(self.step, taken, self.steps_planned or self.steps_reserved)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The contents of a budget file."""

    path: Path
    dataset: str
    """Public name of the data set."""
    unit: str
    """"sequence" or "user"."""
    unit_column: str | None
    """The column of the user's id; None at sequence level."""
    num_units: int
    """N."""
    adjacency: str
    """"zero-out" or "replace-one"."""
    epsilon: float
    """The largest ε that all runs together may cost, at `delta`."""
    delta: float
    """δ of the composition of all runs."""
    shared_people: bool = False
    """Whether runs may have a different N: the data set grows, and its people are in several runs."""
    entries: tuple[Entry, ...] = ()
    written: int = field(default=0, compare=False)
    """How often the file was written."""
    sha256: str = field(default="", compare=False)
    """Hash of the file's contents."""

    @property
    def history(self) -> list[tuple[Event, int]]:
        """The steps of all entries, reservations included."""
        return [part for entry in self.entries for part in entry.history]

    @cached_property
    def spent(self) -> float:
        """ε of all entries composed."""
        return self.cost(self.history)

    def cost(self, history: History) -> float:
        """Return ε of a history at the file's δ and adjacency."""
        return accounting.epsilon(history, self.delta, self.adjacency)

    @property
    def remaining_words(self) -> str:
        """The remaining budget, in words."""
        if self.spent >= self.epsilon:
            return "nothing: the budget is exhausted"
        return (
            f"ε = {down(self.epsilon - self.spent)} by subtraction; the exact ε left for a run comes from composing "
            "it with the others, and is usually larger"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the budget, its entries and the ε spent as plain values."""
        head = {name: getattr(self, name) for name in _HEAD}
        entries = [_plain(entry) for entry in self.entries]
        return {"file": self.path.name, **head, "spent": self.spent, "entries": entries}


def create_budget(
    path: str | Path,
    *,
    dataset: str,
    epsilon: float,
    delta: float,
    unit: str,
    num_units: int,
    unit_column: str | None = None,
    adjacency: str = "zero-out",
    shared_people: bool = False,
) -> Budget:
    """Write the budget file of a data set.

    Args:
        path: the file, which must not exist. Put it where every machine that trains on the data can lock it.
        dataset: public name of the data set.
        epsilon: the largest ε that all runs together may cost.
        delta: δ at which they are composed, below 1/N.
        unit: "sequence" or "user".
        num_units: N, public: the units of the data set as the runs see it.
        unit_column: the column of the user's id; required at user level, and only there.
        adjacency: "zero-out" or "replace-one".
        shared_people: allow runs with a different N, such as on the data set after it has grown. Each step is
            accounted with the N of its own run; δ must be below 1/N of every run.

    Raises:
        BudgetError: the file exists, or a value is out of range.
    """
    checks = {
        "a dataset name": isinstance(dataset, str) and bool(dataset.strip()),
        f"0 < epsilon <= {MAX_TARGET_EPSILON:g}": 0 < epsilon <= MAX_TARGET_EPSILON,
        "num_units >= 1": num_units >= 1,
        f"0 < delta < 1/num_units = {format_delta_limit(1 / max(num_units, 1))}": delta > 0 and delta * num_units < 1,
        f"unit in {UNITS}": unit in UNITS,
        'unit_column with unit="user", and only then': (unit_column is not None) == (unit == "user"),
        f"adjacency in {ADJACENCIES}": adjacency in ADJACENCIES,
    }
    broken = [rule for rule, holds in checks.items() if not holds]
    if broken:
        given = {"epsilon": epsilon, "delta": delta, "unit": unit, "num_units": num_units, "unit_column": unit_column}
        words = ", ".join(f"{name}={value!r}" for name, value in {**given, "adjacency": adjacency}.items())
        raise BudgetError(f"a budget needs {'; '.join(broken)}; got {words}")
    real = _real(path)
    budget = Budget(
        path=real,
        dataset=dataset,
        unit=unit,
        unit_column=unit_column,
        num_units=int(num_units),
        adjacency=adjacency,
        epsilon=float(epsilon),
        delta=float(delta),
        shared_people=bool(shared_people),
    )
    with locked(real) as lock:
        if real.exists():
            raise BudgetError(
                f"{path} exists and records the ε that runs have spent. Charge runs to it, or choose a different name"
            )
        lock.note(*_write(budget))
    return budget


def charge(
    path: str | Path, plan: Plan, dataset: str, entry_id: str | None = None, *, of_all_runs: bool = False
) -> str:
    """Reserve all that a plan may take: before a run trains, or before its first answer.

    A training run reserves its planned steps, a query run all its planned answers as one event, and a private tuning
    the release of the best of all its runs as one event. A run that builds on a released model states the ε of both;
    the budget counts that release once: by its own entry, or else by one that is added here.

    Guarantee: when the call returns, the entry is on the disk, and all entries composed, with the release on which the
    run builds, cost at most the budget. Two runs that charge at the same time are charged one after the other.

    Args:
        path: the budget file.
        plan: the plan of the run.
        dataset: public name of the data set that the run is about.
        entry_id: an id from `new_entry_id`, if the run's ledger already names the entry. None: a new one.
        of_all_runs: whether the entry covers all runs of a tuning (`PrivacyPlan.selection`), which its plan requires.
            It stays charged however the tuning ends.

    Returns:
        The id of the entry.

    Raises:
        BudgetError: the run would exceed the budget, is not private, or uses data that is not the file's.
    """
    _check_private(plan, of_all_runs)
    with _changing(path) as (budget, put):
        _check_data(budget, plan, dataset)
        prior = _prior_entry(budget, plan)
        entry = _new_entry(plan, entry_id)
        _check_fits(budget, prior, entry)
        put((*budget.entries, *prior, entry))
    return entry.id


def require_room(path: str | Path, plan: Plan, dataset: str) -> None:
    """Raise the errors that `charge` would raise, but charge nothing; for a run that first does other work."""
    _check_private(plan)
    budget = read_budget(path)
    _check_data(budget, plan, dataset)
    _check_fits(budget, _prior_entry(budget, plan), _new_entry(plan))


def mark(path: str | Path, entry_id: str, head: LedgerHead) -> None:
    """Record how far the run of an entry has come, so that an outdated copy of its folder is refused.

    Args:
        path: the budget file.
        entry_id: the id that `charge` returned.
        head: the current head of the run's ledger.

    Raises:
        BudgetError: the entry is not in the file.
    """
    with _changing(path) as (budget, put):
        put(_with_entry(budget, replace(entry_of(budget, entry_id), head=head.to_dict())))


def settle(
    path: str | Path,
    entry_id: str,
    charged: int | Sequence[tuple[Event, int]],
    head: LedgerHead | None = None,
    keep_reserved: bool = False,
) -> None:
    """Replace the reservation of a run that has ended by what its ledger charges.

    May be called again, with the same or more. What was taken is recorded even when another run has since taken the ε
    that this run left; the budget then shows more spent than allowed.

    Args:
        path: the budget file.
        entry_id: the id that `charge` returned.
        charged: the steps in the run's ledger, all its resumptions included; of a query run the history there.
        head: the last head of the run's ledger.
        keep_reserved: whether all that was planned stays charged, because the run was stopped early and its stop may
            depend on the data or on its releases. Nothing stays charged of a query run without an answer.

    Raises:
        BudgetError: the entry is not in the file, or less was charged before, or more is charged than it reserved.
    """
    with _changing(path) as (budget, put):
        entry = entry_of(budget, entry_id)
        if entry.step.answers is not None and not isinstance(charged, int):
            settled = _settled_answers(path, entry, dict(entry.step.answers), charged, keep_reserved)
        else:
            settled = _settled_steps(path, entry, charged, keep_reserved)
        put(_with_entry(budget, replace(settled, head=entry.head if head is None else head.to_dict())))


def _settled_steps(
    path: str | Path, entry: Entry, charged: int | Sequence[tuple[Event, int]], keep_reserved: bool
) -> Entry:
    """Return the entry with the steps that were charged."""
    if not isinstance(charged, int) and any(event != entry.step for event, _ in charged):
        raise BudgetError(
            f"entry {entry.id} of {path} belongs to a training run, but these charges are from a different run. Settle "
            "it with the run's own ledger"
        )
    taken = charged if isinstance(charged, int) else sum(count for _, count in charged)
    integer("charged", taken, -(2**63))
    if not entry.steps_before <= taken <= entry.steps_reserved:
        raise BudgetError(
            f"entry {entry.id} of {path} cannot be settled with {taken} steps: it reserved {entry.steps_reserved}, of "
            f"which {entry.steps_before} were already charged. Settle it with the number of steps in the run's ledger"
        )
    return replace(entry, steps_charged=None if keep_reserved else int(taken), steps_before=int(taken))


def _settled_answers(
    path: str | Path,
    entry: Entry,
    reserved: dict[Event, int],
    charged: Sequence[tuple[Event, int]],
    keep_reserved: bool,
) -> Entry:
    """Return the entry with the answers that were charged as one event; its steps are 0 or 1."""
    if not charged and entry.steps_before == 0:
        return replace(entry, steps_charged=0)
    if keep_reserved:
        return replace(entry, steps_charged=1, steps_before=1)
    taken = Several.of(charged)
    if any(count > reserved.get(event, 0) for event, count in taken.parts):
        raise BudgetError(
            f"entry {entry.id} of {path} reserved less than the run's ledger charges, so it cannot be settled. Restore "
            "the latest copy of the file"
        )
    return replace(entry, step=taken, steps_charged=1, steps_before=1)


def check_entry(
    path: str | Path,
    entry_id: str,
    plan: PrivacyPlan,
    ledger: str | Path | None = None,
    go_on: Callable[[], LedgerHead] | None = None,
    steps_allowed: int | None = None,
) -> None:
    """Reserve all planned steps of a run again, before it is resumed.

    Guarantee: at most one of several copies of a run's folder can be resumed. The entry holds the head of the ledger
    at the last start, save or end. A ledger without this head is refused; the resumed run replaces the head under the
    lock.

    Args:
        path: the budget file.
        entry_id: the id that `charge` returned.
        plan: the plan of the run.
        ledger: the ledger in the folder that is to be resumed.
        go_on: opens the ledger for the resumed run and returns its new head.
        steps_allowed: steps that the run may take in all (`dpllm.privacy.stated.steps_allowed`); None: all planned.

    Raises:
        BudgetError: the entry is not in the file or belongs to another plan, other runs have taken the ε that this run
            left when it was settled, or the run was resumed in another copy of the folder.
    """
    with _changing(path) as (budget, put):
        entry = entry_of(budget, entry_id)
        if entry.plan_hash != plan.hash:
            raise BudgetError(
                f"entry {entry_id} of {path} was charged for the plan {entry.plan_hash[:12]}, but this plan is "
                f"{plan.hash[:12]}. Resume with the configuration of the first start"
            )
        if ledger is not None:
            require_own_ledger(path, entry, ledger)
        others = tuple(other for other in budget.entries if other.id != entry_id)
        # Not the minimum of both: after some resumes of BLT noise, more steps fit than after the previous one.
        reserved = plan.num_steps if steps_allowed is None else steps_allowed
        planned = None if reserved == plan.num_steps else plan.num_steps
        segments = _segments(entry, ledger)
        again = replace(entry, steps_charged=None, steps_reserved=reserved, steps_planned=planned, segments=segments)
        _check_resumed(budget, others, again)
        put(_with_entry(budget, replace(again, head=entry.head if go_on is None else go_on().to_dict())))


def _segments(entry: Entry, ledger: str | Path | None) -> tuple[int, ...]:
    """Return the steps of each start so far, for an event that restarts when the run is resumed."""
    if not entry.step.restarts or ledger is None:
        return entry.segments
    return tuple(count for _, count in read_ledger(ledger).history)


def require_own_ledger(path: str | Path, entry: Entry, ledger: str | Path) -> None:
    """Refuse a ledger that lacks steps which the run of an entry has taken.

    Raises:
        BudgetError: the run was resumed in another copy of the folder.
    """
    if entry.head is None:
        return
    try:
        require_prefix(ledger, LedgerHead.of(entry.head), f"Entry {entry.id} of {path}")
    except LedgerError as error:
        raise BudgetError(
            f"{error}. The budget counts the steps of the folder in which the run continued. Resume there, or start a "
            "new run, which is charged separately"
        ) from error


def read_budget(path: str | Path) -> Budget:
    """Read and check a budget file.

    Raises:
        BudgetError: the file is missing, of another format, or was edited.
    """
    real = _real(path)
    try:
        raw = json.loads(real.read_text(encoding="utf-8"))
    except OSError as error:
        raise BudgetError(
            f"{path} cannot be read ({error.strerror}). Pass the budget file that was created for this data set"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _edited(path, f"not JSON ({error})") from error
    if not isinstance(raw, dict) or "format" not in raw:
        raise BudgetError(f"{path} is not a budget file. Pass the file that create_budget wrote")
    if not has_format(raw["format"], _FORMAT):
        raise BudgetError(f"{path} {other_format('budget file', raw['format'], _FORMAT)}")
    digest = raw.pop("sha256", None)
    if digest != _digest(raw):
        raise _edited(path, "edited: its contents do not match its hash")
    try:
        entries = tuple(Entry(**{**entry, "step": from_fields(entry["step"])}) for entry in raw["entries"])
        between("epsilon", raw["epsilon"], 0, above=True)
        between("delta", raw["delta"], 0, 1, above=True, below=True)
        integer("num_units", raw["num_units"], 1)
        choice("adjacency", raw["adjacency"], ADJACENCIES)
        written = integer("written", raw["written"], 1)
        head = {name: raw[name] for name in _HEAD}
        return Budget(path=real, entries=entries, written=written, sha256=str(digest), **head)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _edited(path, f"not a complete budget ({error})") from error


def budget_rows(budget: Budget) -> list[tuple[str, str]]:
    """Return the budget as (name, value) rows for people."""
    unit = budget.unit if budget.unit_column is None else f"{budget.unit} (column {budget.unit_column})"
    rows = [
        ("data set", budget.dataset),
        ("unit of privacy", unit),
        ("units N", f"{budget.num_units:,}"),
        ("adjacency", budget.adjacency),
        ("budget", f"ε = {down(budget.epsilon)} at δ = {format_delta(budget.delta)}"),
        ("spent", f"ε = {format_epsilon(budget.spent)}, all runs composed"),
        ("left", budget.remaining_words),
        ("runs", str(len(budget.entries))),
    ]
    for place, entry in enumerate(budget.entries, start=1):
        steps = _amount(entry)
        state = "reserved" if entry.steps_charged is None else "charged"
        alone = format_epsilon(budget.cost(entry.history))
        words = f"{steps} {state}, ε = {alone} alone, {entry.charged_at}, entry {entry.id}"
        rows.append((f"run {place}", words))
    return rows


def _amount(entry: Entry) -> str:
    """Return how much of a run counts against the budget, in words."""
    if entry.step.answers is not None:
        return f"{entry.num_steps * sum(count for _, count in entry.step.answers):,} answers"
    if entry.step.is_selection:
        return "all runs of a tuning, only the best of which is released,"
    return f"{entry.num_steps:,} of {entry.steps_reserved:,} steps"


def _check_private(plan: Plan, of_all_runs: bool = False) -> None:
    if plan.selection is not None and not of_all_runs:
        raise BudgetError(
            "`dpllm methods tune` charges all runs of a selection together, so start this run with that command"
        )
    if plan.seeded:
        raise BudgetError("a run with a fixed seed is not private, so no budget covers it. Remove privacy.seed")
    if plan.event.noise_multiplier == 0:
        raise BudgetError("a run without noise is not private, so no budget covers it. Set a target_epsilon")


def _check_data(budget: Budget, plan: Plan, dataset: str) -> None:
    """Raise unless the file and the run describe the same units of the same data."""
    pairs = [("dataset", budget.dataset, dataset)]
    if plan.dataset is not None:
        pairs.append(("dataset of the plan", budget.dataset, plan.dataset))
    names = ("unit", "unit_column") if budget.shared_people else ("unit", "unit_column", "num_units")
    pairs += [(name, getattr(budget, name), getattr(plan, name)) for name in names]
    differing = [f"{name} is {there!r} there and {here!r} here" for name, there, here in pairs if there != here]
    if differing:
        raise BudgetError(
            f"{budget.path} is the budget of other data than this run's: {'; '.join(differing)}. Runs on different "
            "data or units do not share a budget: pass the file that was created for this data set and unit. If the "
            "data set grows and people are in several runs, create it with `dpllm budget create --shared-people`"
        )
    if budget.delta * plan.num_units >= 1:
        raise BudgetError(
            f"{budget.path} has delta={format_delta(budget.delta)}, which is not below "
            f"1/N = {format_delta_limit(1 / plan.num_units)} of this run. Create a budget with a smaller delta"
        )


def _check_resumed(budget: Budget, others: tuple[Entry, ...], entry: Entry) -> None:
    """Raise unless the other runs, the earlier starts of this run and its remaining steps cost at most the budget."""
    taken = [part for other in others for part in other.history]
    total = budget.cost([*taken, *entry.history])
    if total > budget.epsilon:
        raise BudgetError(
            f"{_allowance(budget, others, taken)}. If it is resumed, this run alone would cost "
            f"ε = {format_epsilon(budget.cost(entry.history))} over {entry.steps_reserved} steps, including the "
            f"{sum(entry.segments)} already taken, for a total of ε = {format_epsilon(total)}. "
            "Release the model of its last checkpoint, whose ε its report states"
        )


def _prior_entry(budget: Budget, plan: Plan) -> tuple[Entry, ...]:
    """Return the entry to add for the release on which a run builds; none if the file holds it already."""
    after = plan.after if isinstance(plan, QueryPlan) else None
    if after is None or not after.history:
        return ()
    wanted, ids = merge(after.history), (after.run, None if after.budget is None else after.budget[1])
    for entry in budget.entries:
        if entry.id in ids and entry.plan_hash == after.plan_hash:
            held = dict(merge(entry.history))
            if all(held.get(one, 0) >= count for one, count in wanted):
                return ()
    added = _new_entry(plan, after.run)
    return (replace(added, step=Several.of(wanted), plan_hash=after.plan_hash, steps_charged=1, steps_before=1),)


def _check_fits(budget: Budget, prior: tuple[Entry, ...], entry: Entry) -> None:
    """Raise unless all entries, the release on which the run builds and the run together cost at most the budget."""
    taken, own = budget.history, [part for one in (*prior, entry) for part in one.history]
    total = budget.cost([*taken, *own])
    if total <= budget.epsilon:
        return
    built = ", with the release on which it builds, which the file does not contain yet," if prior else ""
    if entry.step.answers is not None:
        over, instead = "", ". Use more noise or fewer answers (a smaller target_epsilon), or different data"
    elif entry.step.is_selection:
        over, instead = "", ". Use a smaller target_epsilon, a smaller mean number of runs, or different data"
    else:
        over, instead = f" over {entry.num_steps} steps", f"; {_steps_left(budget, entry)}"
    raise BudgetError(
        f"{_allowance(budget, budget.entries, taken)}. This run would by itself{built} cost "
        f"ε = {format_epsilon(budget.cost(own))}{over}, for a total of ε = {format_epsilon(total)}{instead}"
    )


def _steps_left(budget: Budget, entry: Entry) -> str:
    """Return how many of a run's steps a budget allows, and what to do, for an error."""
    step, taken = entry.step, budget.history
    allowed = steps_within(budget.epsilon, budget.delta, step, entry.num_steps, budget.adjacency, taken)
    if not allowed:
        return "none of its steps fits. Use more noise, a smaller expected_batch_size, or different data"
    left = budget.cost([*taken, (step, allowed)])
    return (
        f"{allowed} of its steps still fit, for a total of ε = {format_epsilon(left)}. Use {allowed} "
        "steps, or more noise"
    )


def _allowance(budget: Budget, others: tuple[Entry, ...], taken: History) -> str:
    """Return what a budget allows and what is spent of it, for an error."""
    return (
        f"{budget.path} allows ε = {down(budget.epsilon)} at δ = {format_delta(budget.delta)} ({budget.adjacency}) for "
        f"all runs on {budget.dataset!r}. Spent or reserved by {len(others)} other runs: "
        f"ε = {format_epsilon(budget.cost(taken))}"
    )


def entry_of(budget: Budget, entry_id: str) -> Entry:
    """Return an entry.

    Raises:
        BudgetError: no entry has this id.
    """
    for entry in budget.entries:
        if entry.id == entry_id:
            return entry
    raise BudgetError(
        f"{budget.path} has no entry {entry_id}: it belongs to different runs, or is an old copy. Restore the latest "
        "copy"
    )


def new_entry_id() -> str:
    """Return the id of an entry that a ledger names before its run charges (`dpllm.privacy.run_folder.charging`)."""
    return secrets.token_hex(8)


def _new_entry(plan: Plan, entry_id: str | None = None) -> Entry:
    """Return an entry that reserves what a plan may take."""
    step, count = plan.reserved
    return Entry(
        id=entry_id or new_entry_id(),
        plan_hash=plan.hash,
        step=step,
        steps_reserved=count,
        steps_charged=None,
        steps_before=0,
        charged_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _with_entry(budget: Budget, changed: Entry) -> tuple[Entry, ...]:
    """Return a budget's entries, with the one that has the same id replaced."""
    return tuple(changed if entry.id == changed.id else entry for entry in budget.entries)


def _edited(path: str | Path, what: str) -> BudgetError:
    return BudgetError(
        f"{path} is {what}, so the ε spent cannot be computed. Restore the latest copy, which must have an entry for "
        "every charged run (each run's ledger names its entry)"
    )


def _real(path: str | Path) -> Path:
    """Resolve links, so that all names of the file share one lock, and a link is not replaced by a file."""
    return Path(os.path.realpath(Path(path).expanduser()))


@contextlib.contextmanager
def _changing(path: str | Path) -> Iterator[tuple[Budget, Callable[[tuple[Entry, ...]], None]]]:
    """Lock the file, and yield its contents and the function that replaces its entries."""
    real = _real(path)
    if not real.exists():
        read_budget(path)  # raises the error, and creates no lock for a missing file
    with locked(real) as lock:
        budget = read_budget(real)
        lock.require_latest(budget.written, budget.sha256)

        def put(entries: tuple[Entry, ...]) -> None:
            lock.require_held()
            lock.note(*_write(replace(budget, entries=entries)))

        yield budget, put


def _plain(entry: Entry) -> dict[str, Any]:
    fields = {item.name: getattr(entry, item.name) for item in dataclasses.fields(entry)}
    segments, planned = fields.pop("segments"), fields.pop("steps_planned")
    some = {"segments": list(segments)} if segments else {}
    some |= {} if planned is None else {"steps_planned": planned}
    return {**fields, "step": to_fields(entry.step), **some}


def _write(budget: Budget) -> tuple[int, str]:
    """Replace the file, which after any failure is the old or the new one. Return its number and hash."""
    body: dict[str, Any] = {"format": _FORMAT, **{name: getattr(budget, name) for name in _HEAD}}
    body["written"] = budget.written + 1
    body["entries"] = [_plain(entry) for entry in budget.entries]
    text = json.dumps({**body, "sha256": _digest(body)}, indent=2, ensure_ascii=False)
    try:
        write_file(budget.path, text + "\n")
    except OSError as error:
        raise BudgetError(
            f"{budget.path} cannot be written ({error.strerror}). It contains either the old or the new state. Free "
            "space on the disk or repair it, and start again"
        ) from error
    return body["written"], _digest(body)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
