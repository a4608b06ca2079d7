"""AdamW without the known noise in its second moment: formulas, the noise, checkpoints, and refusals."""

import dataclasses
import io
import json
import math

import numpy as np
import pytest
import torch

from dpllm import PrivacyConfig, PrivateRun, make_plan
from dpllm.config import ConfigError
from dpllm.config.recipe import PublicPretrainConfig
from dpllm.engines.guard import innermost
from dpllm.mechanism.strategies import KnownNoise
from dpllm.privacy.accounting import epsilon
from dpllm.training.arguments import refuse_options
from dpllm.training.corrected_adamw import SECOND_MOMENT_FACT, CorrectedAdamW, refuse_unusable, words_of
from dpllm.training.out_of_memory import needed_later
from dpllm.training.workload import UpdateRule
from tests.small_model import rows_by_number
from tests.tiers import deep_case
from tests.training.test_trainer import Stop, arguments, privacy, small_trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

LOW_PASSED, CORRECTED = "second_moment=low_passed", "second_moment=corrected"
SLOW, SLOWER, EPS = 0.8, 0.95, 1e-3
STARTS = (4, 3, 5)  # steps of a start and of two resumes
NOISE = KnownNoise((1.0, -0.6, 0.2, 0.0, 0.1), 0.7)
BANDED = {"kind": "banded", "bands": 4}


def noise_seen(low_passed):
    """The variance of the noise in m, or in g, after each step: explicit sums over all draws, fresh in each start."""
    total = sum(STARTS)
    first, drawn = np.repeat(np.cumsum((0, *STARTS[:-1])), STARTS), np.zeros((total, total))  # gradient by draw
    for t in range(total):
        for s in range(first[t], t + 1):
            drawn[t, s] = NOISE.stddev * NOISE.response[t - s]
    averages = np.array([[(1 - SLOW) * SLOW ** (t - s) if t >= s else 0 for s in range(total)] for t in range(total)])
    return (((averages if low_passed else np.eye(total)) @ drawn) ** 2).sum(axis=1)


def expected(start, gradients, lr, decay, low_passed):
    """The parameter after all steps, in float64, by the formula as explicit sums; and how many entries are at f Φ."""
    total, floor = len(gradients), 1 if low_passed else 0.1

    def average(values, beta, t):
        return sum((1 - beta) * beta ** (t - s) * values[s] for s in range(t + 1))

    moments = [average(gradients, SLOW, t) for t in range(total)]
    seen, variances = moments if low_passed else gradients, noise_seen(low_passed)
    share = NOISE.averaged_share(SLOW) if low_passed else math.sqrt(floor)
    at, low = start.copy(), 0
    for t in range(total):
        scale = 1 - SLOWER ** (t + 1)
        phi = average(variances, SLOWER, t) / scale
        size = np.maximum(average(np.square(seen), SLOWER, t) / scale - phi, floor * phi)
        moment = moments[t] / (1 if low_passed else 1 - SLOW ** (t + 1))
        at = (1 - lr * decay) * at - lr * share * moment / (np.sqrt(size) + EPS)
        low += int((size == floor * phi).sum())
    return at, low


def made(parameters, **changes):
    groups = [{"params": parameters[:1], "weight_decay": 0.3}, {"params": parameters[1:], "lr": 0.05}]
    return CorrectedAdamW(groups, NOISE, **{"lr": 0.1, "betas": (SLOW, SLOWER), "eps": EPS, **changes})


def take(optimizer, parameters, gradients, steps):
    """Steps of one start."""
    for number, step in enumerate(steps):
        for parameter, of_steps in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(of_steps[step]).to(parameter.dtype)
        optimizer.tell(number)
        optimizer.step()


@pytest.fixture
def problem():
    """A matrix and a vector, and gradients whose signal exceeds the noise in some entries only."""
    rng = np.random.default_rng(3)
    starts = [rng.normal(size=shape) for shape in ((3, 4), (5,))]
    gradients = [rng.normal(size=(sum(STARTS), *start.shape)) + 0.5 for start in starts]
    gradients[0] *= np.array([0.3, 1.0, 5.0])[:, None]
    return starts, gradients


@pytest.mark.parametrize("kind", ["low_passed", "corrected"])
def test_updates_equal_the_formula_entry_by_entry_over_two_resumes(problem, kind):
    """Float64, explicit sums; the state passes through a file at each resume, where the noise begins again."""
    starts, gradients = problem
    parameters = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
    optimizer, begun = made(parameters, second_moment=kind), 0
    for count in STARTS:
        if begun:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            optimizer = made(parameters, second_moment=kind)
            file.seek(0)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        take(optimizer, parameters, gradients, range(begun, begun + count))
        begun += count
    lows, entries = 0, 0
    for found, start, given, (lr, decay) in zip(parameters, starts, gradients, ((0.1, 0.3), (0.05, 0)), strict=True):
        want, low = expected(start, given, lr, decay, kind == "low_passed")
        np.testing.assert_allclose(found.detach().numpy(), want, rtol=1e-10)
        lows, entries = lows + low, entries + given.size
    assert 0.05 < lows / entries < 0.9
    assert optimizer.param_groups[0]["noise"] == pytest.approx(noise_seen(kind == "low_passed")[-1], rel=1e-12)


@pytest.mark.parametrize("by", ["parts of a group", "groups"])
def test_parts_that_are_stepped_one_by_one_are_one_step(problem, by):
    """As ZeRO-3 does with parts of a group, ZeRO-1 and -2 with groups: the others are out meanwhile."""
    starts, gradients = problem
    whole, parts = ([torch.nn.Parameter(torch.tensor(start)) for start in starts] for _ in range(2))
    one, other = (
        made(own) if by == "groups" else CorrectedAdamW(own, NOISE, lr=0.1, betas=(SLOW, SLOWER))
        for own in (whole, parts)
    )
    take(one, whole, gradients, range(3))
    groups = other.param_groups
    for step in range(3):
        other.tell(step)
        for number, (parameter, given) in enumerate(zip(parts, gradients, strict=True)):
            parameter.grad = torch.tensor(given[step])
            if by == "groups":
                other.param_groups = [groups[number]]
            else:
                groups[0]["params"] = [parameter]
            other.step()
        other.param_groups = groups
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert {group["taken"] for group in groups} == {3}


def test_a_step_outside_of_a_run_only_makes_the_state():
    """Libraries take one over zeros before they load a checkpoint."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = CorrectedAdamW([parameter], NOISE, weight_decay=0.5)
    parameter.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(3)) and optimizer.param_groups[0]["taken"] == 0
    assert set(optimizer.state[parameter]) == {"exp_avg", "exp_avg_sq", "step"}


def test_moments_of_bfloat16_parameters_are_float32_also_after_a_resume(problem):
    """Loading rounds them to the parameters' dtype in PyTorch's own optimizers."""
    starts, gradients = problem
    parameters = [torch.nn.Parameter(torch.tensor(start, dtype=torch.bfloat16)) for start in starts]
    optimizer = made(parameters)
    take(optimizer, parameters, gradients, range(3))
    again = made(parameters)
    again.load_state_dict(optimizer.state_dict())
    for parameter in parameters:
        for name, value in optimizer.state[parameter].items():
            assert value.dtype == torch.float32 and torch.equal(again.state[parameter][name], value)
            assert name == "step" or not torch.equal(value, value.bfloat16().float())
    assert [p.dtype for p in parameters] == [torch.bfloat16] * 2


# ---------------------------------------------------------------------------------------- in a run


def rows_of(units=60):
    """One row per unit."""
    values = torch.randn(units, 40, generator=torch.Generator().manual_seed(2))
    return rows_by_number(values, lambda rows: {"rows": torch.stack(rows)}, max_rows=60)


def plan_for(steps, **changes):
    settings = {"noise_multiplier": 500.0, "clip_norm": 0.4, "expected_batch_size": 6, "delta": 1e-3}
    return make_plan(PrivacyConfig(**settings | changes), 60, steps)


@pytest.mark.parametrize(
    "changes",
    [
        {"noise": BANDED, "clipping": "per-layer"},
        deep_case({}),
        deep_case({"noise": BANDED, "clipping": "quantile"}),
        deep_case({"noise": "blt"}),
        deep_case({"randomness": "discrete", "noise_multiplier": 40.0}),
    ],
    ids=str,
)
def test_the_noise_in_the_first_moment_is_the_one_that_is_subtracted(tmp_path, changes):
    """So much noise that the signal does not count: the mean square of m over 100,000 entries, after each step."""
    steps = 8
    if changes.get("clipping") == "quantile":
        changes |= {"noise_multiplier": 2.0, "clipping": {"kind": "quantile", "count_noise": 2.0}}
    plan = plan_for(steps, **changes)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(40, 1200), torch.nn.Linear(1200, 60))
    noise = KnownNoise.of(plan.mechanism, plan.num_steps)
    optimizer = CorrectedAdamW(model.parameters(), noise, lr=1e-6)
    run = PrivateRun.start(tmp_path, plan, rows_of())
    run.attach(model, optimizer, schedule_is_independent=True)
    for units in run.draws(steps):
        run.step(units, lambda model, inputs: model(inputs["rows"]).square().mean(dim=1))
        optimizer.step()
        optimizer.zero_grad()
        squares = [optimizer.state[p]["exp_avg"].double().square() for p in model.parameters()]
        found = float(sum(one.sum() for one in squares)) / sum(one.numel() for one in squares)
        (group,) = optimizer.param_groups
        assert found == pytest.approx(group["noise"], rel=0.03)
        mean = float(sum(optimizer.state[p]["exp_avg_sq"].double().sum() for p in model.parameters()))
        assert mean / sum(one.numel() for one in squares) == pytest.approx(group["expected"], rel=0.03)
    report, words = run.finish(), words_of(optimizer)
    assert words.startswith("that of the first moment, less the known variance of the noise in it")
    assert {"name": SECOND_MOMENT_FACT, "values": [words]} in report["definition"]["facts"]
    assert not [point for point in report["open_points"] if "hyperparameter" in point]


def begun(folder, optim_args=LOW_PASSED, noise="independent", **more):
    args = arguments(folder, save_strategy="steps", save_steps=2, optim_args=optim_args)
    return small_trainer(folder, args=args, config=privacy(noise=noise), **more)


def test_a_trainer_resumes_with_it_and_says_so(tmp_path):
    """ε is that of the steps, and the noise of the steps before the resume fades; report and card name it."""
    banded = {"kind": "banded", "bands": 2}
    begun(tmp_path, noise=banded, callbacks=[Stop(2)]).train()
    run = begun(tmp_path, noise=banded)
    run.train(resume_from_checkpoint=True)
    run.save_model()
    optimizer = innermost(run.optimizer)
    assert isinstance(optimizer, CorrectedAdamW)
    variances = KnownNoise.of(run.plan.mechanism, run.plan.num_steps).averaged(0.9).variances()
    steps = run.ledger.num_steps - 2
    for group in optimizer.param_groups:
        earlier = 0.9 ** (2 * steps) * variances[1]
        assert group["taken"] == 2 + steps and group["earlier_noise"] == pytest.approx(earlier)
        assert group["noise"] == pytest.approx(variances[steps - 1] + earlier)
    facts = json.loads((tmp_path / "privacy_report.json").read_text())["definition"]["facts"]
    assert [fact["name"] for fact in facts].count(SECOND_MOMENT_FACT) == 1
    assert f"Second moment in the optimizer: {words_of(optimizer)}." in (tmp_path / "README.md").read_text()
    assert run.epsilon == epsilon(run.ledger.history, run.plan.delta, run.plan.adjacency)


@pytest.mark.parametrize(
    ("first", "then"), [(LOW_PASSED, None), deep_case(None, LOW_PASSED), deep_case(LOW_PASSED, CORRECTED)]
)
def test_a_run_is_resumed_with_the_second_moment_of_its_start_only(tmp_path, first, then):
    """The state of one is no state of the other. With correlated noise the plans differ already."""
    begun(tmp_path, first, callbacks=[Stop(2)]).train()
    with pytest.raises(ConfigError, match=r"train\.optim_args"):
        begun(tmp_path, then).train(resume_from_checkpoint=True)


def test_the_workload_is_that_of_adamw_but_for_the_bias_correction(tmp_path):
    """Strategies are designed for the optimizer that runs; the plan's step ratio applies to its learning rate."""
    own, low, corrected = (
        UpdateRule.of(arguments(tmp_path, optim_args=args), 20) for args in (None, LOW_PASSED, CORRECTED)
    )
    assert own.bias_correction and not low.bias_correction
    assert dataclasses.replace(low, bias_correction=True) == own == corrected


def test_moments_of_an_earlier_run_do_not_enter_another_one(tmp_path):
    """As with every optimizer: they hold its gradients, and the ε of the new run does not state them."""
    plan, model = plan_for(4), torch.nn.Linear(40, 2)
    optimizer = CorrectedAdamW(model.parameters(), KnownNoise.of(plan.mechanism, 4))
    rng = np.random.default_rng(1)
    take(optimizer, list(model.parameters()), [rng.normal(size=(1, *p.shape)) for p in model.parameters()], [0])
    run = PrivateRun.start(tmp_path, plan, rows_of())
    with pytest.raises(ConfigError, match="moments"):
        run.attach(model, optimizer)


def test_the_search_for_a_microbatch_leaves_room_for_float32_moments():
    """Beside float32 sums: 4 bytes for each of two moments and the sum, where the parameters have 2."""
    parameters = [torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))]
    assert needed_later(parameters, CorrectedAdamW(parameters, NOISE)) == 10 * (4 + 2 * 4)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optim_args": "second_momet=low_passed"}, "has no option 'second_momet'; did you mean 'second_moment'"),
        ({"optim_args": "second_moment=high"}, "second_moment must be one of 'low_passed', 'corrected', got 'high'"),
        ({"optim_args": f"{LOW_PASSED}, momentum=0.5"}, "has no option 'momentum'"),
        ({"optim_args": {"second_moment": "low_passed"}}, "optim_args must be a text, such as second_moment=corrected"),
        ({"optim": "sgd", "optim_args": LOW_PASSED}, "second_moment is an option of AdamW, and train.optim=sgd"),
    ],
)
def test_options_that_would_be_ignored_are_refused(tmp_path, changes, says):
    with pytest.raises(ConfigError, match=says):
        refuse_options(arguments(tmp_path, **changes))


def test_no_other_optimizer_takes_its_place(tmp_path):
    """One that is passed, made by a subclass or by DeepSpeed, or made for other noise."""
    args = arguments(tmp_path, optim_args=LOW_PASSED)
    own = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="optimizers"):
        small_trainer(tmp_path, args=args, optimizers=(own, None))

    def config(**changes):
        args.deepspeed_plugin = type("Plugin", (), {"deepspeed_config": changes})()
        return args

    with pytest.raises(ConfigError, match="optimizer too"):
        refuse_unusable(config(optimizer={"type": "AdamW"}), False)
    offloaded = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    with pytest.raises(ConfigError, match="zero_force_ds_cpu_optimizer"):
        refuse_unusable(config(zero_optimization=offloaded), False)
    with pytest.raises(ConfigError, match="offload"):
        refuse_unusable(config(zero_optimization=offloaded, zero_force_ds_cpu_optimizer=False), False)
    offloaded["offload_optimizer"]["ratio"] = 1.0
    refuse_unusable(config(zero_optimization=offloaded, zero_force_ds_cpu_optimizer=False), False)
    refuse_unusable(config(zero_optimization={"stage": 3, "offload_optimizer": {"device": "none"}}), False)
    args.deepspeed_plugin = None

    run = small_trainer(tmp_path / "subclass", args=arguments(tmp_path / "subclass", optim_args=LOW_PASSED))
    run.create_optimizer = lambda *_: setattr(run, "optimizer", torch.optim.SGD(run.model.parameters(), lr=1.0))
    with pytest.raises(ConfigError, match="optimizer is SGD"):
        run.train()
    assert run.ledger.num_steps == 0


def test_noise_of_another_plan_is_refused(tmp_path):
    model, plan = torch.nn.Linear(40, 1), plan_for(4)
    other = KnownNoise.of(plan_for(4, noise=BANDED).mechanism, 4)
    run = PrivateRun.start(tmp_path, plan, rows_of())
    with pytest.raises(ConfigError, match="noise than the plan's"):
        run.attach(model, CorrectedAdamW(model.parameters(), other))


def test_betas_that_change_during_a_run_are_refused():
    """OneCycleLR changes them unless it is told not to; the subtracted noise would be that of other moments."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = CorrectedAdamW([parameter], NOISE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    parameter.grad = torch.ones(3)
    optimizer.tell(0)
    optimizer.step()
    scheduler.step()
    optimizer.tell(1)
    with pytest.raises(ConfigError, match="cycle_momentum=False"):
        optimizer.step()


class Joined(torch.optim.Optimizer):
    """Two optimizers that are stepped as one."""

    def __init__(self, where, *optimizers):
        super().__init__([{"params": group["params"]} for one in optimizers for group in one.param_groups], {})
        self.held = {"list": list, "dict": lambda all_: dict(enumerate(all_)), "hidden": lambda all_: iter([all_])}[
            where
        ](optimizers)

    def step(self, closure=None):
        for one in next(self.held):
            one.step()


@pytest.mark.parametrize("where", ["list", "dict", "hidden"])
def test_a_part_of_another_optimizer_that_is_told_no_step_is_refused(where, tmp_path):
    """It updated nothing, silently; one that is not found before the first step is found in its update."""
    model, plan = torch.nn.Linear(40, 1), plan_for(4)
    noise = KnownNoise.of(plan.mechanism, 4)
    optimizer = Joined(where, CorrectedAdamW([model.weight], noise), torch.optim.SGD([model.bias], lr=0.1))
    run = PrivateRun.start(tmp_path, plan, rows_of())
    if where != "hidden":
        with pytest.raises(ConfigError, match="part of another optimizer"):
            run.attach(model, optimizer)
        return
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ConfigError, match="part of another optimizer"):
        optimizer.step()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"betas": (1.0, 0.9)}, "betas must be at least 0"),
        ({"lr": -1.0}, "lr, eps and weight_decay must be at"),
    ],
)
def test_numbers_out_of_range_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        CorrectedAdamW([torch.nn.Parameter(torch.zeros(1))], NOISE, **changes)
    with pytest.raises(ConfigError, match="second_moment"):
        CorrectedAdamW([torch.nn.Parameter(torch.zeros(1))], NOISE, "own")
    with pytest.raises(ConfigError, match=r"KnownNoise\.of"):
        CorrectedAdamW([torch.nn.Parameter(torch.zeros(1))], plan_for(2))


def test_the_state_of_another_optimizer_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match="second_moment=low_passed"):
        CorrectedAdamW([parameter], NOISE).load_state_dict(torch.optim.AdamW([parameter]).state_dict())
    with pytest.raises(ConfigError, match="second_moment=low_passed"):
        CorrectedAdamW([parameter], NOISE).load_state_dict(CorrectedAdamW([parameter], NOISE, "corrected").state_dict())


def test_a_public_stage_takes_no_such_option():
    """Its gradients have no noise, and the stock Trainer would ignore the option."""
    with pytest.raises(ConfigError, match=r"train\.optim_args"):
        PublicPretrainConfig(data=None, train={"optim_args": LOW_PASSED})  # type: ignore[arg-type]
