"""Private Evolution: votes of one unit, their noise and charge, and the run from a recipe."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.config import ConfigError
from dpllm.config.yaml12 import write_yaml
from dpllm.methods.evolve.evolution import (
    DECLARED,
    Evolution,
    PrivateRecords,
    evolve,
    exact_votes,
    nearest,
    noisy_votes,
    votes_charge,
)
from dpllm.methods.synthesize.embeddings import Embedder, load_embedder
from dpllm.methods.synthesize.texts import Wanted
from dpllm.models.generation import Sampling
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.calibration import least_noise
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PLAN_FILE
from dpllm.privacy.query_plan import load_plan
from dpllm.report.verify import verify
from tests.cli.test_generate import invoke
from tests.mutations import kills
from tests.report.test_standing import folder_of
from tests.small_model import save_small_model


@st.composite
def people(draw):
    """Records of some units, their labels, and candidates; values that are not finite among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, num_candidates = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    records = rng.normal(size=(rows, 2))
    if draw(st.booleans()):
        records[rng.integers(rows)] = draw(st.sampled_from([np.nan, np.inf, 1e300]))
    units = rng.integers(0, draw(st.integers(1, 4)), size=rows)
    labels = [str(label) for label in rng.integers(0, 3, size=rows)]
    return records, units, labels, rng.normal(size=(num_candidates, 2)), [str(n % 2) for n in range(num_candidates)]


@kills(
    "a unit with several records votes several times in a step",
    "dpllm/methods/evolve/evolution.py",
    "share_N = 1.0 / rows_of_unit[units] if",
    "share_N = np.ones(len(units)) if",
)
@given(people(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_unit_votes_once(made, labelled):
    """Leaving out a unit, with all its records, changes the votes by at most 1, in l1 and so in l2 norm."""
    records, units, labels, candidates, theirs = made

    def votes(keep):
        own = [label for label, kept in zip(labels, keep, strict=True) if kept]
        more = (own, theirs) if labelled else ()
        return exact_votes(records[keep], units[keep], candidates, *more)

    everyone = votes(np.ones(len(units), dtype=bool))
    assert everyone.sum() <= len(set(units.tolist())) + 1e-9 and np.isfinite(everyone).all()
    for unit in set(units.tolist()):
        change = everyone - votes(units != unit)
        assert change.min() >= -1e-9 and change.sum() <= 1 + 1e-9


@kills(
    "a unit moves the votes of others by rounding",
    "dpllm/methods/evolve/evolution.py",
    "return np.rint(np.clip(vectors / largest, -_FARTHEST, _FARTHEST) * steps)",
    "return vectors",
)
@pytest.mark.parametrize("labelled", [False, True])
def test_a_unit_moves_no_vote_of_another(labelled):
    """Where two candidates are the same text, or their distances differ by rounding only: a product of matrices rounds
    a row differently beside fewer rows, and the other units' votes would move with the unit that is left out."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        candidates = rng.normal(size=(int(rng.integers(2, 40)), 64)).astype(np.float32).astype(np.float64)
        candidates[-1] = candidates[0]
        records = candidates[0] + 0.01 * rng.normal(size=(int(rng.integers(2, 30)), 64))
        more = (["a"] * len(records), ["a"] * len(candidates)) if labelled else ()
        fewer = (more[0][1:], more[1]) if labelled else ()
        rest = exact_votes(records[1:], np.arange(len(records) - 1), candidates, *fewer)
        change = exact_votes(records, np.arange(len(records)), candidates, *more) - rest
        assert sorted(change.tolist()) == [0.0] * (len(candidates) - 1) + [1.0]


def test_votes_go_to_the_nearest_candidate():
    """As a loop over pairs finds it; with labels among the candidates of the record's own label."""
    rng = np.random.default_rng(0)
    records, candidates = rng.normal(size=(3000, 5)), rng.normal(size=(7, 5))
    distances = np.array([[np.linalg.norm(one - other) for other in candidates] for one in records])
    assert (nearest(records, candidates) == distances.argmin(1)).all()
    labels, theirs = ["a", "b"] * 1500, ["b", "a", "b", "a", "c", "c", "b"]
    votes = exact_votes(records, np.arange(3000), candidates, labels, theirs)
    assert votes[[1, 3]].sum() == votes[[0, 2, 6]].sum() == 1500 and votes[[4, 5]].sum() == 0
    with pytest.raises(ConfigError, match="no candidate"):
        nearest(records, candidates[:0])


@pytest.mark.parametrize(("target", "sigma"), [(1, 15.40), (2, 8.04), (4, 4.25)])
def test_sigma_is_the_published_one(target, sigma):
    """Yelp, ten steps, δ = 1/(N ln N): Aug-PE's own page has 15.34, 8.03 and 4.24 by a looser search."""
    delta = 1 / (1_939_290 * math.log(1_939_290))

    def history(sigma):
        charge = votes_charge(sigma, 10)
        return [(charge.event, charge.count)]

    found = least_noise(target, delta, history)
    assert found == pytest.approx(sigma, abs=0.006)
    # The same by the closed form of one Gaussian with σ/√T (Balle and Wang, arXiv:1805.06530).
    assert epsilon(history(found), delta) == pytest.approx(target, rel=1e-4)


class Charged:
    """A query run that notes the order of charge and noise."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.randomness = self

    def charge(self, name):
        self.order.append(name)

    def gaussian(self, shape, stddev):
        self.order.append(f"noise {stddev}")
        return np.random.default_rng().normal(0, stddev, shape)


@kills(
    "votes of an evolution have no noise",
    "dpllm/methods/evolve/evolution.py",
    "return exact + run.randomness.gaussian(len(exact), stddev)",
    "return exact",
)
@kills("votes of an evolution are not charged", "dpllm/methods/evolve/evolution.py", "    run.charge(CHARGE)\n", "")
def test_votes_are_charged_and_then_get_their_noise():
    """The noise has the deviation of the plan; votes never leave without it."""
    run = Charged()
    noisy = noisy_votes(run, 3.0, np.zeros(20_000))
    assert run.order == ["votes", "noise 3.0"]
    assert noisy.std() == pytest.approx(3.0, rel=0.05)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sixty records of two kinds, and a small public model."""
    monkeypatch.chdir(tmp_path)
    save_small_model(tmp_path / "model", hidden_size=16)
    lines = [{"text": f"the {'dog' if n % 2 else 'man'} sees", "kind": f"k{n % 2}", "who": n // 3} for n in range(60)]
    (tmp_path / "private.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plain = {
        "model": {"name": "model"},
        "data": {"path": "private.jsonl", "format": "text"},
        "privacy": {"epsilon": 4, "delta": 1e-3},
        "evolve": {"number": 4, "steps": 3, "variations": 2, "max_new_tokens": 4, "prompts": ["the small", "a red"]},
        "output_dir": "made",
    }
    path = tmp_path / "evolve.yaml"
    path.write_text(write_yaml(plain))
    return path


def test_a_recipe_becomes_a_folder_that_verifies(recipe):
    """T votes are charged, ε is the target, and the plan printed the same before."""
    planned = json.loads(invoke(["plan", str(recipe), "--json"]).stdout)
    result = invoke(["methods", "evolve", str(recipe)])
    assert result.exit_code == 0, result.output
    assert "the run costs ε = " in result.output and "step 3 of 3: 4 of 12 candidates" in result.output
    plan = load_plan(Path("made") / PLAN_FILE)
    assert plan.hash == planned["hash"] and 3.99 < plan.epsilon <= 4
    assert read_ledger(Path("made") / LEDGER_FILE).num_steps == 3
    texts = [json.loads(line) for line in Path("made/texts.jsonl").read_text().splitlines()]
    assert len(texts) == 4 and all(set(text) == {"text"} for text in texts)
    assert verify("made").ok, [check for check in verify("made").checks if not check.ok]
    assert "private evolution" in Path("made/privacy_report.md").read_text().lower()


def test_users_and_classes(recipe):
    """A user has one vote, whatever the number of records; classes share the texts evenly."""
    users = ["data.columns.unit=who", "privacy.max_rows_per_unit=3"]
    classes = ["evolve.classes=[k0, k1]", "evolve.label_column=kind", "evolve.prompts=['the {label}']"]
    result = invoke(["methods", "evolve", str(recipe), *users, *classes, "evolve.file_format=parquet"])
    assert result.exit_code == 0, result.output
    plan = load_plan(Path("made") / PLAN_FILE)
    assert plan.num_units == 20 and plan.charges[0].count == 3 and dict(plan.settings)["votes of a unit in a step"] == 1
    assert Path("made/texts.parquet").is_file() and verify("made").ok


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["evolve.classes=[k0, other]", "evolve.label_column=kind", "evolve.prompts=['{label}']"], "2 public classes"),
        (["evolve.classes=[k0, k1]", "evolve.label_column=sort", "evolve.prompts=['{label}']"], "no column 'sort'"),
        (["data.format=chat"], "has no column of texts to imitate"),
        (["model=null"], "evolve needs a public model"),
        (["model.name=nowhere"], "nowhere"),
        (["evolve.steps=0"], "steps"),
        (["evolve.keep_from=0.9"], "above keep_to"),
        (["evolve.prompts=[]"], "must be a list of at least 1, got"),
        (["evolve.classes=[a]"], "must be a list of at least 2, got"),
        (["evolve.classes=[a, b]"], "needs label_column"),
        (["evolve.label_column=kind"], "needs classes"),
        (["evolve.classes=[a, b]", "evolve.label_column=kind"], "one prompt with {label}"),
        (["evolve.number=0"], "number"),
        (["evolve.file_format=csv"], "jsonl"),
        (["privacy.noise_multiplier=1"], "exactly one of epsilon"),
    ],
)
def test_mistakes_are_found_before_a_charge(recipe, overrides, words):
    result = invoke(["methods", "evolve", str(recipe), *overrides])
    assert result.exit_code == 2 and words in result.stderr.splitlines()[-1], result.output
    assert not (Path("made") / LEDGER_FILE).exists()


@kills(
    "an evolution takes a model that a private run trained",
    "dpllm/methods/evolve/evolution.py",
    "        refuse_private_start(name, recipe.model is not None and recipe.model.start_is_independent)\n",
    "        pass\n",
)
def test_a_model_of_a_private_run_is_refused(recipe, tmp_path):
    """Its texts depend on private records, and ε of the votes would not cover them; in a folder inside, too."""
    (tmp_path / "run").mkdir()
    folder_of(tmp_path / "run")
    places = ("run", "run/merged", "run/copies/of/checkpoint-4")
    for place in places[1:]:
        save_small_model(tmp_path / place, hidden_size=16)
    for name in ("model.name", "evolve.embedding"):
        for place in places:
            result = invoke(["methods", "evolve", str(recipe), f"{name}={place}"])
            assert result.exit_code == 2 and "a private run (" in result.stderr.splitlines()[-1], result.output
    result = invoke(["methods", "evolve", str(recipe), "model.name=run/merged", "model.start_is_independent=true"])
    assert result.exit_code == 0, result.output
    assert DECLARED in read_ledger(tmp_path / "made" / LEDGER_FILE).notes.open_points


def test_records_are_embedded_one_by_one(recipe, monkeypatch):
    """A record's embedding does not depend on the others, to the last bit: its vote could change by rounding."""
    sizes = []
    embed = Embedder.embed

    def seen(self, texts, batch_size=64):
        if len(texts) == 60:  # the private records
            sizes.append(batch_size)
        return embed(self, texts, batch_size)

    monkeypatch.setattr(Embedder, "embed", seen)
    assert invoke(["methods", "evolve", str(recipe)]).exit_code == 0
    assert sizes == [1]


class Run:
    """A query run whose noise is nearly nothing, to see where exact votes lead."""

    def __init__(self) -> None:
        self.charged = 0
        self.randomness = self

    def charge(self, name):
        self.charged += 1

    def gaussian(self, shape, stddev):
        return np.random.default_rng(self.charged).normal(0, 1e-6, shape)

    def generator(self):
        return np.random.default_rng(0)


class Digits:
    """A model that adds a digit to a text."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def sample(self, prompts, sampling, batch_size=16):
        yield [f" {digit}" for digit in self.rng.integers(0, 10, len(prompts))]


def mean_digit(texts):
    return np.array([[np.mean([int(word) for word in text.split() if word.isdigit()] or [0])] for text in texts])


def test_votes_steer_the_texts():
    """Records near 8 lead to texts near 8; each step is charged once."""
    run, records = Run(), PrivateRecords(np.full((50, 1), 8.0), np.arange(50))
    settings = Evolution(number=6, steps=8, variations=3, keep=(0.3, 0.9), sampling=Sampling())
    made = evolve(run, records, Digits(), mean_digit, [Wanted("", 6)], settings, 1.0)
    assert run.charged == 8 and len(made) == 6
    first = mean_digit([text for batch in Digits().sample([""] * 100, None) for text in batch]).mean()
    assert abs(mean_digit([made[0]["text"]])[0, 0] - 8) < abs(first - 8)


def test_an_embedding_depends_on_its_text_only(tmp_path):
    """Not on its batch; a text without a token is a row of zeros."""
    embedder = load_embedder(str(save_small_model(tmp_path, hidden_size=16)))
    texts = ["the small dog sees a red house", "one", "seven clouds under the bridge"]
    together, alone = embedder.embed(texts), np.concatenate([embedder.embed([text]) for text in texts])
    assert together.shape == (3, 16) and np.abs(together - alone).max() < 1e-5
    assert np.abs(embedder.embed(texts[::-1])[::-1] - together).max() < 1e-5
    assert len(embedder.embed([])) == 0
    with pytest.raises(ConfigError, match="nowhere"):
        load_embedder(str(tmp_path / "nowhere"))


def test_a_long_text_does_not_change_the_embedding_of_a_later_one(tmp_path):
    """Dynamic rotary embeddings keep the longest text so far: tokens beyond the model's own length are not read."""
    folder = save_small_model(tmp_path, hidden_size=16)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 8
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    embedder = load_embedder(str(folder))
    text = "the small dog sees a red house and the old man"
    before = embedder.embed([text])
    embedder.embed([f"{text} {text} {text}"])
    assert embedder.most == 8 and np.array_equal(embedder.embed([text]), before)
