"""Nothing but the noisy gradient reaches weights and saved state, in any step of a run."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import LlamaForCausalLM, TrainerCallback

from dpllm import per_sequence_loss, seq2seq_loss
from dpllm.data.units import UnitIndex
from dpllm.ghost import GhostError
from dpllm.models.losses import classification_loss
from dpllm.privacy.ledger import LedgerError, read_ledger
from dpllm.training.checks.watch import WatchError
from dpllm.training.rows import TrainingRows
from dpllm.training.run import PrivateRun
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.reference import zoo
from tests.training.test_run import FEATURES, ledger_of, loss_of, network, plan_of, rows_of
from tests.training.test_trainer import arguments, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")


class Around(nn.Module):
    """A network whose inputs pass through another module first."""

    def __init__(self, before):
        super().__init__()
        self.before, self.net = before, network()

    def forward(self, x):
        return self.net(self.before(x))


class RunningMean(nn.Module):
    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES), persistent=persistent)

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - 0.01 * self.mean


class Replaced(RunningMean):
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


class Data(RunningMean):
    """Writes without raising the version counter."""

    def forward(self, x):
        self.mean.data += x.detach().mean(0)
        return x


class Same(RunningMean):
    """Writes the value that is already there."""

    def forward(self, x):
        self.mean.copy_(self.mean.clone())
        return x


class Growing(nn.Module):
    """A cache of positions that is as long as the longest call, as rotary embeddings keep it."""

    def __init__(self):
        super().__init__()
        self.calls = 1
        self.register_buffer("table", torch.arange(2.0).repeat(3, 1), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.register_buffer("table", torch.arange(1.0 + self.calls).repeat(3, 1), persistent=False)
        return x


class Lazy(nn.Module):
    """Fills its running mean in the first call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        self.mean = x.detach().mean(0) if self.mean is None else 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


class Late(nn.Module):
    """Makes its buffer in the first call."""

    def __init__(self, persistent, moving):
        super().__init__()
        self.persistent, self.moving = persistent, moving

    def forward(self, x):
        if not hasattr(self, "made"):
            self.register_buffer("made", x.detach().mean(0), persistent=self.persistent)
        elif self.moving:
            self.made += 1
        return x


def run_of(folder, model, optimizer=None, num_steps=4):
    plan = dataclasses.replace(plan_of(noise_multiplier=0.0), num_steps=num_steps)  # units may be chosen
    run = PrivateRun(plan, rows_of(), ledger_of(folder, plan))
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    return run, optimizer


def take(run, optimizer, steps=1, loss=loss_of):
    for _ in range(steps):
        run.step(run.choose(np.arange(8)), loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [RunningMean, Replaced, Data])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_running_statistic_is_refused_by_its_path_before_any_update(kind, persistent, tmp_path):
    """Saved or not: the next row's loss would depend on those before it."""
    model = Around(kind(persistent))
    run, optimizer = run_of(tmp_path, model)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(WatchError, match=r"before\.mean"):
        take(run, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("module", [Same(), Growing(), Late(persistent=False, moving=False)])
def test_equal_values_and_growing_caches_are_not_refused(module, tmp_path):
    """Sound models keep such buffers."""
    run, optimizer = run_of(tmp_path, Around(module))
    take(run, optimizer, 4)
    run.finish()


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (Late(persistent=True, moving=False), r"The buffer before\.made was added to the model"),
        (Late(persistent=False, moving=True), r"The buffer before\.made changed during a private step"),
        (Lazy(), r"The buffer before\.mean was added to the model"),
    ],
)
def test_a_buffer_made_in_mid_run_is_watched_and_never_saved(module, match, tmp_path):
    """Otherwise the first forward pass would determine the watched tensors."""
    run, optimizer = run_of(tmp_path, Around(module))
    with pytest.raises(WatchError, match=match):
        take(run, optimizer, 4)


class Tokens(nn.Module):
    """A frozen embedding that is renormalised where it is used."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4, max_norm=0.5)
        self.table.weight.requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.table(x[:, :2].abs().long().clamp(max=49)).mean(1))


@kills(
    "buffers and frozen weights may change within a step",
    "dpllm/training/checks/watch.py",
    "        self._compare(_DURING)\n        self._compare_samples(_SINCE_UPDATE)\n",
    "",
)
def test_a_frozen_embedding_with_max_norm_is_refused(tmp_path):
    """Exactly the tokens of the private text would change."""
    run, optimizer = run_of(tmp_path, Tokens())
    with pytest.raises(WatchError, match=r"table\.weight changed during a private step"):
        take(run, optimizer)


@kills(
    "nothing is watched between the steps",
    "dpllm/training/checks/watch.py",
    "        self._compare(_BETWEEN)\n",
    "        self.rebase()\n",
)
def test_a_frozen_parameter_written_between_steps_is_refused(tmp_path):
    """By a callback, for instance."""
    model = network()
    model[0].bias.requires_grad_(False)
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer)
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(WatchError, match=r"0\.bias"):
        take(run, optimizer)


def test_a_write_past_the_version_counter_is_found_before_a_save_and_at_the_end(tmp_path):
    """`.data` raises no counter; a sample is compared in each step, and a checksum before anything is saved."""
    model = network()
    model[0].bias.requires_grad_(False)
    run, optimizer = run_of(tmp_path, model)
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(run)
    take(run, optimizer, 2)
    model[0].bias.data[3] += 1e-6
    with pytest.raises(WatchError, match=r"0\.bias"):
        accelerator.save_state(tmp_path / "state")
    with pytest.raises(WatchError, match=r"0\.bias"):
        run.finish()
    with pytest.raises(WatchError, match=r"0\.bias"):
        take(run, optimizer, 2)
    assert run.ledger.num_steps == 3


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda m: m[2].bias.add_(1), r"2\.bias was written during a private step"),
        (lambda m: m[0].bias.requires_grad_(True), r"0\.bias was unfrozen after the run was attached"),
    ],
    ids=["written", "unfrozen"],
)
def test_a_loss_that_writes_or_unfreezes_is_refused_within_its_step(act, match, tmp_path):
    """Before the optimizer sees a gradient; in the third step, before which rows are not compared."""
    model = network()
    model[0].bias.requires_grad_(False)
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer, 2)

    def loss(module, inputs):
        losses = loss_of(module, inputs)
        with torch.no_grad():
            act(module)
        return losses

    with pytest.raises(WatchError, match=match):
        run.step(run.choose(np.arange(8)), loss)


def test_a_checkpoint_that_accelerate_loads_in_mid_run_is_taken_over(tmp_path):
    """It writes to weights and buffers, and says so by `load_state_dict`."""
    model = Around(Same())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    run, _ = run_of(tmp_path, model, optimizer)
    accelerator.register_for_checkpointing(run)
    take(run, optimizer)
    accelerator.save_state(tmp_path / "state")
    take(run, optimizer)
    accelerator.load_state(tmp_path / "state")
    take(run, optimizer)
    run.finish()


# ------------------------------------------------------------------ gradients


class FromStep(TrainerCallback):
    """Does something once, at an event of a step."""

    def __init__(self, event, step, act):
        self.step, self.act = step, act
        setattr(self, event, self.do)

    def do(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act(kwargs["model"])


def partly_frozen():
    model = LlamaForCausalLM(tiny_llama_config())
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


def stopped(folder, model, callback, match, **more):
    """The run ends with this error; returns how many steps are charged."""
    with pytest.raises(WatchError, match=match):
        trainer(folder, model, callbacks=[callback], args=arguments(folder), **more).train()
    return read_ledger(folder / "privacy_ledger.jsonl").num_steps


def test_a_callback_that_unfreezes_in_mid_run_is_stopped_before_the_step(tmp_path):
    """With an optimizer that holds all parameters, raw gradients would reach it."""
    model = partly_frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unfreeze = FromStep("on_step_begin", 2, lambda m: m.model.embed_tokens.weight.requires_grad_(True))
    match = r"model\.embed_tokens\.weight was unfrozen after the run was attached"
    assert stopped(tmp_path, model, unfreeze, match, optimizers=(optimizer, None)) == 3  # charged when drawn


def test_a_callback_that_freezes_in_mid_run_is_stopped(tmp_path):
    """The set of trainable parameters is that of the start."""
    freeze = FromStep("on_step_begin", 1, lambda m: m.lm_head.weight.requires_grad_(False))
    match = r"lm_head\.weight was frozen after the run was attached"
    assert stopped(tmp_path, LlamaForCausalLM(tiny_llama_config()), freeze, match) == 2


def test_a_forward_pass_that_unfreezes_is_stopped_before_the_update(tmp_path):
    """Between the checks at the start of two steps."""
    model = network()
    model[0].bias.requires_grad_(False)
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer)

    def unfreezing(module, inputs):
        module[0].bias.requires_grad_(True)
        return loss_of(module, inputs)

    with pytest.raises(WatchError, match=r"0\.bias"):
        take(run, optimizer, 1, unfreezing)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.grad.mul_(2),
        lambda p: p.grad.add_(1),
        lambda p: setattr(p, "grad", p.grad.clone()),
    ],
)
@pytest.mark.parametrize("step", [1, 3])
def test_a_gradient_that_was_touched_is_refused_in_every_step(spoil, step, tmp_path):
    """Not in the first step only."""
    touch = FromStep("on_pre_optimizer_step", step, lambda m: spoil(m.lm_head.weight))
    match = r"The gradient of lm_head\.weight changed after the private step"
    assert stopped(tmp_path, LlamaForCausalLM(tiny_llama_config()), touch, match) == step + 1


@pytest.mark.parametrize("count", [1, None], ids=["one", "all"])
@pytest.mark.parametrize("before", [1, 2])
def test_a_gradient_that_is_taken_away_is_refused_in_every_step(count, before, tmp_path):
    """A loop could choose by the loss which parameters are updated."""
    model = network()
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer, before)
    run.step(run.choose(np.arange(8)), loss_of)
    for parameter in list(model.parameters())[:count]:
        parameter.grad = None
    with pytest.raises(WatchError, match=r"optimizer\.step"):
        optimizer.step()


def test_a_loss_with_a_parameter_of_its_own_is_refused_when_it_is_attached(tmp_path):
    """Its gradient may start later."""
    model, scale = network(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    with pytest.raises(WatchError, match="number 4"):
        run_of(tmp_path, model, optimizer)


def test_a_parameter_added_to_the_optimizer_in_mid_run_is_refused(tmp_path):
    """Before it is used."""
    model, scale = network(), nn.Parameter(torch.ones(()))
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer, 2)
    optimizer.add_param_group({"params": [scale]})
    with pytest.raises(WatchError, match="not clipped"):
        take(run, optimizer)


@pytest.mark.parametrize("write", [lambda p: p.add_(1e-3), lambda p: setattr(p, "data", p.data + 1)])
def test_trained_weights_that_a_callback_writes_are_refused(write, tmp_path):
    """In place, or with another storage."""

    def act(model):
        with torch.no_grad():
            write(model.lm_head.weight)

    callback = FromStep("on_step_end", 2, act)
    match = r"lm_head\.weight was written between two private steps"
    assert stopped(tmp_path, LlamaForCausalLM(tiny_llama_config()), callback, match) == 3


def test_a_second_optimizer_is_refused(tmp_path):
    """Its update is not part of the plan."""
    model = network()
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    run, optimizer = run_of(tmp_path, model)
    run.step(run.choose(np.arange(8)), loss_of)
    other.step()
    with pytest.raises(WatchError, match=r"optimizer\.step"):
        optimizer.step()


def test_a_write_after_the_last_step_is_found_at_the_end(tmp_path):
    """The released weights are those that the last update left."""

    def act(model):
        with torch.no_grad():
            model.lm_head.weight.add_(1e-3)

    callback = FromStep("on_train_end", 4, act)
    match = r"lm_head\.weight was written after optimizer\.step\(\)"
    assert stopped(tmp_path, LlamaForCausalLM(tiny_llama_config()), callback, match) == 4
    assert read_ledger(tmp_path / "privacy_ledger.jsonl").end == "failed"


def test_trained_weights_that_are_not_those_of_the_last_update_are_found_before_a_save(tmp_path):
    """Also where no version counter has moved: a checksum is compared, before the run counts as finished."""
    model = network()
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer, 4)
    model[2].bias.data += 1e-6
    with pytest.raises(WatchError, match="after the last update"):
        run.finish()


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_of_the_optimizer_is_refused(by_name, tmp_path):
    """It runs after the gradients were compared and before they are used."""
    model = network()
    run, optimizer = run_of(tmp_path, model)
    before = model[0].weight.clone()

    def closure():
        model[0].weight.grad.add_(100)
        return torch.zeros(())

    run.step(run.choose(np.arange(8)), loss_of)
    with pytest.raises(WatchError, match="closure"):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert torch.equal(before, model[0].weight)


def test_a_parameter_that_takes_anothers_place_is_refused(tmp_path):
    """The optimizer trains the old one, and the new one would be saved."""
    model = network()
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer, 4)
    model[2] = nn.Linear(10, 1)
    with pytest.raises(WatchError, match=r"2\.bias"):
        run.finish()


def test_a_head_that_is_replaced_at_the_end_of_training_is_refused(tmp_path):
    """Fitted by a callback to the rows, for instance."""

    def act(model):
        model.lm_head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)

    model = LlamaForCausalLM(tiny_llama_config())
    run = trainer(tmp_path, model, callbacks=[FromStep("on_train_end", 4, act)], args=arguments(tmp_path))
    with pytest.raises(WatchError, match=r"lm_head\.weight"):
        run.train()


# --------------------------------------------------------------- sound models

LOSSES = {"causal_lm": per_sequence_loss, "seq2seq_lm": seq2seq_loss, "sequence_classification": classification_loss}


@pytest.mark.parametrize("mode", ["full", "lora-all-linear"])
@pytest.mark.parametrize("family", sorted(zoo.FAMILIES))
def test_sound_models_pass(family, mode, tmp_path):
    """Rotary caches, position ids, masks in buffers, adapters: two steps and the end of a run."""
    case = zoo.Case(family, mode=mode, tied=zoo.FAMILIES[family].heads[0], dtype="float32")
    if not zoo.is_meaningful(family, mode, case.tied):
        pytest.skip("the mode says nothing about this architecture")
    model, batch = zoo.build_model(case), zoo.make_batch(case.spec, num_rows=8)

    def collate(numbers):
        part = batch.rows([int(number) for number in numbers])
        return {**part.inputs, "labels": part.labels}

    def loss(module, inputs):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        return LOSSES[case.spec.task](module(**inputs).logits, labels)

    sizes = {"num_units": 8, "sampling_rate": 1.0, "max_batch_size": 8}
    plan = dataclasses.replace(plan_of(0.0), unit="sequence", unit_column=None, max_rows_per_unit=None, **sizes)
    rows = TrainingRows(
        units=UnitIndex.one_row_per_unit(8),
        lengths=batch.inputs["attention_mask"].sum(1).numpy(),
        fetch=list,
        collate=collate,
        max_rows=4,
    )
    run = PrivateRun(plan, rows, ledger_of(tmp_path, plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.attach(model, optimizer)
    for _ in range(2):
        run.step(run.choose(np.arange(8)), loss)
        optimizer.step()
        optimizer.zero_grad()
    run.finish()


@pytest.mark.compares_rows
def test_a_head_within_the_loss_is_refused_when_it_is_trained(tmp_path):
    """Its own optimizer would carry private rows without noise into all later losses; a fixed one is sound."""
    head = nn.Linear(1, 1)
    other = torch.optim.SGD(head.parameters(), lr=0.1)

    def with_head(module, inputs):
        rows = inputs["rows"]
        return (head(module(rows[:, :-1])).squeeze(1) - rows[:, -1]).square()

    run, optimizer = run_of(tmp_path, network(), num_steps=6)
    take(run, optimizer, 3, with_head)
    other.step()
    with pytest.raises(WatchError, match="losses depend"):
        take(run, optimizer, 1, with_head)


def test_an_optimizer_that_lacks_parameters_is_refused_when_it_is_attached(tmp_path):
    """They would never be trained; nothing is charged."""
    model = network()
    run = PrivateRun(plan_of(), rows_of(), ledger_of(tmp_path, plan_of()))
    with pytest.raises(WatchError, match=r"0\.bias"):
        run.attach(model, torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1))
    assert run.ledger.num_steps == 0


@kills(
    "a gradient after a step that failed reaches the weights",
    "dpllm/training/checks/watch.py",
    "            self._check_gradients()\n",
    "            if self._gradients:\n                self._check_gradients()\n",
)
@pytest.mark.parametrize("cause", ["the step failed", "a checkpoint was loaded"])
def test_a_gradient_of_ones_own_where_no_private_step_left_one_is_refused(cause, tmp_path):
    """Such as that of an ordinary backward pass, to which a loop falls back when a step fails."""
    model = network()
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer, 2)
    before = [p.clone() for p in model.parameters()]
    if cause == "the step failed":
        with pytest.raises(MemoryError):
            take(run, optimizer, 1, lambda model, inputs: (_ for _ in ()).throw(MemoryError("no room")))
    else:
        run.load_state_dict(run.state_dict())
    optimizer.step()  # there is nothing to release
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(WatchError, match=r"0\.weight"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    run.detach()


def swapped_by_data(model, values):
    """As torch_ema and diffusers do."""
    for name, parameter in model.named_parameters():
        parameter.data.copy_(values[name])


@pytest.mark.parametrize("restore", [True, False])
@pytest.mark.parametrize("swap", [swapped_by_data, nn.Module.load_state_dict])
def test_averages_may_replace_the_weights_through_data_for_a_while(swap, restore, tmp_path):
    """`load_state_dict` raises version counters, so nothing short of all bits tells whether the weights are back."""
    model = network()
    run, optimizer = run_of(tmp_path, model)
    for _ in range(3):
        take(run, optimizer)
        kept = copy.deepcopy(model.state_dict())
        swap(model, {name: 0.9 * value for name, value in kept.items()})
        if restore:
            swap(model, kept)
        if restore and swap is swapped_by_data:
            continue
        with pytest.raises(WatchError, match=r'written between .* average="ema" .* copy\.deepcopy\(model\)'):
            take(run, optimizer)
        return
    run.finish()


# ---------------------------------------------------------------- planted bugs


@dataclasses.dataclass
class Bug:
    """A mistake at the third step of a run of four.

    Attributes:
        at: "begin", "loss", "gradient" (between the private step and the update) or "update" (after the update).
        act: the mistake, with model and optimizer.
        caught: where the error is raised.
        match: of its message.
        error: its type.
        model: makes the model.
        gradients: as for `PrivateRun.attach`.
    """

    at: str
    act: Callable
    caught: str
    match: str
    error: type = WatchError
    model: Callable = lambda: nn.Sequential(
        nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES), SUM
    )
    gradients: str = "ghost"


class Sum(nn.Module):
    def forward(self, x):
        return x.sum(1, keepdim=True)


SUM = Sum()


def each_weight(write):
    """Do it to each weight, as a callback does."""

    def act(model, optimizer):
        for parameter in model.parameters():
            write(parameter)

    return act


def frozen(model):
    model[0].bias.requires_grad_(False)
    return model


def large():
    """With a frozen weight of which a sample is a small part."""
    model = nn.Sequential(nn.Linear(FEATURES, 1000), nn.Tanh(), nn.Linear(1000, 1))
    model[0].weight.requires_grad_(False)
    return model


def with_no_mean():
    """With a buffer that something may fill later."""
    model = network()
    model.register_buffer("mean", None)
    return model


def spectral():
    model = network()
    nn.utils.parametrizations.spectral_norm(model[0])
    return model


def set_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.01


def tie(model, optimizer):
    model[2].weight = model[0].weight


def add_group(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def backward_again(model, optimizer):
    model(torch.ones(3, FEATURES)).sum().backward()


def step_of_another(model, optimizer):
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def swap_storage(parameter):
    parameter.data = parameter.data * 0.9


PLANTED = {
    "a second parameter group": Bug("begin", add_group, "update 3", "optimizer holds a trainable parameter"),
    "an average copied back": Bug("update", each_weight(lambda p: p.data.copy_(0.9 * p.data)), "step 4", "was written"),
    "an average put in its place": Bug("update", each_weight(swap_storage), "step 4", "was written between"),
    "weight decay by a callback": Bug("update", each_weight(lambda p: p.data.mul_(0.99)), "step 4", "was written"),
    "weight decay before the update": Bug(
        "gradient", each_weight(lambda p: p.data.mul_(0.99)), "step 4", "was written"
    ),
    "weight decay after the last step": Bug(
        "end", each_weight(lambda p: p.data.mul_(0.99)), "end", "was written after"
    ),
    "a running statistic": Bug("", None, "step 1", r"before\.mean changed", model=lambda: Around(RunningMean())),
    "spectral norm": Bug("", None, "step 1", r"buffer 0\.parametrizations\.weight", model=spectral),
    "spectral norm, unit by unit": Bug(
        "", None, "step 1", r"buffer 0\.parametrizations\.weight", model=spectral, gradients="per_unit"
    ),
    "unfreezing": Bug(
        "begin", lambda m, _: m[0].bias.requires_grad_(True), "step 3", "was unfrozen", model=lambda: frozen(network())
    ),
    "unfreezing in the loss": Bug(
        "loss", lambda m, _: m[0].bias.requires_grad_(True), "step 3", "was unfrozen", model=lambda: frozen(network())
    ),
    "an auxiliary backward pass": Bug("gradient", backward_again, "update 3", "backward.. was called", GhostError),
    "a gradient of one's own added": Bug(
        "gradient", each_weight(lambda p: p.grad.add_(1)), "update 3", "changed after the private step"
    ),
    "weights tied": Bug("begin", tie, "step 3", r"2\.weight is a different parameter"),
    "weights tied after the last step": Bug("end", tie, "end", r"2\.weight is a different parameter"),
    "the step of a second optimizer": Bug("gradient", step_of_another, "update 3", "was written between the private"),
    "its step after the update": Bug("update", step_of_another, "step 4", "was written between two"),
    "a learning rate set by a callback": Bug("gradient", set_rate, "update 3", r"learning rate of step 3 is 0\.01"),
    "one frozen weight past the sample": Bug(
        "update", lambda m, _: m[0].weight.data[1, 1].add_(1), "end", r"0\.weight changed", model=large
    ),
    "frozen weights before the update": Bug(
        "gradient", lambda m, _: nn.init.ones_(m[0].weight), "update 3", r"0\.weight changed between the", model=large
    ),
    "a buffer that was None": Bug(
        "update", lambda m, _: setattr(m, "mean", torch.ones(3)), "step 4", "buffer mean was added", model=with_no_mean
    ),
    "frozen weights": Bug(
        "update", lambda m, _: m[0].weight.data.mul_(0.99), "step 4", r"0\.weight changed between", model=large
    ),
}


@kills("samples are not compared", "dpllm/training/checks/watch.py", ".append((first != samples[kind]).any())", "")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught_before_anything_is_released(name, tmp_path):
    """Each is a mistake that training code makes: the guarantee holds for no run that makes it."""
    bug = PLANTED[name]
    model, place = bug.model(), "attach"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    plan = dataclasses.replace(plan_of(noise_multiplier=0.0), num_steps=4)
    run = PrivateRun(plan, rows_of(), ledger_of(tmp_path, plan))

    def act(at, step):
        if bug.at == at and step == 3:
            with torch.no_grad() if at == "loss" else contextlib.nullcontext():
                bug.act(model, optimizer)

    def loss(module, inputs):
        act("loss", step)
        return loss_of(module, inputs)

    with pytest.raises(bug.error, match=bug.match) as caught:
        run.attach(model, optimizer, lr_scheduler=schedule, gradients=bug.gradients)
        for step in range(1, 5):
            place = f"step {step}"
            act("begin", step)
            run.step(run.choose(np.arange(8)), loss)
            place = f"update {step}"
            act("gradient", step)
            optimizer.step()
            act("update", step)
            optimizer.zero_grad()
            schedule.step()
        place = "end"
        act("end", 3)
        run.finish()
    assert place == bug.caught, str(caught.value)
    print(f"| {name} | {place} | {type(caught.value).__name__}: {str(caught.value)[:70]} |")
    run.detach()


def test_a_checkpoint_whose_weights_were_replaced_is_refused(tmp_path):
    """The weights at `load_state_dict` are accepted as the state of the run, so they must be that state."""
    model = network()
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer)
    saved, kept = run.state_dict(), copy.deepcopy(model.state_dict())
    take(run, optimizer)
    with pytest.raises(LedgerError, match=r"0\.bias"):
        run.load_state_dict(saved)
    model.load_state_dict(kept)
    run.load_state_dict(saved)
    take(run, optimizer)
    run.finish()
