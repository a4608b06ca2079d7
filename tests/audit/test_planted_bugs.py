"""The gradient audit refutes the claim of a broken package, and finds nothing against the sound one.

Each bug is planted in a copy of the package, as `tests.mutations` does it, and the audit runs on the copy.
``python -m tests.audit.test_planted_bugs`` prints the table.

A run notices some of these bugs by itself: its guard stops the first update that no private step could have made, the
check of independent rows stops a loss that depends on the batch, and draws in which a unit comes back too early for
correlated noise are refused. These are off in the copies, so that only the audit can see the bug. An unknown order of
units is beyond a lower bound of this size; the accountant does not support shuffling, and refuses it by name.
"""

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dpllm.audit.result import CONSISTENT, FAIL
from tests import children, tiers
from tests.audit.planted import SETUPS, summary

ROOT = Path(__file__).resolve().parents[2]
GUARD = ("dpllm/engines/guard.py", "            raise _refusal(", "            _refusal(")
APART = (
    "dpllm/mechanism/noise.py",
    "        if not len(unit_ids):\n            return\n",
    "        return\n",
)
Edit = tuple[str, str, str]
NOISE_FREE: tuple[Edit, ...] = (
    (
        "dpllm/training/step.py",
        "            if self._last:\n",
        "            self._clipper.add_clipped_sum_(parameter, total)\n"
        "            CLEAN[id(parameter)] = total.filled().clone() * self._scale\n"
        "            if self._last:\n",
    ),
    ("dpllm/training/step.py", "if not self._continues:  # the clipper", "if False:  # the clipper"),
    ("dpllm/training/step.py", "class Release:", "CLEAN: dict = {}\n\n\nclass Release:"),
    (
        "dpllm/training/checks/watch.py",
        "            self._after()\n",
        "            self._after.__self__._rate = rate\n            self._after()\n",
    ),
    (
        "dpllm/training/checks/watch.py",
        "        del optimizer, args, kwargs\n        self._accept",
        "        rate = optimizer.param_groups[0]['lr']\n        self._accept",
    ),
    (
        "dpllm/training/averaging.py",
        "                present = source.fragments.read(name)\n",
        "                from torch.distributed import all_reduce, is_initialized\n"
        "                from dpllm.training.step import CLEAN\n\n"
        "                trained, start = source.fragments._parameters[name], source.fragments.starts[name]\n"
        "                present, clean = source.fragments.read(name), CLEAN[id(trained)]\n"
        "                if is_initialized():\n"
        "                    all_reduce(clean)\n"
        "                own = getattr(trained.grad, 'to_local', lambda: trained.grad)().flatten()\n"
        "                present = present + self._rate * (own - clean.flatten()[start : start + len(own)])\n",
    ),
)


@dataclass(frozen=True)
class Bug:
    """Edits (file, before, after), and the setup that shows them."""

    what: str
    setup: str
    edits: tuple[Edit, ...]
    quick: bool = False
    """Whether ``make test`` plants it as well; ``make test-deep`` plants all."""


BUGS = [
    Bug(
        "no clip",
        "long_gradient",
        (
            (
                "dpllm/mechanism/clipping.py",
                "return (self.clip_norm / norm_GU).clamp_max(1)",
                "return 0 * norm_GU + 1",
            ),
        ),
        quick=True,
    ),
    Bug(
        "noise too small by sqrt(world size)",
        "two_processes",
        (
            (
                "dpllm/training/step.py",
                "name, stddev = self._names[id(parameter)], self._plan.noise_stddev\n",
                "name = self._names[id(parameter)]\n"
                "        stddev = self._plan.noise_stddev / self._engine.processes.size**0.5\n",
            ),
        ),
    ),
    Bug(
        "noise reused on two steps",
        "two_steps",
        (
            (
                "dpllm/training/run.py",
                "                self._entropy.noise,\n                before_update,\n",
                "                self.plan.mechanism.noise.stream(NoiseSource("
                "self._entropy.deal_key((self.ledger.num_steps - 1) // 2)), self.plan.num_steps),\n"
                "                before_update,\n",
            ),
            (
                "dpllm/training/run.py",
                "from dpllm.models.run_weights import",
                "from dpllm.mechanism.generators import NoiseSource\nfrom dpllm.models.run_weights import",
            ),
        ),
    ),
    Bug(
        "norms without the tied cross term",
        "tied_head",
        (("dpllm/ghost/norms.py", "sq_norm_U = sq_norm_U + 2 * _cross(x, y, rows)", "pass"),),
    ),
    Bug(
        "loss averaged over the batch",
        "witnesses",
        (
            (
                "dpllm/models/losses.py",
                ".sum(1) / (target_BT != IGNORE).sum(1).clamp_min(1)",
                ".sum(1) / (target_BT != IGNORE).sum().clamp_min(1)",
            ),
            (
                "dpllm/training/run.py",
                "        self._check_rows(attached, loss_of, self.max_tokens)\n",
                "",
            ),
        ),
    ),
    Bug(
        "shuffled epochs instead of Poisson sampling",
        "epochs",
        (
            (
                "dpllm/training/draws.py",
                "        self._ledger, self._drawn = ledger, drawn\n",
                "        order = np.random.default_rng(0).permutation(plan.num_units)\n"
                "        epoch = np.array_split(order, plan.num_units // plan.expected_batch_size)\n"
                "        self._ledger = ledger\n"
                "        self._drawn = (np.sort(units) for _ in range(plan.num_steps) for units in epoch)\n",
            ),
        ),
    ),
    Bug(
        "padding rows counted",
        "empty_steps",
        (
            (
                "dpllm/ghost/clipper.py",
                "weight_B = (one.rows.unit_B >= 0).to(loss_B.dtype)",
                "weight_B = torch.ones_like(loss_B)",
            ),
            (
                "dpllm/ghost/receivers.py",
                "torch.where(unit_B >= 0, factor_U[unit_B.clamp_min(0)] if factor_U.numel() else 0, 0)",
                "torch.where(unit_B >= 0, factor_U[unit_B.clamp_min(0)] if factor_U.numel() else 1.0, 1.0)",
            ),
            (
                "dpllm/ghost/norm_method.py",
                "return instance_bytes <= factor_bytes",
                "return 0 < instance_bytes <= factor_bytes",
            ),
        ),
    ),
    Bug(
        "a resumed run repeats its noise",
        "resumed",
        (
            (
                "dpllm/training/run.py",
                "NoiseSource(seed, processes.rank, plan.randomness)",
                "NoiseSource(int(ledger.path.read_bytes().splitlines()[0].hex()[:64], 16))",
            ),
        ),
    ),
    Bug(
        "a unit is in two groups",
        "two_bands",
        (
            APART,
            (
                "dpllm/mechanism/banded.py",
                "        groups = np.array_split(rng.permutation(self.num_units), self.bands)\n",
                "        groups = np.array_split(rng.permutation(self.num_units), self.bands)\n"
                "        groups = [np.concatenate([groups[i - 1], groups[i]]) for i in range(self.bands)]\n",
            ),
        ),
    ),
    Bug(
        "bands wider than groups",
        "one_cycle",
        (
            APART,
            (
                "dpllm/mechanism/banded.py",
                "CyclicPoissonSampler(draw.num_units, self._number, draw.expected_batch_size, draw.max_batch_size)",
                "CyclicPoissonSampler(\n            draw.num_units, self._number // 4, 4 * draw.expected_batch_size, "
                "draw.max_batch_size\n        )",
            ),
        ),
    ),
    Bug(
        "groups drawn from the data",
        "many_others",
        (
            (
                "dpllm/training/draws.py",
                "        drawn = self._from_main(self._draw)\n",
                "        drawn = np.sort(np.flatnonzero(present_N)[::-1][self._ledger.num_steps % 2 :: 2])\n",
            ),
        ),
    ),
    Bug(
        "a resumed run goes on with stored noise",
        "resumed_bands",
        (
            (
                "dpllm/training/run.py",
                "        self.noise = stream_of(plan.mechanism.noise, generator, plan.num_steps, noise_memory)\n"
                "        self.first = ledger.num_steps\n",
                "        new = stream_of(plan.mechanism.noise, generator, plan.num_steps, noise_memory)\n"
                "        self.noise = _STORED.setdefault(str(ledger.path), new)\n        self.first = 0\n",
            ),
            ("dpllm/training/run.py", "class RunEntropy:", "_STORED: dict = {}\n\n\nclass RunEntropy:"),
        ),
    ),
    Bug(
        "the count of a quantile is divided by the realised batch",
        "counted",
        (
            (
                "dpllm/training/step.py",
                ".clamp(-0.5, 0.5).sum()",
                ".clamp(-0.5, 0.5).mean().nan_to_num() * self._plan.expected_batch_size",
            ),
        ),
    ),
    Bug(
        "the noise of each layer is that of its own bound",
        "layers",
        (
            (
                "dpllm/training/step.py",
                "self._names[id(parameter)], self._plan.noise_stddev\n",
                "self._names[id(parameter)], self._plan.noise_stddev / len(self._clipper.clipping.groups("
                "{n: p.shape for n, p in self._clipper.parameters.items()})) ** 0.5\n",
            ),
        ),
    ),
    Bug(
        "the noise of a fixed order counts one pass",
        "fixed_order",
        (
            (
                "dpllm/mechanism/blt.py",
                "    visits[: separation * participations : separation] = 1.0\n",
                "    visits[0] = 1.0\n",
            ),
        ),
    ),
    Bug("weights without the noise of their step are averaged", "averaged", NOISE_FREE),
    Bug("shards without the noise of their step are averaged, fsdp2", "averaged_shards", NOISE_FREE),
    Bug(
        "counts of labels are exact",
        "counts",
        (
            (
                "dpllm/methods/count/counting.py",
                "    noisy = run.randomness.noisy(counts, event.noise_multiplier, run.plan.max_rows_per_unit or 1)",
                "    noisy = list(counts)",
            ),
        ),
    ),
    Bug(
        "counts have the noise of one row of a user",
        "counts_of_users",
        (
            (
                "dpllm/methods/count/counting.py",
                "run.randomness.noisy(counts, event.noise_multiplier, run.plan.max_rows_per_unit or 1)",
                "run.randomness.noisy(counts, event.noise_multiplier, 1)",
            ),
        ),
    ),
    Bug(
        "all rows of a user are counted",
        "counts_of_users",
        (("dpllm/methods/count/counting.py", "for row in self.index.rows:", "for row in range(len(self.labels)):"),),
    ),
    Bug(
        "votes get the same noise in every step",
        "evolution",
        (
            (
                "dpllm/methods/queries/run.py",
                "PCG64DXSM(secrets.randbits(8 * KEY_BYTES))",
                "PCG64DXSM(20)",
            ),
        ),
    ),
    Bug(
        "each record of a user has a whole vote",
        "evolution_of_users",
        (("dpllm/methods/evolve/evolution.py", "share_N = 1.0 / rows_of_unit[units]", "share_N = 1.0 + 0 * units"),),
    ),
    Bug(
        "teachers share units",
        "teachers",
        (
            (
                "dpllm/methods/pate/votes.py",
                "np.flatnonzero(self.teacher_of == teacher)",
                "np.flatnonzero(self.teacher_of // 2 == teacher // 2)",
            ),
        ),
    ),
    Bug(
        "one label of all is charged",
        "teachers",
        (("dpllm/methods/pate/votes.py", "run.charge(vote.answers, vote.most_labels)", "run.charge(vote.answers)"),),
    ),
    Bug(
        "teachers that write share units",
        "writing_teachers",
        (
            (
                "dpllm/methods/pate/votes.py",
                "np.flatnonzero(self.teacher_of == teacher)",
                "np.flatnonzero(self.teacher_of // 2 == teacher // 2)",
            ),
        ),
    ),
    Bug(
        "one token of all is charged",
        "writing_teachers",
        (
            (
                "dpllm/methods/pate/votes.py",
                "        _charge(vote, run)\n        self.left",
                "        run.charge(vote.answers)\n        self.left",
            ),
        ),
    ),
    Bug(
        "more texts get a label than are charged",
        "confident_teachers",
        (("dpllm/methods/pate/votes.py", "np.where(passed_N & within_N, labels_N", "np.where(passed_N, labels_N"),),
    ),
    Bug(
        "scores of tokens are not clipped",
        "tokens",
        (
            (
                "dpllm/methods/predict/sampler.py",
                ".round().clamp(-MOST, MOST).long()",
                ".clamp(-1e15, 1e15).round().long()",
            ),
        ),
    ),
    Bug(
        "open answers are released whatever their counts are",
        "questions",
        (("dpllm/methods/aggregate/combination.py", "if pair[1] >= least", "if True"),),
    ),
    Bug(
        "the number that a group answers is not clipped to its range",
        "questions",
        (
            (
                "dpllm/methods/aggregate/combination.py",
                'value = min(max(float(found[0].replace(",", "")), self.low), self.high)',
                'value = float(found[0].replace(",", ""))',
            ),
        ),
    ),
    Bug(
        "the counts of listed answers are exact",
        "choices",
        (
            (
                "dpllm/methods/aggregate/combination.py",
                "noisy([list(answers).count(number) for number in range(len(self.answers))], VOTE_CHANGE)",
                "[float(list(answers).count(number)) for number in range(len(self.answers))]",
            ),
        ),
    ),
    Bug(
        "the realised length of a text is charged",
        "tokens",
        (
            ("dpllm/methods/predict/run.py", "    run.charge(CHARGE, tokens.tokens)\n", ""),
            (
                "dpllm/methods/predict/run.py",
                "    for number in range(texts):\n        yield made(number, groups[number % len(groups)])",
                "    found = [made(number, groups[number % len(groups)]) for number in range(texts)]\n"
                "    run.charge(CHARGE, max(1, *map(len, found)))\n"
                "    yield from found",
            ),
        ),
    ),
    Bug(
        "each record of a user adds as much as a whole user",
        "tokens_of_users",
        (
            (
                "dpllm/methods/predict/sampler.py",
                'torch.div(steps_RV, rows_of_unit_R[:, None], rounding_mode="trunc")',
                "steps_RV",
            ),
        ),
    ),
    Bug(
        "updates of clients are not clipped",
        "rounds",
        (
            (
                "dpllm/methods/federated/client.py",
                "return update if size <= (1 - 1e-12) * plan.clip_norm else update",
                "return update if size >= 0 else update",
            ),
        ),
    ),
    Bug(
        "clients add the noise of a cohort without dropouts",
        "secure_rounds",
        (
            (
                "dpllm/methods/federated/client.py",
                "math.sqrt(event.min_batch_size)",
                "math.sqrt(plan.expected_batch_size)",
            ),
        ),
    ),
]


@cache
def sound(setup: str) -> dict[str, Any]:
    """The result of the audit of the unchanged package."""
    return summary(SETUPS[setup]())


def planted(bug: Bug) -> dict[str, Any]:
    """The result of the audit of a copy of the package with the bug in it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("dpllm", "tests/audit", "tests/distributed"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("__init__.py", "children.py", "memory_ledger.py"):
            shutil.copy(ROOT / "tests" / name, copy / "tests" / name)
        for file, before, after in (*bug.edits, GUARD):
            source = (copy / file).read_text()
            assert before in source, f"{file} no longer contains {before!r}"
            (copy / file).write_text(source.replace(before, after))
        done = children.run(
            [sys.executable, "-m", "tests.audit.planted", bug.setup],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        )
        return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_a_bug_is_planted_in_the_code_as_it_is(bug):
    """Each of its edits changes a file, which can still be compiled."""
    for file, before, after in (*bug.edits, GUARD):
        source = (ROOT / file).read_text()
        assert before in source, f"{file} no longer contains {before!r}"
        compile(source.replace(before, after), file, "exec")


@pytest.mark.parametrize("bug", [pytest.param(b, id=b.what, marks=() if b.quick else tiers.deep) for b in BUGS])
def test_a_planted_bug_is_refuted(bug):
    """The lower bound is above the claim, which is below the highest bound of this many coins; or noise is missing."""
    found = planted(bug)
    assert found["verdict"] == FAIL and (found["lower"] > found["claimed"] or found["noise"]), found
    assert found["claimed"] < found["ceiling"]


@pytest.mark.parametrize(
    "setup", [pytest.param(b.setup, marks=() if b.quick else tiers.deep) for b in {b.setup: b for b in BUGS}.values()]
)
def test_the_sound_package_is_not(setup):
    """The same audits of the package as it is; a false alarm has a probability of 1 in 1000."""
    found = sound(setup)
    assert found["verdict"] == CONSISTENT and found["lower"] <= found["claimed"], found


def test_every_setup_has_its_bug():
    """No setup only shows that nothing is found."""
    assert {bug.setup for bug in BUGS} == set(SETUPS)


def main() -> None:
    """Print the table."""
    print(f"{'bug':<44} {'attack, method':<72} {'ε >=':>7} {'claimed':>8} {'verdict':<8} {'sound: ε >=':>11} verdict")
    for bug in BUGS:
        found, whole = planted(bug), sound(bug.setup)
        print(
            f"{bug.what:<44} {found['attack'] + ', ' + found['method']:<72} {found['lower']:>7.2f} "
            f"{found['claimed']:>8.2f} {found['verdict']:<8} {whole['lower']:>11.2f} {whole['verdict']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
