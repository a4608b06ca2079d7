"""Parts named in recipes are created or refused by name, and events in ledgers are read back as written."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from dpllm.mechanism.banded import BandedNoise, BandedStep
from dpllm.mechanism.blt import BltNoise, BltStep
from dpllm.mechanism.catalogue import CLIPPINGS, clipping_of, events, from_fields, noise_of, noises, spec_of, to_fields
from dpllm.mechanism.discrete import DiscreteStep
from dpllm.mechanism.events import Step, StepOfRows
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.parts import Draw, Mechanism, Spec
from dpllm.mechanism.query import Query, Several
from dpllm.mechanism.selection import SelectedRun
from dpllm.methods.aggregate.combination import ThresholdedCounts
from dpllm.methods.federated.distributed import DistributedStep
from dpllm.methods.predict.token_draw import TokenDraw

ROOT = Path(__file__).resolve().parents[2]
STEPS = [
    Step(num_units=100, sampling_rate=0.1, max_batch_size=30, noise_multiplier=1.0, clip_norm=0.5),
    StepOfRows(num_units=100, sampling_rate=0.1, rows_per_unit=3, noise_multiplier=1.0),
    BandedStep(num_units=100, sampling_rate=0.4, max_batch_size=30, noise_multiplier=1.0, bands=4),
    DiscreteStep(num_units=100, sampling_rate=0.1, max_batch_size=30, noise_multiplier=1.0, sensitivity=1.01),
    DistributedStep(
        num_units=100, sampling_rate=0.5, max_batch_size=90, noise_multiplier=1.0, min_batch_size=11, dropouts=0.2
    ),
    BltStep(num_units=100, batch_size=9, noise_multiplier=1.0, decays=(0.9, 0.5), weights=(0.2, 0.3), scale=0.5),
    SelectedRun(sampling_rate=0.1, noise_multiplier=1.0, num_rounds=20, runs="geometric", mean_runs=10),
    Query(noise_multiplier=2.0, replaced=1.5, discrete=True),
    TokenDraw(noise_multiplier=12.0),
    ThresholdedCounts(noise_multiplier=4.0, margin=5.0),
    Several(parts=((Query(noise_multiplier=2.0), 3), (Step(sampling_rate=0.1, noise_multiplier=1.0), 2))),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.kind)
def test_events_are_read_back(step):
    """Equal, with equal hashes, so that equal steps are counted together."""
    again = from_fields(to_fields(step))
    assert again == step and hash(again) == hash(step) and type(again) is type(step)


def test_every_kind_of_event_is_tried_above():
    """A new mechanism adds its own."""
    assert {step.kind for step in STEPS} == set(events())


def test_unknown_events_are_refused():
    """A ledger of a later version, or a forged one."""
    with pytest.raises(ValueError, match="event kind 'later"):
        from_fields({"event": "later"})
    with pytest.raises(ValueError, match="kind None"):
        from_fields({"sampling_rate": 0.1, "noise_multiplier": 1.0})


@pytest.mark.parametrize("value", ["banded", {"kind": "banded", "bands": 4}, Spec("banded", (("bands", 4),))])
def test_specifications_are_written_as_they_were_given(value):
    """A word or a mapping."""
    spec = Spec.of(value)
    assert Spec.of(spec.to_plain()) == spec and spec.kind == "banded"


@pytest.mark.parametrize("value", [None, 3, {"bands": 4}, {"kind": 3}, ["banded"]])
def test_what_names_no_kind_is_refused(value):
    """The error says which values are valid."""
    with pytest.raises(ValueError, match="mapping with kind"):
        Spec.of(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("adaptve", f"clipping must be one of {', '.join(CLIPPINGS)}, got 'adaptve'"),
        (
            {"kind": "automatic", "stabilty": 1},
            "clipping.stabilty is not an option of 'automatic'; its options are stability",
        ),
        ({"kind": "flat", "stability": 1}, "clipping.stability is not an option of 'flat'; it has no options"),
        ({"kind": "flat", "clip_norm": 1}, "clipping.clip_norm is not an option"),
    ],
)
def test_wrong_clippings_are_refused_by_name(value, text):
    """No option is silently ignored."""
    with pytest.raises(ValueError, match=text):
        clipping_of(Spec.of(value), 1.0)


def test_every_kind_is_described():
    """In the table of the recipes, where users look for it."""
    table = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8").splitlines()
    for part, kinds in (("clipping", CLIPPINGS), ("noise", noises())):
        (row,) = (line for line in table if line.startswith(f"| privacy | `{part}` |"))
        described = set(re.findall(r"[a-z0-9-]+", row))
        assert set(kinds) <= described, f"recipes/README.md says nothing about {sorted(set(kinds) - described)}"


def test_a_number_that_is_no_option_is_not_in_recipes_and_plans(monkeypatch):
    """``field(init=False)``: a part sets it, for instance the sizes of groups, and no user."""

    @dataclasses.dataclass(frozen=True)
    class Sized:
        kind = "sized"
        clip_norm: float
        power: float = 0.5
        sizes: tuple[int, ...] = dataclasses.field(default=(), init=False)

    monkeypatch.setitem(CLIPPINGS, "sized", Sized)
    with pytest.raises(ValueError, match=r"clipping\.sizes is not an option of 'sized'; its options are power$"):
        clipping_of(Spec.of({"kind": "sized", "sizes": [1]}), 1.0)
    part = clipping_of(Spec.of("sized"), 1.0)
    object.__setattr__(part, "sizes", (1, 2))
    assert spec_of(part) == Spec("sized", (("clip_norm", 1.0),))


def test_an_option_that_is_missing_is_named(monkeypatch):
    """The error shows the correct spelling; of a noise whose options have no default."""

    @dataclasses.dataclass(frozen=True)
    class Needy:
        kind = "needy"
        bands: int

    monkeypatch.setitem(noises(), "needy", Needy)
    with pytest.raises(ValueError, match=r"needy\}"):
        noise_of(Spec("needy"))
    assert spec_of(Needy(3)) == Spec("needy", (("bands", 3),))


@pytest.mark.parametrize(
    "noise",
    [
        IndependentNoise(),
        BandedNoise(4),
        BandedNoise(8, "geometric", ratio=0.98),
        BandedNoise(3, "free", coefficients=(0.8, 0.5, 0.3)),
        BltNoise(3),
        BltNoise(2, (0.9, 0.5), (0.2, 0.3), 0.7071067811),
    ],
)
def test_a_noise_is_made_again_from_what_a_plan_stores(noise):
    """Through JSON, with all digits; options that are not set are left out."""
    plain = json.loads(json.dumps(spec_of(noise).to_plain()))
    spec = Spec.of(plain)
    assert noise_of(spec) == noise and spec == spec_of(noise) and hash(spec) == hash(spec_of(noise))
    assert None not in (plain.values() if isinstance(plain, dict) else ())


def test_a_mechanism_without_accounting_is_refused():
    """Bands over single rows; a clipping whose sensitivity is not its norm."""
    rows = Draw(num_units=100, population=300, expected_batch_size=30, max_batch_size=300, rows_per_unit=3)
    flat = clipping_of(Spec("flat"), 1.0)
    with pytest.raises(ValueError, match="accounting where"):
        Mechanism(rows, flat, BandedNoise(4), 1.0)

    @dataclasses.dataclass(frozen=True)
    class Wider(type(flat)):
        def sensitivity(self, adjacency):
            return 3.0

    units = Draw(num_units=100, population=100, expected_batch_size=5, max_batch_size=30)
    with pytest.raises(ValueError, match="unit change"):
        Mechanism(units, Wider(1.0), noise_of(Spec("independent")), 1.0)


def test_a_specification_owns_its_options_and_has_a_hash():
    """Lists, tuples and mappings in the options become JSON again; what the caller does later changes nothing."""
    given = {"kind": "groups", "parameters": {"r": "*", "e": ("*wte*", "*wpe*")}, "shares": {"e": 1, "r": 2}}
    spec = Spec.of(given)
    given["parameters"]["e"] = "*"
    plain = {"parameters": {"e": ["*wte*", "*wpe*"], "r": "*"}, "shares": {"e": 1, "r": 2}}
    assert spec.to_plain() == {"kind": "groups", **plain} == json.loads(json.dumps(spec.to_plain()))
    assert Spec.of(spec.to_plain()) == spec and hash(spec) == hash(Spec.of(spec.to_plain()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_units", 1.5), ("num_units", True), ("max_batch_size", float("nan")), ("max_batch_size", 12.9)),
        *(("max_batch_size", True), ("sampling_rate", "1.0"), ("sampling_rate", True), ("clip_norm", 10**400)),
    ],
)
def test_a_forged_number_of_a_step_is_refused(name, value):
    """A number of another kind would be accounted for as if it were none: NaN as no truncation."""
    fields = to_fields(Step(num_units=1000, sampling_rate=0.02, noise_multiplier=1.0, max_batch_size=60))
    assert from_fields(fields) == Step(num_units=1000, sampling_rate=0.02, noise_multiplier=1.0, max_batch_size=60)
    with pytest.raises(ValueError, match=name):
        from_fields({**fields, name: value})
