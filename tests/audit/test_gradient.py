"""The parts of the gradient audit: directions, releases, scores, refusals. Whole audits: `test_planted_bugs`."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from dpllm import PrivateRun
from dpllm.audit.bounds import AuditError
from dpllm.audit.gradient import (
    Basis,
    Design,
    Observations,
    Restarts,
    Steps,
    _check_plain_sgd,
    judge_releases,
    known_orders,
    observe,
    scores_of,
    strategy,
    unit_gradients,
    updates_by_itself,
    whole_gradient,
    whole_parameters,
)
from dpllm.audit.gradient_recipe import Settings
from dpllm.audit.result import CONSISTENT, FAIL
from dpllm.cli.program import app
from dpllm.config import PrivacyConfig
from dpllm.mechanism.averages import MovingAverage, TailMean, weights_of
from dpllm.mechanism.parts import Spec
from dpllm.privacy.accounting import epsilon
from tests.audit.planted import CLIP_NORM, Tied, basis_of, plan_of, text_loss, texts, vectors
from tests.memory_ledger import MemoryLedger
from tests.tiers import deep


def observations(included_RM, canary_RTM, base_RT, *more):
    """What a server has seen; no two releases are alike."""
    alike_R2 = np.zeros((len(included_RM), 2), dtype=np.int64)
    return Observations(included_RM, canary_RTM, base_RT, alike_R2, *more)


def judged(seen, plan, design, verdict):
    """The result of these releases, which has this verdict."""
    found = judge_releases(seen, plan, design, "simulated", 0.999)
    assert found.verdict == verdict, found.summary()
    return found


def returning(rng, num_blocks, strategy_TT, every):
    """Releases of eight steps with this noise, where a unit is in every so many steps from one that is drawn."""
    included, first = rng.random((num_blocks, 1)) < 0.5, rng.integers(0, every, num_blocks)
    present = (np.arange(8) % every == first[:, None]) & included
    canary = correlated_noise(rng, num_blocks, strategy_TT) + CLIP_NORM * present[:, :, None]
    return observations(included, canary, correlated_noise(rng, num_blocks, strategy_TT)[:, :, 0])


def steps_of(noise_multiplier, design, *lengths):
    """A run on the units of `vectors`, every one in every step."""
    model, rows, loss_of = vectors(*lengths)
    plan = plan_of(len(lengths), len(lengths), noise_multiplier, design.num_blocks * design.steps_per_block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    basis = basis_of(model, rows, loss_of, design)
    run = PrivateRun(plan, rows, MemoryLedger())
    run.attach(model, optimizer)
    return Steps(run, model, optimizer, loss_of, design.steps_per_block), basis, model


def test_a_unit_s_gradient_is_that_of_autograd():
    """Of all its rows together, in the order of the parameters, with a tied weight counted once."""
    torch.manual_seed(0)
    model = Tied(7, 3)
    rows = texts(([1, 2, 3], [-100, 2, 3]), ([4, 5], [-100, 5]))
    found = unit_gradients(model, rows, text_loss, [1, 0])
    for unit, gradient in zip((1, 0), found, strict=True):
        model.zero_grad()
        text_loss(model, rows.collate(rows.fetch(np.array([unit])))).sum().backward()
        torch.testing.assert_close(gradient, model.embedding.weight.grad.flatten())
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_canary_s_vector_sees_no_other_unit():
    """Its own gradient with the share that is visible, every other unit's with 0."""
    gradient_KP = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    basis = Basis.of(gradient_KP, num_base=2)
    seen = basis.canary_MP @ (gradient_KP / gradient_KP.norm(dim=1, keepdim=True)).T
    torch.testing.assert_close(seen[:, 2:].diag(), torch.tensor(basis.visible_M).float())
    seen[:, 2:].fill_diagonal_(0)
    assert float(seen.abs().max()) < 1e-5
    torch.testing.assert_close(basis.canary_MP.norm(dim=1), torch.ones(3))
    assert float((gradient_KP[2:] @ basis.base_P).abs().max()) < 1e-5


def test_base_units_may_be_alike():
    """Witnesses with the same row are one direction, which the canaries' vectors avoid."""
    basis = Basis.of(torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [1.0, 1.0, 0]]), num_base=2)
    assert basis.canary_MP[0].tolist() == pytest.approx([0, 1, 0], abs=1e-6)


def test_without_noise_a_release_is_the_clipped_sum():
    """A canary that is there shows C, one that is not 0; AdamW's parameters stay where they are."""
    design = Design(num_base=1, num_canaries=3, num_blocks=8, steps_per_block=2)
    release, basis, model = steps_of(0.0, design, 1, 2, 0.5, 4)
    before = whole_parameters(model, model)
    seen = observe(release, basis, design, 4)
    expected = seen.included_RM[:, None] * np.array([1, 0.5, 1]) * CLIP_NORM
    assert np.abs(seen.canary_RTM - expected).max() < 1e-3
    assert np.abs(seen.base_RT - CLIP_NORM).max() < 1e-3
    assert torch.equal(before, whole_parameters(model, model)) and not whole_gradient(model).any()
    assert not updates_by_itself(model)


def test_the_same_release_twice_is_found_without_the_coins():
    """Of three steps the two whose whole releases are nearest."""
    vectors_TP = [torch.tensor([0.0, 9.0]), torch.tensor([5.0, 0.0]), torch.tensor([5.0, 0.1])]
    design = Design(num_base=1, num_canaries=1, num_blocks=1, steps_per_block=3)
    basis = Basis.of(torch.eye(2), num_base=1)
    assert observe(lambda present: vectors_TP, basis, design, 2).alike_R2.tolist() == [[1, 2]]


def test_scores_of_every_attack():
    """By hand, for one block that is one pass over three units, the last of them a canary."""
    design, plan = Design(2, 1, 1, steps_per_block=3), plan_of(3, 1, 1.0, 3)
    seen = Observations(
        np.array([[True]]), np.array([[[1.0], [2.0], [4.0]]]), np.array([[1.0, 1.0, 0.5]]), np.array([[2, 0]])
    )
    scores = scores_of(seen, plan, design)
    place = int(np.flatnonzero(known_orders(3)["DistributedSampler's"] == 2)[0])
    assert {name: float(score[0, 0]) for name, score in scores.items()} == {
        "total": 7.0,
        "others": -2.5,
        "repeated noise": 3.0,
        "known order (by number)": 4.0,
        "known order (DistributedSampler's)": [1.0, 2.0, 4.0][place],
    }
    one_step = dataclasses.replace(design, steps_per_block=1)
    assert list(scores_of(dataclasses.replace(seen, canary_RTM=np.ones((1, 1, 1))), plan, one_step)) == [
        "total",
        "others",
    ]


def test_the_stock_order_is_torch_s():
    """The order of DistributedSampler in its first epoch, with its default seed."""
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(list(range(11)), num_replicas=1, rank=0)
    assert known_orders(11)["DistributedSampler's"].tolist() == list(sampler)


@pytest.mark.parametrize("noise", [1.0, 0.3])
def test_several_canaries_are_judged_by_both_methods(noise):
    """Simulated releases: with the claimed noise nothing is refuted, with a third of it both methods refute."""
    rng, design, plan = np.random.default_rng(5), Design(1, 4, 400), plan_of(5, 5, 1.0, 400)
    included = rng.random((400, 4)) < 0.5
    canary = CLIP_NORM * (included + noise * rng.normal(size=included.shape))
    seen = observations(included, canary[:, None], rng.normal(size=(400, 1)))
    result = judged(seen, plan, design, CONSISTENT if noise == 1 else FAIL)
    total = result.attacks[0]
    assert total.name == "total" and [bound.method.split(",")[0] for bound in total.bounds] == [
        *["independent runs"] * 2,
        *["one run"] * 2,
    ]
    assert result.canaries.num == 1600 and "simulated" in dict(result.rows())["audited"]
    assert json.dumps(result.to_dict())


@pytest.mark.parametrize(
    ("design", "plan", "match"),
    [
        ({"num_blocks": 11}, {}, "11 blocks of 1 steps need 11 steps, but the plan has 10"),
        ({"num_canaries": 4}, {}, "1 base units and 4 canaries, but the plan is for 4 units"),
        ({}, {"noise_multiplier": 0.0}, "claims nothing that could be refuted"),
        ({}, {"seeded": True}, "fixed seed, so its noise is public"),
    ],
)
def test_plans_that_carry_no_audit_are_refused(design, plan, match):
    """Too few steps or units, no noise, or noise that is known to all."""
    made = dataclasses.replace(plan_of(4, 4, 1.0, 10), **plan)
    with pytest.raises(AuditError, match=match):
        Design(**{"num_base": 1, "num_canaries": 3, "num_blocks": 10, **design}).check(made)


def test_single_rows_are_no_canaries():
    """A plan that draws rows protects users, who would be several canaries."""
    rows = {"unit": "user", "unit_column": "who", "max_rows_per_unit": 1, "rows_kept": "first"}
    plan = dataclasses.replace(plan_of(4, 4, 1.0, 10), sampling="example", num_examples=4, **rows)
    with pytest.raises(AuditError, match="plan draws"):
        Design(1, 3, 10).check(plan)


@pytest.mark.parametrize("name", ["num_base", "num_canaries", "num_blocks", "steps_per_block"])
def test_there_is_at_least_one_of_everything(name):
    """An audit of no canary would always pass."""
    with pytest.raises(AuditError, match=f"{name} is 0"):
        Design(**{"num_base": 1, "num_canaries": 1, "num_blocks": 1, name: 0})


@pytest.mark.parametrize(
    ("gradients", "match"),
    [
        ([[1.0, 0.0], [0.0, 0.0]], "gradient of unit 1 is zero"),
        ([[float("nan"), 0.0], [0.0, 1.0]], "gradient of unit 0 is zero or not finite"),
        ([[1.0, 0.0], [1.0, 0.01]], "canary 0 is nearly a combination"),
        ([[1.0, 1.0, 0.01], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], "canary 0 is nearly"),  # they span the base unit's
    ],
)
def test_gradients_that_can_t_be_told_apart_are_refused(gradients, match):
    """They would make an audit without power, which passes."""
    with pytest.raises(AuditError, match=match):
        Basis.of(torch.tensor(gradients), num_base=1)


def test_packed_rows_are_refused():
    """One row by itself is no packed row."""
    model, rows, loss_of = vectors(1, 2)
    with pytest.raises(AuditError, match="cannot be run"):
        unit_gradients(model, dataclasses.replace(rows, packed=True), loss_of, [0])


def test_releases_of_another_model_are_refused():
    """Fewer vectors than steps, or of another length."""
    basis, design = Basis.of(torch.eye(3), num_base=1), Design(1, 2, 1, steps_per_block=2)
    for released in ([torch.zeros(3)], [torch.zeros(4)] * 2, []):
        with pytest.raises(AuditError, match="the trained model is not"):
            observe(lambda present, released=released: released, basis, design, 3)
    seen = Observations(np.ones((1, 2), bool), np.ones((1, 1, 2)), np.ones((1, 1)), np.zeros((1, 2), dtype=np.int64))
    with pytest.raises(AuditError, match="design"):
        scores_of(seen, plan_of(3, 3, 1.0, 2), design)


@pytest.mark.parametrize(
    "optimizer", [lambda p: torch.optim.AdamW(p), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)]
)
def test_a_movement_that_is_no_gradient_is_refused(optimizer):
    """Adam's step, or momentum's, does not show the release."""
    with pytest.raises(AuditError, match="changes them"):
        _check_plain_sgd(optimizer(nn.Linear(2, 2).parameters()))


def test_a_sampling_rate_gives_whole_units():
    """Another rate than the one asked for would be another claim."""
    assert Settings(base=2, canaries=6, sampling_rate=0.5).audit(privacy_of())[1].sampling_rate == 0.5
    with pytest.raises(AuditError, match="3/10"):
        Settings(base=2, canaries=8, sampling_rate=0.33).audit(privacy_of())


def test_the_mechanism_of_the_recipe_is_audited():
    """Steps that depend on earlier ones are in runs of their own; the claim is that of the recipe's noise."""
    design, plan = Settings(steps=8).audit(privacy_of(noise={"kind": "banded", "bands": 4}))
    assert (
        design.own_runs
        and plan.num_steps == 8
        and plan.num_units == 4
        and plan.event.rounds(8) == (plan.event.rounds(5))
    )
    assert plan.event.sampling_rate == 1 and len(plan.mechanism.noise.column(8)) == 4
    for clipping, own_runs in (("per-layer", False), ("automatic", False), ({"kind": "quantile"}, True)):
        design, plan = Settings(noise_multiplier=0.2).audit(privacy_of(clipping=clipping))
        assert design.own_runs == own_runs and plan.num_steps == (1 if own_runs else 1000)
        assert plan.mechanism.clipping.kind == Spec.of(clipping).kind
    assert Settings().audit(privacy_of(randomness="chacha20"))[1].randomness == "chacha20"
    assert Settings().audit(privacy_of(noise={"kind": "independent"})) == Settings().audit(privacy_of())


@pytest.mark.parametrize(
    ("settings", "part", "remedy"),
    [
        ({}, {"noise": {"kind": "banded", "bands": 4}}, "A block has 1 step.*Add --steps 8"),
        ({}, {"noise": "blt"}, "A block has 1 step.*Add --steps 8"),
        ({"steps": 8}, {"noise": {"kind": "banded"}}, "kind: banded, bands: 4"),
        ({}, {"clipping": {"kind": "quantile"}}, "the count alone would cost more than the step"),
    ],
)
def test_a_mechanism_that_these_settings_would_not_test_is_refused(settings, part, remedy):
    """With the setting that does."""
    with pytest.raises(AuditError, match=remedy):
        Settings(**settings).audit(privacy_of(**part))


@pytest.mark.parametrize(("rate", "apart"), [(1.0, 1), (0.5, 2), (0.25, 4)])
def test_noise_of_a_fixed_order_is_audited_in_runs_of_its_own(rate, apart):
    """Every unit in every step is the worst participation; the claim is one Gaussian release of all steps."""
    design, plan = Settings(base=3, steps=8, sampling_rate=rate).audit(privacy_of(noise="blt"))
    assert design.own_runs and (plan.num_units, plan.num_steps) == (4, 8)
    assert plan.max_batch_size == plan.expected_batch_size == 4 * rate
    assert plan.mechanism.noise.separation(plan.mechanism.draw) == apart
    assert plan.event.sensitivity(8) == pytest.approx(1) and len(plan.event.rounds(8)) == 1
    recipe = {"kind": "blt", "buffers": 1, "decays": [0.9], "weights": [0.2]}
    noise = Settings(steps=8).audit(privacy_of(noise=recipe))[1].mechanism.noise
    assert (noise.decays, noise.weights) == ((0.9,), (0.2,))


@pytest.mark.parametrize(("every", "verdict"), [(4, CONSISTENT), (1, FAIL)])
def test_a_unit_that_comes_back_too_early_in_a_fixed_order_is_refuted(every, verdict):
    """Simulated: a quarter of the units is in each step. A unit in every step breaks the claim."""
    design, plan = Settings(base=3, steps=8, sampling_rate=0.25, blocks=600).audit(privacy_of(noise="blt"))
    plan = dataclasses.replace(plan, clip_norm=CLIP_NORM)
    seen = returning(np.random.default_rng(8), 600, strategy(plan, design), every)
    found = judged(seen, plan, design, verdict)
    assert "one group" in {attack.name for attack in found.attacks}
    assert dict(found.rows())["each step"].startswith("b/N = 0.25 (units in a fixed order")


EMA = MovingAverage(decay=0.5)


def averaged(num_blocks, num_steps, average=EMA):
    """A design that reads an average, and a plan with every unit in every step."""
    design = Design(1, 1, num_blocks, num_steps, own_runs=True, average=average)
    return design, plan_of(2, 2, 1.0, num_steps)


@pytest.mark.parametrize("average", [EMA, TailMean(share=0.4)])
def test_the_average_that_is_read_is_that_of_the_iterates(average, tmp_path):
    """In runs of their own: each iterate is the sum of the releases so far, and the average weighs them."""
    (model, rows, loss_of), (design, plan) = vectors(1, 2), averaged(2, 5, average)
    basis = basis_of(model, rows, loss_of, design)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    release = Restarts(tmp_path, plan, rows, model, optimizer, loss_of, design.starts, average)
    seen = observe(release, basis, design, 2)
    shares_T = np.cumsum(weights_of(average, 5)[::-1])[::-1]
    expected_RM = np.einsum("t,rtm->rm", shares_T, seen.canary_RTM)
    assert seen.average_RM == pytest.approx(expected_RM, abs=0.05 * CLIP_NORM)
    assert np.abs(expected_RM).max() > 0.1 * CLIP_NORM


@pytest.mark.parametrize("lacking", [None, "own", "all"])
def test_an_average_of_weights_without_noise_is_refuted(lacking):
    """Simulated: iterates that lack the noise of their own step, or all noise. The steps themselves are as planned."""
    rng, num_blocks, num_steps = np.random.default_rng(9), 400, 3
    design, plan = averaged(num_blocks, num_steps)
    included = rng.random((num_blocks, 1)) < 0.5
    signal = CLIP_NORM * np.repeat(included[:, None], num_steps, axis=1)
    canary = signal + CLIP_NORM * math.sqrt(num_steps) * rng.normal(size=signal.shape)
    plan = dataclasses.replace(plan, noise_multiplier=math.sqrt(num_steps))
    own_T = weights_of(EMA, num_steps)
    earlier_T = np.cumsum(own_T[::-1])[::-1] - own_T
    last, before = {None: (canary, canary), "own": (signal, canary), "all": (signal, signal)}[lacking]
    average = np.einsum("t,rtm->rm", own_T, last) + np.einsum("t,rtm->rm", earlier_T, before)
    seen = observations(included, canary, canary[:, :, 0])
    judged(seen, plan, dataclasses.replace(design, average=None), CONSISTENT)
    seen = dataclasses.replace(seen, average_RM=average)
    found = judged(seen, plan, design, FAIL if lacking else CONSISTENT)
    refuting = {attack.name for attack in found.attacks for bound in attack.bounds if bound.refutes}
    expected = {None: None, "own": "average, earlier noise known", "all": "average"}[lacking]
    assert refuting == (set() if expected is None else {expected})
    assert dict(found.rows())["released"] == EMA.words(num_steps)


def test_the_average_of_the_recipe_is_audited():
    """Each block is then a run; its claim is that of its steps."""
    design, plan = Settings(steps=3).audit(privacy_of(), EMA)
    assert design.average == EMA and design.own_runs and plan.num_steps == 3
    one = judge_names(design, plan)
    assert {"average", "average, earlier noise known"} <= one
    single, plan = Settings().audit(privacy_of(), EMA)
    assert "average" in judge_names(single, plan) and "average, earlier noise known" not in judge_names(single, plan)


def judge_names(design, plan):
    """The attacks for an audit of this design, on observations of the right shape."""
    shape = (design.num_blocks, design.steps_per_block, design.num_canaries)
    whole = np.ones(shape[::2])
    seen = observations(whole.astype(bool), np.ones(shape), np.ones(shape[:2]), None, None, whole)
    return set(scores_of(seen, plan, design))


def test_an_average_that_cannot_be_read_is_refused(tmp_path):
    """It would look as if nothing could be seen in it."""
    _, rows, loss_of = vectors(1, 2)
    short = nn.Linear(6, 2, bias=False).to(torch.bfloat16)
    for model, match in ((SimpleNamespace(zero_optimization_stage=lambda: 2), "Under DeepSpeed"), (short, "bfloat16")):
        with pytest.raises(AuditError, match=f"{match}.*train.average=null"):
            Restarts(tmp_path, plan_of(2, 2, 1.0, 3), rows, model, None, loss_of, [3], EMA)
    for options in ({}, {"own_runs": True, "steps_per_start": 2}):
        with pytest.raises(AuditError, match="An average belongs to one run"):
            Design(1, 1, 1, 3, average=EMA, **options)


def privacy_of(**change):
    return PrivacyConfig(**{"epsilon": 8.0, "clip_norm": 1.0, "expected_batch_size": 8, **change})


def recipe_of(folder, model):
    path = folder / "recipe.json"
    sections = {
        "model": {"name": str(model)},
        "data": {"path": "nowhere.jsonl", "max_length": 32},
        "privacy": {"epsilon": 8, "clip_norm": 1.0, "expected_batch_size": 8},
        "train": {"output_dir": str(folder / "run"), "per_device_train_batch_size": 4, "use_cpu": True},
    }
    path.write_text(json.dumps(sections))
    return path


def test_the_command_audits_a_recipe_s_model(base_model, tmp_path):
    """No data are read; the result is printed and written, and a claim that holds is exit code 0."""
    options = ["--blocks", "25", "--canaries", "4", "--confidence", "0.999999", "--json"]
    options += ["--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["audit", "gradient", "--config", str(recipe_of(tmp_path, base_model)), *options])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["verdict"] == CONSISTENT and printed["num_canaries"] == 100
    assert printed["attacks"][0]["auroc"]["high"] > 0.6
    assert "LlamaForCausalLM" in printed["details"]["audited"]
    assert json.loads((tmp_path / "out/audit.json").read_text())["epsilon_lower"] == printed["epsilon_lower"]


@deep
@pytest.mark.parametrize(
    "part",
    [
        ["privacy.noise={kind: banded, bands: 2}", "--steps", "4"],
        ["privacy.noise=blt", "--steps", "4"],
        ["train.average=ema", "--steps", "2"],
        ["privacy.clipping={kind: quantile, count_noise: 2}", "--steps", "2"],
        ["privacy.clipping=per-layer"],
        ["privacy.randomness=chacha20"],
        ["privacy.randomness=discrete"],
    ],
    ids=lambda part: part[0],
)
def test_the_command_audits_the_mechanism_of_the_recipe(part, base_model, tmp_path):
    """Each block of steps that depend on each other is a run; the noise is measured along the strategy."""
    options = ["--blocks", "12", "--confidence", "0.999999", "--json", *part]
    done = CliRunner().invoke(app, ["audit", "gradient", "--config", str(recipe_of(tmp_path, base_model)), *options])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout.splitlines()[-1])
    names = {attack["name"] for attack in printed["attacks"]}
    assert printed["verdict"] == CONSISTENT and printed["num_canaries"] == 12 and printed["noise"]["ratio"] > 0.5
    assert ("average" in names) == ("average" in part[0])
    assert ("one group" in names) == ("banded" in part[0]) and ("threshold up" in names) == ("quantile" in part[0])


def test_the_command_fails_where_the_claim_does(base_model, tmp_path, monkeypatch):
    """Noise that is left out is exit code 1."""
    monkeypatch.setattr("dpllm.mechanism.generators.NoiseSource.add_", lambda self, grad, noise_stddev: None)
    monkeypatch.setattr("dpllm.mechanism.generators.NoiseSource.write_", lambda self, grad, noise_stddev: grad.zero_())
    monkeypatch.setattr("dpllm.engines.guard.UpdateGuard.verify", lambda self: None)
    options = ["--blocks", "120", "--canaries", "2"]
    done = CliRunner().invoke(app, ["audit", "gradient", "--config", str(recipe_of(tmp_path, base_model)), *options])
    assert done.exit_code == 1, done.output
    assert "FAIL" in done.stdout


def test_noise_directions_see_no_unit():
    """At right angles to every gradient and to each other; where there is no room for them there are none."""
    gradient_KP = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    noise_DP = Basis.of(gradient_KP, num_base=2, num_noise=8).noise_DP
    torch.testing.assert_close(noise_DP @ noise_DP.T, torch.eye(8), atol=1e-5, rtol=0)
    assert float((gradient_KP @ noise_DP.T).abs().max()) < 1e-5
    assert len(Basis.of(torch.eye(3), num_base=1, num_noise=8).noise_DP) == 0


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"tokens": 100_000}, "tokens must be from 2 to 4096, got 100000"),
        ({"canaries": 10**7}, "canaries must be from 1 to 1024"),
        ({"blocks": 10**5, "steps": 100}, "at most 1000000 are allowed"),
    ],
)
def test_audits_that_would_not_end_are_refused(values, match):
    """With the bound, before anything is computed; the default has one canary, which shows most."""
    with pytest.raises(AuditError, match=match):
        Settings(**values)
    assert Settings().canaries == 1 and Settings().noise_directions * Settings().blocks >= 1600


def correlated(num_blocks, bands, num_steps, sigma=1.0, per_start=None):
    """A design and a plan with banded noise, M of a block, and noise of it in a number of directions."""
    plan = dataclasses.replace(plan_of(bands, 1, sigma, num_steps), noise=Spec.of({"kind": "banded", "bands": bands}))
    design = Design(1, 1, num_blocks, num_steps, own_runs=True, steps_per_start=per_start)
    return design, plan, strategy(plan, design)


def correlated_noise(rng, num_blocks, strategy_TT, directions=1):
    white_RTD = CLIP_NORM * rng.normal(size=(num_blocks, len(strategy_TT), directions))
    return np.einsum("ts,rsd->rtd", np.linalg.inv(strategy_TT), white_RTD)


@pytest.mark.parametrize(("apart", "verdict"), [(8, CONSISTENT), (2, FAIL)])
def test_bands_wider_than_groups_are_refuted(apart, verdict):
    """Simulated: the noise has eight bands, and a unit comes back after so many steps."""
    design, plan, strategy_TT = correlated(600, 8, 8)
    found = judged(returning(np.random.default_rng(3), 600, strategy_TT, apart), plan, design, verdict)
    assert {"one group", "others later", "others earlier"} <= {attack.name for attack in found.attacks}


@pytest.mark.parametrize(("bug", "verdict"), [(False, CONSISTENT), (True, FAIL)])
def test_groups_that_depend_on_who_is_present_are_refuted(bug, verdict):
    """Simulated: with the canary, all others are in the other group."""
    rng, num_blocks = np.random.default_rng(4), 250
    design, plan, strategy_TT = correlated(num_blocks, 2, 2, sigma=1.0)
    included = rng.random((num_blocks, 1)) < 0.5
    group = included[:, 0].astype(int) if bug else rng.integers(0, 2, num_blocks)
    others = 3 * CLIP_NORM * (np.arange(2) == group[:, None])
    base = correlated_noise(rng, num_blocks, strategy_TT)[:, :, 0] + others
    canary = correlated_noise(rng, num_blocks, strategy_TT)
    judged(observations(included, canary, base), plan, design, verdict)


@pytest.mark.parametrize(("continued", "verdict"), [(False, CONSISTENT), (True, FAIL)])
def test_noise_that_goes_on_after_a_resume_is_refuted(continued, verdict):
    """Simulated: a direction over the steps of both starts has too little noise; each step by itself has enough."""
    rng, num_blocks = np.random.default_rng(6), 250
    design, plan, fresh_TT = correlated(num_blocks, 4, 4, per_start=2)
    used_TT = correlated(num_blocks, 4, 4)[2] if continued else fresh_TT
    noise = correlated_noise(rng, num_blocks, used_TT, 10)
    included = rng.random((num_blocks, 1)) < 0.5
    found = judged(observations(included, noise[:, :, :1], noise[:, :, 1], noise[:, :, 2:]), plan, design, verdict)
    assert found.noise.highest > 1
    assert not any(bound.refutes for attack in found.attacks for bound in attack.bounds)
    assert found.claimed_epsilon == pytest.approx(epsilon([(plan.event, 2), (plan.event, 2)], plan.delta))
    assert "in some direction over the steps" in dict(found.rows())["noise"]
    assert found.noise.refuted == continued
    assert ("σC in some direction over the steps" in dict(found.rows())["verdict"]) == continued


@pytest.mark.parametrize(("largest", "verdict"), [(0.5, CONSISTENT), (10.0, FAIL)])
def test_a_threshold_that_one_unit_moves_too_far_is_refuted(largest, verdict):
    """Simulated: a count with noise of deviation 2, which one unit changes by ½ or by more."""
    rng, num_blocks = np.random.default_rng(7), 250
    plan = dataclasses.replace(plan_of(20, 20, 1.0, 1), clipping=Spec.of({"kind": "quantile", "count_noise": 2.0}))
    included, design = rng.random((num_blocks, 1)) < 0.5, Design(1, 1, num_blocks, own_runs=True)
    counts = -largest * included + 2 * rng.normal(size=included.shape)
    canary = CLIP_NORM * (included + rng.normal(size=included.shape))
    seen = observations(included, canary[:, None], rng.normal(size=included.shape), None, -0.2 * counts / 20)
    judged(seen, plan, design, verdict)


def test_only_a_run_of_its_own_is_resumed():
    """And after one step at least."""
    for wrong in ({"steps_per_start": 2}, {"steps_per_start": 0, "own_runs": True}):
        with pytest.raises(AuditError, match="can be resumed"):
            Design(1, 1, 5, 4, **wrong)
    assert Design(1, 1, 5, 7, own_runs=True, steps_per_start=3).starts == [3, 3, 1]
    assert Design(1, 1, 5, 7).starts == [7]


@pytest.mark.parametrize("ratio", [1.0, 0.9])
def test_noise_a_tenth_too_small_fails_the_audit(ratio):
    """The bounds on ε do not see it; the noise itself does."""
    rng, design, plan = np.random.default_rng(5), Design(1, 1, 400), plan_of(2, 2, 1.0, 400)
    included = rng.random((400, 1)) < 0.5
    canary = CLIP_NORM * (included + ratio * rng.normal(size=included.shape))
    noise = CLIP_NORM * ratio * rng.normal(size=(400, 1, 4))
    seen = observations(included, canary[:, None], rng.normal(size=(400, 1)), noise)
    result = judge_releases(seen, plan, design, "simulated")
    assert result.verdict == (CONSISTENT if ratio == 1 else FAIL)
    assert not any(bound.refutes for attack in result.attacks for bound in attack.bounds)
    assert {"noise", "power"} <= set(dict(result.rows()))
