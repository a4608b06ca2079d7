"""The released average is the mean of the weights after the private steps, and nothing else can enter it."""

import contextlib
import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, TrainerCallback

from dpllm import PrivateRun, TrainingRows, make_plan, per_sequence_loss
from dpllm.config import ConfigError
from dpllm.data.rows import RowCollator
from dpllm.data.units import UnitIndex
from dpllm.mechanism.averages import LAST_FOLDER, average_of, weights_of
from dpllm.models.run_weights import earlier_run
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.ledger import LedgerError, read_ledger
from dpllm.report.definition import RELEASED_WEIGHTS
from dpllm.report.verify import verify as verify_folder
from dpllm.training.averaging import AVERAGE_FOLDER, CHANGED, AverageError, Averaging
from dpllm.training.checks.watch import WatchError
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.training.test_trainer import arguments, privacy, rows, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

EMA, TAIL = {"kind": "ema", "decay": 0.6}, {"kind": "tail", "share": 0.5}


class Steps(TrainerCallback):
    """Records the weights after each update, in float64, and those of each evaluation; may stop after a step."""

    def __init__(self, stop=None):
        self.after, self.evaluated, self._stop = [], [], stop

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.after.append(trained(model))

    def on_prediction_step(self, args, state, control, model=None, **kwargs):
        self.evaluated.append(trained(model))

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step == self._stop


def trained(model):
    return {name: p.detach().double().clone() for name, p in model.named_parameters() if p.requires_grad}


def averaged(spec, after, num_steps=4):
    """The average of an uninterrupted run of ``num_steps``, in float64."""
    weights = weights_of(average_of(spec), num_steps)
    return {name: sum(w * one[name] for w, one in zip(weights, after, strict=True)) for name in after[0]}


def check(model, want, rtol=1e-6):
    for name, value in trained(model).items():
        torch.testing.assert_close(value, want[name], rtol=rtol, atol=1e-7)


def begin_again(averaging):
    """As if the run had been resumed: an average is loaded before the first step of a start."""
    averaging._source.ledger._before = averaging._source.ledger.num_steps


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that released the mean of its last two steps, and kept its last step."""
    folder, steps = tmp_path_factory.mktemp("runs") / "finished", Steps()
    run = trainer(folder, average={**TAIL, "keep_last": True}, callbacks=[steps])
    run.train()
    run.save_model()
    return run, folder, steps.after


def test_the_released_files_hold_the_average_and_the_ledger_names_them(finished):
    """By hash; the last step's weights are beside them by choice; all of it verifies, at the ε of the steps."""
    run, folder, after = finished
    check(LlamaForCausalLM.from_pretrained(folder), averaged(TAIL, after))
    check(LlamaForCausalLM.from_pretrained(folder / LAST_FOLDER), after[-1], rtol=0)
    check(run.model, averaged(TAIL, after))
    (released,) = read_ledger(folder / "privacy_ledger.jsonl").notes.released
    for name in ("model.safetensors", f"{LAST_FOLDER}/model.safetensors"):
        assert released["files"][name]["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert all(found.ok for found in verify_folder(folder).checks)
    assert run.epsilon == epsilon([(run.plan.event, 4)], run.plan.delta, run.plan.adjacency)


def test_report_and_card_say_what_the_released_weights_are(finished):
    """In the words of the specification; no open point asks whether the weights were changed."""
    run, folder, _ = finished
    words = average_of(TAIL).words(4)
    report = json.loads((folder / "privacy_report.json").read_text())
    assert {"name": RELEASED_WEIGHTS, "values": [words]} in report["definition"]["facts"]
    assert any("averages of the weights" in what for what in report["definition"]["released_under_the_guarantee"])
    assert f"Released weights: {words}." in (folder / "README.md").read_text()
    assert not [point for point in report["open_points"] if "Weights" in point or "changed after" in point]
    assert run.averaging.count == 2


def test_a_later_run_recognises_the_average_and_the_last_step(finished):
    """Both are releases of this run, so a run that starts from either starts from an earlier run's weights."""
    _, folder, _ = finished
    for path in (folder, folder / LAST_FOLDER):
        assert earlier_run(LlamaForCausalLM.from_pretrained(path), None) == folder.resolve()
    assert earlier_run(LlamaForCausalLM(tiny_llama_config()), None) is None


def test_a_bfloat16_adapter_is_averaged_in_float32(tmp_path):
    """Only the adapter's parameters are kept; the release is rounded once, to the adapter's dtype."""
    model = get_peft_model(LlamaForCausalLM(tiny_llama_config()), LoraConfig(r=2, target_modules=["q_proj"]))
    steps = Steps()
    run = trainer(tmp_path, model.to(torch.bfloat16), average=EMA, callbacks=[steps])
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    run.train()
    values, want = run.averaging._values, averaged(EMA, steps.after)
    assert values.keys() == want.keys() and {value.dtype for value in values.values()} == {torch.float32}
    for name, value in values.items():
        torch.testing.assert_close(value.double(), want[name].flatten(), rtol=1e-6, atol=1e-8)
    for name, parameter in model.named_parameters():
        expected = frozen[name] if name in frozen else values[name].view(parameter.shape).to(torch.bfloat16)
        assert torch.equal(parameter, expected)


def test_a_run_resumed_in_mid_run_continues_the_average(tmp_path):
    """The checkpoint holds the weights of its step and the average beside them; no figure of the course is lost."""
    args = {"save_strategy": "steps", "save_steps": 2}
    first, second = Steps(stop=2), Steps()
    trainer(tmp_path, args=arguments(tmp_path, **args), average=EMA, callbacks=[first]).train()
    checkpoint = tmp_path / "checkpoint-2"
    for name, saved in load_file(checkpoint / "model.safetensors").items():
        if name in first.after[-1]:
            assert torch.equal(saved.double(), first.after[-1][name])
    assert "averaged weights next to" in (checkpoint / "README.md").read_text()
    run = trainer(tmp_path, args=arguments(tmp_path, **args), average=EMA, callbacks=[second])
    run.train(resume_from_checkpoint=True)
    assert run.averaging.count == 4
    check(run.model, averaged(EMA, first.after + second.after))

    # A resume without a step left releases it, too.
    again = trainer(tmp_path, args=arguments(tmp_path, **args), average=EMA)
    again.train(resume_from_checkpoint=True)
    check(again.model, averaged(EMA, first.after + second.after))
    for other, now in (
        (None, "none"),
        (TAIL, "the mean of the trained weights after those of the steps 3 to 4 that were"),
    ):
        resumed = trainer(tmp_path, args=arguments(tmp_path, **args), average=other)
        with pytest.raises(ConfigError, match=f"releases the exponential .* train.average now asks for {now}"):
            resumed.train(resume_from_checkpoint=True)


def test_a_run_without_an_average_is_not_resumed_with_one(tmp_path):
    """Its report would name an average that lacks the first steps."""
    args = {"save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, args=arguments(tmp_path, **args), callbacks=[Steps(stop=1)]).train()
    resumed = trainer(tmp_path, args=arguments(tmp_path, **args), average=EMA)
    with pytest.raises(ConfigError, match=r"train\.average"):
        resumed.train(resume_from_checkpoint=True)


def test_evaluations_use_the_average_by_choice_and_training_goes_on_with_the_last_step(tmp_path):
    """The same run as without evaluations; the watch accepts that the weights are replaced and put back."""
    for evaluate in ("average", "last"):
        steps, folder = Steps(), tmp_path / evaluate
        args = arguments(folder, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8)
        spec = {**EMA, "evaluate": evaluate}
        run = trainer(folder, args=args, average=spec, callbacks=[steps], eval_dataset=rows(8))
        run.train()
        want = averaged(EMA, steps.after[:2], 2) if evaluate == "average" else steps.after[1]
        for name, value in steps.evaluated[0].items():
            torch.testing.assert_close(value, want[name], rtol=1e-6, atol=1e-7)
        check(run.model, averaged(EMA, steps.after))


def test_a_save_in_mid_run_releases_the_average_so_far(tmp_path):
    """Where the tail has not begun, it releases the weights of the step; neither is a doubt for the report."""

    class Save(Steps):
        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control)
            self.run.save_model(str(tmp_path / f"at-{state.global_step}"))

    save = Save(stop=3)
    save.run = run = trainer(tmp_path / "run", average=TAIL, callbacks=[save])
    run.train()
    for step in (1, 2, 3):  # of which step 3 enters, alone
        check(LlamaForCausalLM.from_pretrained(tmp_path / f"at-{step}"), save.after[step - 1], rtol=1e-7)
    assert run.averaging.count == 1
    assert not [point for point in run.privacy_report()["open_points"] if "Weights were saved" in point]


# ------------------------------------------------------------------------- what must not enter


def attack(folder, action, **more):
    """Run with a callback that acts after the optimizer's step 1, and before that of step 2."""

    class Attack(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                action(run, model)

    run = trainer(folder, average=EMA, callbacks=[Attack()], **more)
    run.train()
    return run


def test_weights_that_anything_else_has_written_cannot_enter(tmp_path):
    """Planted: the update without noise is written into the model before the private one."""

    def action(run, model):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.full_like(p, 0.01))

    with pytest.raises(WatchError, match=r"optimizer\.step"):
        attack(tmp_path, action)


def test_the_weights_of_a_step_enter_once_and_those_of_the_start_never(tmp_path):
    """An update of the average without an update of the weights changes nothing."""
    steps = Steps()

    class Often(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            run.averaging.update() if run.averaging._source else None
            assert run.averaging.count == 0

        def on_step_end(self, args, state, control, **kwargs):
            run.averaging.update()

    run = trainer(tmp_path, average=EMA, callbacks=[steps, Often()])
    run.train()
    assert run.averaging.count == 4
    check(run.model, averaged(EMA, steps.after))


def test_a_gradient_without_noise_stops_the_run_before_its_weights_enter(tmp_path):
    """Planted: the gradient is replaced between the private step and the update."""
    seen = []

    def action(run, model):
        seen.append(run.averaging)
        for p in model.parameters():
            p.grad = torch.ones_like(p)

    with pytest.raises(WatchError, match="private step"):
        attack(tmp_path, action)
    assert seen[0].count == 1


@pytest.mark.parametrize("kind", ["buffer", "frozen"])
def test_what_is_not_trained_cannot_enter(tmp_path, kind):
    """Planted: a statistic of the rows in a buffer, and in a frozen parameter."""
    model = LlamaForCausalLM(tiny_llama_config())
    model.register_buffer("statistic", torch.zeros(4))
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    tensor = model.statistic if kind == "buffer" else frozen
    seen = []

    def action(run, _):
        seen.append(run.averaging)
        with torch.no_grad():
            tensor.add_(1.0)

    with pytest.raises(WatchError, match="changed"):
        attack(tmp_path, action, model=model)
    assert not {"statistic", "model.layers.0.mlp.up_proj.weight"} & seen[0]._values.keys()


# ------------------------------------------------------------------------- mistakes


def test_options_and_checkpoints_that_cannot_be_used_are_refused(tmp_path):
    """Before anything is trained, in one line."""
    with pytest.raises(ConfigError, match=r"train\.average\.decay"):
        trainer(tmp_path, average={"kind": "ema", "decay": 2})
    with pytest.raises(ConfigError, match="average follows"):
        Averaging(average_of("ema"), 4).update()
    own = type("Own", (type(average_of("ema")),), {"rate": lambda self, count: 1.0})()  # it may follow the losses
    with pytest.raises(ConfigError, match=r"train\.average"):
        trainer(tmp_path, average=own)
    for average in ("ema", None, type(average_of("ema")), own):
        with pytest.raises(ConfigError, match="average_of"):
            Averaging(average, 4)
    for num_steps in ("3", 0, True, 4.0):
        with pytest.raises(ConfigError, match="plan's num_steps"):
            Averaging(average_of("ema"), num_steps)


def test_a_checkpoint_whose_average_lacks_a_part_is_refused(tmp_path):
    """Missing, of another kind, or not whole; a resume verifies the checkpoint's hashes before."""
    run = trainer(tmp_path, args=arguments(tmp_path, save_strategy="steps", save_steps=4), average=EMA)
    run.train()
    kept = {name: value.clone() for name, value in run.averaging._values.items()}
    checkpoint, averaging = tmp_path / "checkpoint-4", run.averaging
    begin_again(averaging)
    averaging.load(checkpoint)
    assert all(torch.equal(averaging._values[name], value) for name, value in kept.items())
    state, shards = checkpoint / AVERAGE_FOLDER / "average.json", list((checkpoint / AVERAGE_FOLDER).glob("rank_*"))
    assert len(shards) == 1
    text = state.read_text()
    state.write_text(text.replace("decay 0.6", "decay 0.7"))
    with pytest.raises(AverageError, match="exponential"):
        averaging.load(checkpoint)
    edited = [("count", "x"), ("count", "4"), ("last", None), ("ledger", 3)]
    values = [json.dumps({**json.loads(text), name: value}) for name, value in edited]
    for torn in (text[:40], "[1]", text.replace('"count"', '"counts"'), *values):
        state.write_text(torn)
        with pytest.raises(AverageError, match="was not written by this version"):
            averaging.load(checkpoint)
    state.write_text(text)
    shards[0].write_bytes(shards[0].read_bytes()[:100])
    with pytest.raises(AverageError, match=r"rank_00000\.safetensors"):
        averaging.load(checkpoint)
    shards[0].unlink()
    with pytest.raises(AverageError, match="whole average"):
        averaging.load(checkpoint)
    shutil.rmtree(checkpoint / AVERAGE_FOLDER)
    with pytest.raises(AverageError, match="holds no average"):
        averaging.load(checkpoint)


def test_the_average_of_another_run_is_refused(tmp_path):
    """Its steps are not in this ledger, so the printed ε would not hold for what is released."""
    first, second = (
        trainer(tmp_path / name, args=arguments(tmp_path / name, save_strategy="steps", save_steps=4), average=EMA)
        for name in ("first", "second")
    )
    first.train()
    second.train()
    kept = {name: value.clone() for name, value in second.averaging._values.items()}
    begin_again(second.averaging)
    with pytest.raises(LedgerError, match=r"The average in .*first.* does not belong to .*second"):
        second.averaging.load(tmp_path / "first" / "checkpoint-4")
    assert all(torch.equal(second.averaging._values[name], value) for name, value in kept.items())


@kills(
    "the values of a saved average are not compared",
    "dpllm/training/averaging.py",
    "        if sums != state",
    "        if False and sums != state",
)
def test_values_that_were_edited_in_a_saved_average_are_refused(tmp_path):
    """One bit of one entry, two entries that change places, or a number of steps that the run has not taken."""
    run = trainer(tmp_path, args=arguments(tmp_path, save_strategy="steps", save_steps=4), average=EMA)
    run.train()
    averaging, folder = run.averaging, tmp_path / "checkpoint-4" / AVERAGE_FOLDER
    begin_again(averaging)
    kept = {name: value.clone() for name, value in averaging._values.items()}
    shard, state = folder / "rank_00000.safetensors", folder / "average.json"
    with safe_open(shard, framework="pt") as file:
        values, starts = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    name = max(values, key=lambda name: len(values[name]))

    def refused():
        with pytest.raises(AverageError, match="run saved"):
            averaging.load(tmp_path / "checkpoint-4")
        assert averaging.count == 4
        assert all(torch.equal(averaging._values[name], value) for name, value in kept.items())

    edits = (
        lambda one: one.view(torch.int32)[5].bitwise_xor_(1),
        lambda one: one[:2].copy_(one[:2].flip(0)),
        lambda one: one.fill_(7.0),
    )
    for edit in edits:
        edited = {**values, name: values[name].clone()}
        edit(edited[name])
        assert not torch.equal(edited[name], values[name])
        save_file(edited, shard, metadata=starts)
        refused()
    save_file(values, shard, metadata=starts)
    for one, other in (('"count": 4', '"count": 5'), ('"last": 4', '"last": 5'), ('"count": 4', '"count": 0')):
        text = state.read_text()
        state.write_text(text.replace(one, other))
        refused()
        state.write_text(text)
    averaging.load(tmp_path / "checkpoint-4")


def test_an_average_is_not_loaded_after_a_step_of_the_start(tmp_path):
    """It would replace the average of the steps since; before them it is what a resume does."""

    class Load(Steps):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                self.run.averaging.save(tmp_path / "saved")
            if state.global_step == 3:
                self.run.averaging.load(tmp_path / "saved")

    load = Load()
    load.run = run = trainer(tmp_path / "run", average=EMA, callbacks=[load])
    with pytest.raises(AverageError, match="after attach"):
        run.train()
    assert run.averaging.count == 3


def loop(folder, model, averaging=None, num_steps=3, before_saving=lambda model: None, ends_within=False):
    """A loop of one's own that saves within `shown`; returns its report and the weights that it saved.

    ``ends_within``: it ends the run there, too.
    """
    plan = make_plan(privacy(), num_units=24, num_steps=num_steps)
    data = TrainingRows(
        units=UnitIndex.one_row_per_unit(24),
        lengths=np.full(24, 6),
        fetch=lambda numbers: [{"input_ids": [4 + int(n) % 50] * 6} for n in numbers],
        collate=RowCollator(pad_token_id=0),
        max_rows=8,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    run = PrivateRun.start(folder, plan, data)
    run.attach(model, optimizer, averaging=averaging)
    for ids in run.draws(num_steps):
        run.step(ids, lambda model, inputs: per_sequence_loss(model(**inputs).logits, inputs["input_ids"]))
        optimizer.step()
        optimizer.zero_grad()
    with averaging.shown() if averaging else contextlib.nullcontext():
        before_saving(model)
        model.save_pretrained(folder)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        report = run.finish() if ends_within else None
    return report or run.finish(), saved


def add_one(model):
    with torch.no_grad():
        model.lm_head.weight.add_(1)


def written_past_the_counters(model):
    model.lm_head.weight.data[0, 0] += 1


@pytest.mark.parametrize("change", [add_one, written_past_the_counters])
@pytest.mark.parametrize("ends_within", [False, True])
def test_weights_that_change_while_the_average_is_shown_are_an_open_point(change, ends_within, tmp_path):
    """They are saved as the average; those of the last step are put back, so that later checks find nothing."""
    averaging = Averaging(average_of("ema"), 3)
    report, _ = loop(
        tmp_path, LlamaForCausalLM(tiny_llama_config()), averaging, before_saving=change, ends_within=ends_within
    )
    assert CHANGED in report["open_points"]


def test_a_loop_may_end_while_the_average_is_shown(tmp_path):
    """The checks at the end look at the weights of the last step; what was saved is the average, and verifies."""
    model, averaging = LlamaForCausalLM(tiny_llama_config()), Averaging(average_of("ema"), 3)
    report, saved = loop(tmp_path, model, averaging, ends_within=True)
    assert CHANGED not in report["open_points"] and all(found.ok for found in verify_folder(tmp_path).checks)
    assert not averaging.is_shown and not torch.equal(model.lm_head.weight, saved["lm_head.weight"])


def test_an_average_serves_one_run(tmp_path):
    """It would release the first run's weights under the ε of the second."""
    averaging = Averaging(average_of("ema"), 3)
    loop(tmp_path / "one", LlamaForCausalLM(tiny_llama_config()), averaging)
    with pytest.raises(ConfigError, match="holds weights"):
        loop(tmp_path / "two", LlamaForCausalLM(tiny_llama_config()), averaging)
    with pytest.raises(ConfigError, match="num_steps=3"):
        loop(tmp_path / "three", LlamaForCausalLM(tiny_llama_config()), Averaging(average_of("ema"), 100))


@pytest.mark.parametrize("of", ["the average", "the last step"])
def test_a_later_run_that_begins_at_the_weights_of_a_loop_is_refused(of, tmp_path):
    """Both are releases of the first run, and the second run's ε does not state them."""
    model, other = LlamaForCausalLM(tiny_llama_config()), LlamaForCausalLM(tiny_llama_config())
    _, saved = loop(tmp_path / "one", model, Averaging(average_of("ema"), 3))
    other.load_state_dict(saved if of == "the average" else model.state_dict())
    with pytest.raises(ConfigError, match="copy of those"):
        loop(tmp_path / "two", other)


def test_the_plan_does_not_know_the_average(tmp_path):
    """It is post-processing: plan and ε are those of a run without it."""
    plans = [trainer(tmp_path, config=privacy(), average=average).plan for average in (None, "ema")]
    assert plans[0] == plans[1] and np.isfinite(plans[0].epsilon)
