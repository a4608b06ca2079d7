"""Tests of dpllm.report.check_epsilon, the verifier that travels with a report.

It is run as a stranger runs it: its copy in a folder, by an isolated interpreter that sees nothing of dpllm.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dpllm.report.statement
from dpllm.config import PrivacyConfig
from dpllm.mechanism.events import Event
from dpllm.mechanism.query import Query
from dpllm.methods.aggregate.combination import ThresholdedCounts
from dpllm.methods.predict.token_draw import TokenDraw
from dpllm.privacy import accounting
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerContents, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan, make_plan
from dpllm.privacy.query_plan import Charge, QueryPlan
from dpllm.privacy.stated import stated_history
from dpllm.report import check_epsilon
from dpllm.report.pages import CHECK_FILE, check_text
from dpllm.report.statement import JSON_FILE, write_report
from dpllm.report.verify import verify
from tests.mutations import kills

STEPS = 20


def plan_of(num_units: int = 1000, num_steps: int = STEPS, examples: int | None = None, **privacy: Any) -> PrivacyPlan:
    config = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": 20, **privacy}
    return make_plan(PrivacyConfig(**config), num_units, num_steps, examples)


def charged(folder: Path, plan: PrivacyPlan, *starts: int, **end: Any) -> LedgerContents:
    """Write plan and ledger of a run with these steps in each start, and an end if there is a reason."""
    plan.save(folder / PLAN_FILE)
    path, number = folder / LEDGER_FILE, 0
    for place, count in enumerate(starts):
        with Ledger.open(path, plan) if place else Ledger.create(path, plan) as ledger:
            for _ in range(count):
                ledger.append_step(number, plan.event)
                number += 1
            if end and place == len(starts) - 1:
                ledger.append_end(**end)
    return read_ledger(path)


def stated(folder: Path, plan: PrivacyPlan | QueryPlan, contents: LedgerContents) -> None:
    """Write the numbers of a report that the verifier reads, and the verifier; the whole report takes seconds."""
    history = stated_history(plan, contents)
    found = {name: accounting.epsilon(history, plan.delta, name) for name in ("zero-out", "replace-one")}
    plain = {name: value if math.isfinite(value) else "inf" for name, value in found.items()}
    statement = {"private": True, "epsilon": plain[plan.adjacency], "delta": plan.delta, "adjacency": plan.adjacency}
    report = {
        "statement": {**statement, "epsilon_by_adjacency": plain},
        "accounting": {
            "epsilon": plain,
            "discretization": accounting.discretization_used(history, plan.adjacency),
            "parameters": {"num_steps_charged": contents.num_steps},
        },
        "checkable": {"plan_hash": plan.hash, "ledger_sha256": contents.sha256, "runs": contents.runs},
    }
    (folder / JSON_FILE).write_text(json.dumps(report))
    (folder / CHECK_FILE).write_text(check_text(), encoding="utf-8")


def checked(folder: Path) -> tuple[int, str]:
    """Return exit code and output of the copy in the folder."""
    command = [sys.executable, "-I", "-X", "utf8", "-W", "error", CHECK_FILE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8", check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def event_fields(event: Event) -> dict[str, Any]:
    from dpllm.mechanism.catalogue import to_fields

    return dict(json.loads(json.dumps(to_fields(event))))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with plan, ledger, report and verifier."""
    plan = plan_of()
    stated(tmp_path, plan, charged(tmp_path, plan, STEPS, reason="completed"))
    return tmp_path


def test_it_is_short_and_needs_only_numpy() -> None:
    """Somebody who trusts nobody can read all of it, and no code of dpllm or its libraries computes the numbers."""
    text = check_text()
    assert len(text.splitlines()) <= 300 and max(map(len, text.splitlines())) <= 120
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {one.name.split(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(str(node.module).split(".")[0])
    assert names - set(sys.stdlib_module_names) == {"numpy"}
    assert "__import__" not in text and "importlib" not in text


USERS = {"unit": "author", "max_rows_per_unit": 4}
KINDS: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    "truncated often": ({"max_batch_size": 24}, (STEPS,), {"reason": "completed"}),
    "never truncated": ({"max_batch_size": 1000}, (STEPS,), {"reason": "completed"}),
    "small ε": ({"num_units": 20_000, "noise_multiplier": 20.0}, (STEPS,), {"reason": "completed"}),
    "ε below the least": ({"num_units": 100_000, "noise_multiplier": 50.0}, (STEPS,), {"reason": "completed"}),
    "large ε": ({"noise_multiplier": 0.25}, (STEPS,), {"reason": "completed"}),
    "tiny δ": ({"delta": 1e-12}, (STEPS,), {"reason": "completed"}),
    "full batch": ({"num_units": 20, "noise_multiplier": 8.0}, (STEPS,), {"reason": "completed"}),
    "rows of users": ({"examples": 3000, "sampling": "example", **USERS}, (STEPS,), {"reason": "completed"}),
    "stopped early": ({}, (7,), {"reason": "interrupted"}),
    "stopped early, declared": ({}, (7,), {"reason": "out of time", "independent": True}),
    "resumed": ({}, (5, 7, 8), {"reason": "completed"}),
    "banded": ({"noise": {"kind": "banded", "bands": 4}}, (6, 14), {"reason": "completed"}),
    "BLT": ({"noise": {"kind": "blt", "buffers": 2}, "num_steps": 100, "noise_multiplier": 4.0}, (50, 20), {}),
    "discrete noise": ({"randomness": "discrete"}, (STEPS,), {"reason": "completed"}),
    "discrete noise, small ε": (
        {"randomness": "discrete", "num_units": 20_000, "noise_multiplier": 3.0},
        (STEPS,),
        {"reason": "completed"},
    ),
    "quantile clipping": ({"clipping": {"kind": "quantile", "quantile": 0.5}}, (STEPS,), {"reason": "completed"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_every_kind_of_training(tmp_path: Path, kind: str) -> None:
    """Both adjacencies, and what stops and resumes cost."""
    options, starts, end = KINDS[kind]
    plan = plan_of(**options)
    stated(tmp_path, plan, charged(tmp_path, plan, *starts, **end))
    code, words = checked(tmp_path)
    assert code == 0 and words.count(": agrees") == 2, words


def query_run(folder: Path, *charges: tuple[Event, int]) -> None:
    named = tuple(Charge(name=f"answers {i}", event=event, count=count) for i, (event, count) in enumerate(charges))
    numbers = {"unit": "sequence", "adjacency": "zero-out", "num_units": 1000, "delta": 1e-5}
    plan = QueryPlan(method="label counts", charges=named, **numbers)  # type: ignore[arg-type]
    plan.save(folder / PLAN_FILE)
    with Ledger.create(folder / LEDGER_FILE, plan) as ledger:
        for charge in named:
            ledger.append_charge(charge.name, charge.event, charge.count)
        ledger.append_end("completed")
    stated(folder, plan, read_ledger(folder / LEDGER_FILE))


@pytest.mark.parametrize(
    "charges",
    [
        [(Query(noise_multiplier=10.0), 20), (Query(noise_multiplier=8.0, replaced=2**0.5), 5)],
        [(Query(noise_multiplier=10.0, replaced=None), 20)],
        [(Query(noise_multiplier=10.0, discrete=True), 20)],
        [(TokenDraw(noise_multiplier=50.0), 100)],
    ],
)
def test_it_agrees_with_query_runs(tmp_path: Path, charges: list[tuple[Event, int]]) -> None:
    """Gaussian and discrete answers, and tokens."""
    query_run(tmp_path, *charges)
    code, words = checked(tmp_path)
    assert code == 0, words


def test_what_it_cannot_compute_is_said_and_never_passes(tmp_path: Path) -> None:
    """Such as thresholded counts, or a folder without files."""
    query_run(tmp_path, (ThresholdedCounts(noise_multiplier=10.0, margin=6.0), 2))
    code, words = checked(tmp_path)
    assert code == 2 and "CANNOT BE CHECKED" in words and "thresholded counts" in words
    (tmp_path / PLAN_FILE).unlink()
    assert checked(tmp_path)[0] == 2


def test_a_selection_among_runs_is_not_checked(tmp_path: Path) -> None:
    """The ε of the best of several runs follows from other divergences."""
    plan = plan_of(selection={"kind": "geometric", "mean": 5})
    stated(tmp_path, plan, charged(tmp_path, plan, STEPS, reason="completed"))
    code, words = checked(tmp_path)
    assert code == 2 and "best of several runs" in words


def test_half_a_line_of_a_crash_is_a_step(tmp_path: Path) -> None:
    """At the end of a ledger that nobody continued, and before the line that mends it."""
    plan = plan_of()
    charged(tmp_path, plan, 8)
    path = tmp_path / LEDGER_FILE
    path.write_bytes(path.read_bytes()[:-70])
    stated(tmp_path, plan, read_ledger(path))
    assert checked(tmp_path)[0] == 0
    with Ledger.open(path, plan) as ledger:
        for number in range(8, STEPS):
            ledger.append_step(number, plan.event)
    stated(tmp_path, plan, read_ledger(path))
    code, words = checked(tmp_path)
    assert code == 0 and "read: 20 charged, 2 start(s)" in words, words


def rechained(folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Edit the lines of a ledger, and redo its hashes and the one in the report."""
    path, chain, done = folder / LEDGER_FILE, hashlib.sha256(b"dpllm privacy ledger, format 1").hexdigest()[:16], ""
    for line in change([json.loads(line) for line in path.read_text().splitlines()]):
        body = json.dumps({name: value for name, value in line.items() if name != "chain"})
        chain = hashlib.sha256(f"{chain}{body}".encode()).hexdigest()[:16]
        done += f'{body[:-1]}, "chain": "{chain}"}}\n'
    path.write_text(done)
    in_report(
        folder, lambda report: report["checkable"].update(ledger_sha256=hashlib.sha256(done.encode()).hexdigest())
    )


def in_report(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    report = json.loads((folder / JSON_FILE).read_text())
    change(report)
    (folder / JSON_FILE).write_text(json.dumps(report))


def counted(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, line in enumerate(line for line in lines if line["kind"] == "step"):
        line["step"] = number
    return lines


def changed(name: str, value: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return an edit of one number of the event of all steps; None takes it out."""

    def change(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in (line.get("planned_step", line) for line in lines if line["kind"] in ("run", "step")):
            event.update({name: value})
            if value is None:
                del event[name]
        return lines

    return change


def lowered(report: dict[str, Any]) -> None:
    values = report["statement"]["epsilon_by_adjacency"]
    values.update({name: 0.97 * value for name, value in values.items()})
    report["statement"]["epsilon"] *= 0.97


def without_a_line(folder: Path) -> None:
    lines = (folder / LEDGER_FILE).read_text().splitlines(keepends=True)
    (folder / LEDGER_FILE).write_text("".join(lines[:5] + lines[6:]))


EDITS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a line removed": (without_a_line, "ledger line 6: edited"),
    "a step fewer, chain redone": (
        lambda folder: rechained(folder, lambda lines: counted([line for line in lines if line.get("step") != 7])),
        "the report counts 20 steps, and the ledger 19",
    ),
    "a line twice": (
        lambda folder: rechained(folder, lambda lines: counted([*lines[:6], dict(lines[5]), *lines[6:]])),
        "the ledger 21",
    ),
    "a number twice": (
        lambda folder: rechained(folder, lambda lines: [*lines[:6], *lines[5:]]),
        "not the step planned",
    ),
    "σ edited": (lambda folder: rechained(folder, changed("noise_multiplier", 2.0)), "noise_multiplier"),
    "q edited": (lambda folder: rechained(folder, changed("sampling_rate", 0.01)), "sampling_rate"),
    "C edited": (lambda folder: rechained(folder, changed("clip_norm", 2.0)), "clip_norm"),
    "B_max taken out": (lambda folder: rechained(folder, changed("max_batch_size", None)), "max_batch_size"),
    "N taken out": (lambda folder: rechained(folder, changed("num_units", None)), "num_units"),
    "a field of another kind": (lambda folder: rechained(folder, changed("replaced", 0.05)), "replaced"),
    "begun again after the report": (
        lambda folder: Ledger.open(folder / LEDGER_FILE, PrivacyPlan.load(folder / PLAN_FILE)).close(),
        "begun again after the report",
    ),
    "another kind": (lambda folder: rechained(folder, changed("event", "blt")), "event"),
    "one step with another σ": (
        lambda folder: rechained(
            folder,
            lambda lines: [{**one, **({"noise_multiplier": 2.0} if one.get("step") == 3 else {})} for one in lines],
        ),
        "not the step planned",
    ),
    "ε lowered": (lambda folder: in_report(folder, lowered), "ε under zero-out"),
    "headline lowered": (
        lambda folder: in_report(folder, lambda report: report["statement"].update(epsilon=0.1)),
        "several ε",
    ),
    "δ edited": (
        lambda folder: in_report(folder, lambda report: report["statement"].update(delta=1e-3)),
        "δ of the report",
    ),
    "plan swapped": (lambda folder: plan_of(noise_multiplier=2.0).save(folder / PLAN_FILE), "a run of another plan"),
    "plan edited": (
        lambda folder: (folder / PLAN_FILE).write_text(
            (folder / PLAN_FILE).read_text().replace('"num_steps": 20', '"num_steps": 30')
        ),
        "the plan's hash",
    ),
    "a line cut off": (
        lambda folder: (folder / LEDGER_FILE).write_text(
            "".join((folder / LEDGER_FILE).read_text().splitlines(True)[:-1])
        ),
        "lines that it lost",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_folders_differ(run: Path, edit: str) -> None:
    """Each edit is named."""
    change, words = EDITS[edit]
    change(run)
    code, found = checked(run)
    assert code == 1 and "DIFFERS" in found and words in found, found


def test_steps_beyond_the_plan_differ(tmp_path: Path) -> None:
    """A ledger whose report counts them all, and states their ε."""
    longer, plan = plan_of(num_steps=STEPS + 1), plan_of()
    contents = charged(tmp_path, longer, STEPS + 1, reason="completed")
    stated(tmp_path, longer, contents)
    plan.save(tmp_path / PLAN_FILE)
    rechained(
        tmp_path, lambda lines: [{**one, **({"plan_hash": plan.hash} if one["kind"] == "run" else {})} for one in lines]
    )
    in_report(tmp_path, lambda report: report["checkable"].update(plan_hash=plan.hash))
    code, words = checked(tmp_path)
    assert code == 1 and "21 steps, and 20 planned" in words


def step(**fields: Any) -> dict[str, Any]:
    return {"event": "poisson", "sampling_rate": 1.0, "noise_multiplier": 1.0, **fields}


def analytic(sigma: float, epsilon: float) -> float:
    """Return δ of a Gaussian sum (Balle and Wang, arXiv:1805.06530, theorem 8)."""
    a, b = (sigma * epsilon + sign / (2 * sigma) for sign in (-1, 1))
    return (math.erfc(a / math.sqrt(2)) - math.exp(epsilon) * math.erfc(b / math.sqrt(2))) / 2


@kills(
    "the verifier's bounds leave out how far rounding moves a sum",
    "dpllm/report/check_epsilon.py",
    "        at = epsilons + sign * off\n",
    "        at = epsilons - sign * off\n",
)
@pytest.mark.parametrize("sigma", [0.3, 1.0, 30.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-12])
def test_its_bounds_hold_the_closed_form(sigma: float, delta: float) -> None:
    """Of one Gaussian sum over all units."""
    low, high, _ = check_epsilon.recompute([(step(noise_multiplier=sigma), 1)], delta, False)
    assert low < high < 1.02 * low
    assert analytic(sigma, high) <= delta <= analytic(sigma, low)


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta", "published"),
    [(0.02, 1.0, 1500, 1e-5, 4.8136), (0.01, 4.0, 10_000, 1e-5, 0.9481)],
)
def test_published_numbers(rate: float, sigma: float, steps: int, delta: float, published: float) -> None:
    """Of Poisson sampled Gaussian sums; the second is the example of Abadi et al. (arXiv:1607.00133), by PLD."""
    low, high, _ = check_epsilon.recompute([(step(sampling_rate=rate, noise_multiplier=sigma), steps)], delta, False)
    assert low <= published <= high < 1.02 * low


def test_zcdp_of_discrete_noise() -> None:
    """ρ = 0.1 at δ = 1e-5: between the tight conversion and ρ + 2 sqrt(ρ log(1/δ)) (arXiv:1605.02065)."""
    query = event_fields(Query(noise_multiplier=10.0, discrete=True))
    low, high, _ = check_epsilon.recompute([(query, 20)], 1e-5, False)
    assert low < high < 0.1 + 2 * math.sqrt(0.1 * math.log(1e5))
    assert high == pytest.approx(1.9143, rel=1e-3)


def test_the_report_brings_it_and_verify_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole report; its hash is in the ledger, and an edited copy is found."""
    monkeypatch.setattr(dpllm.report.statement, "_CURVE_FACTORS", (1.0,))
    plan = plan_of()
    report = write_report(tmp_path, plan, charged(tmp_path, plan, STEPS, reason="completed"))
    assert (tmp_path / CHECK_FILE).read_text(encoding="utf-8") == check_text()
    code, words = checked(tmp_path)
    assert code == 0 and f"stated ε {report.statement.epsilon:.6g}" in words and "NOT checked: " in words
    for page in ("privacy_report.md", "privacy_report.html"):
        assert f"python {CHECK_FILE}" in (tmp_path / page).read_text(encoding="utf-8")
    (named,) = (check for check in verify(tmp_path).checks if CHECK_FILE in check.what)
    assert named.passed and "`python check_epsilon.py`" in named.detail
    (tmp_path / CHECK_FILE).write_text(check_text().replace("1.02", "9.02"), encoding="utf-8")
    assert [check.what for check in verify(tmp_path).checks if not check.ok] == [f"{CHECK_FILE} is as dpllm wrote it"]
    (tmp_path / CHECK_FILE).unlink()
    assert not verify(tmp_path).ok
