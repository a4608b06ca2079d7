"""Other mechanisms than DP-SGD through the Trainer: no file holds noise, a resume begins afresh, reports verify."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, TrainerCallback

from dpllm.engines.processes import Processes
from dpllm.mechanism.chacha20 import SecretKey
from dpllm.mechanism.events import Step
from dpllm.mechanism.noise import CorrelatedStream
from dpllm.mechanism.parts import Spec
from dpllm.mechanism.sampling import seeded_rng
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, read_ledger
from dpllm.privacy.plan import make_plan
from dpllm.privacy.rounding import epsilon_to_log
from dpllm.report.verify import verify
from dpllm.training.draws import DrawError, Draws
from dpllm.training.run import PrivateRun
from tests import children
from tests.conftest import tiny_llama_config
from tests.tiers import deep, deep_case
from tests.training.test_run import loss_of, network, plan_of
from tests.training.test_run import rows_of as users_rows
from tests.training.test_trainer import At, Stop, arguments, crash, privacy, rows, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

BANDED = {"kind": "banded", "bands": 3}
BLT = {"kind": "blt", "buffers": 3}


@pytest.mark.parametrize(
    "parts",
    [
        {"noise": BANDED},
        {"noise": "blt"},
        {"clipping": "automatic"},
        {"clipping": "per-layer"},
        {"noise": BANDED, "randomness": "chacha20"},
        deep_case({"randomness": "discrete", "clipping": "automatic"}),
        {"clipping": {"kind": "quantile", "count_noise": 2.0}},
    ],
    ids=str,
)
def test_a_run_says_what_it_was_and_verifies(parts, tmp_path):
    """Its ε is that of its steps by the mechanism's event."""
    run = trainer(tmp_path, dataset=rows(60), config=privacy(expected_batch_size=8, **parts))
    run.train()
    run.save_model()
    (step,) = {event for event, _ in read_ledger(tmp_path / LEDGER_FILE).history}
    assert step == run.plan.event and run.epsilon == epsilon([(step, 4)], run.plan.delta)
    checked = verify(tmp_path)
    assert checked.ok, [check for check in checked.checks if not check.ok]
    page = (tmp_path / "privacy_report.md").read_text(encoding="utf-8")
    assert run.plan.mechanism.clipping.words() in page and run.plan.mechanism.noise.words() in page
    assert ("noise by ChaCha20 (RFC 8439), draws of units by PCG64DXSM" in page) == ("randomness" in parts)


QUANTILE = {"kind": "quantile", "count_noise": 2.0, "start": 3.0}


def train_until_crash(folder, config, args):
    """Train up to the power cut, after the checkpoint of step 2."""
    with pytest.raises(RuntimeError, match="power cut"):
        trainer(folder, dataset=rows(60), config=config, args=args, callbacks=[At(3, crash)]).train()


def resumed(folder, config, args):
    """A run that goes on from the checkpoint of step 2, at its end."""
    run = trainer(folder, LlamaForCausalLM(tiny_llama_config()), rows(60), config, args)
    run.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    run.save_model()
    return run


def test_a_resume_continues_with_the_threshold_of_the_ledger(tmp_path):
    """It is a released value; the report shows its path."""
    config = privacy(expected_batch_size=8, clipping=QUANTILE)
    args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=5)
    train_until_crash(tmp_path, config, args)
    before = read_ledger(tmp_path / LEDGER_FILE).notes.thresholds
    assert len(before) == 3 and before[0] == 3.0 and len(set(before)) == 3
    run = resumed(tmp_path, config, args)
    path = read_ledger(tmp_path / LEDGER_FILE).notes.thresholds
    assert path[:4] == [*before, before[-1]] and len(path) == 5 and path[4] != path[3]
    assert read_ledger(tmp_path / LEDGER_FILE).history == [(run.plan.event, 5)]
    assert verify(tmp_path).ok
    page = (tmp_path / "privacy_report.md").read_text(encoding="utf-8")
    assert f"{path[0]:.6g}, {path[2]:.6g} and {path[-1]:.6g}; between {min(path):.6g}" in page
    assert "The clip threshold depends on earlier releases only" in page


def test_a_ledger_without_the_thresholds_does_not_verify(tmp_path, monkeypatch):
    """Which gradients were scaled, and how far, would not be known."""
    append = Ledger.append_step
    monkeypatch.setattr(Ledger, "append_step", lambda self, number, step, threshold=None: append(self, number, step))
    run = trainer(tmp_path, dataset=rows(60), config=privacy(expected_batch_size=8, clipping=QUANTILE))
    run.train()
    run.save_model()
    (wrong,) = (check for check in verify(tmp_path).checks if not check.ok)
    assert "clip threshold" in wrong.what and "0 steps have one: not as the plan says" in wrong.detail


@pytest.mark.parametrize("parts", [{"noise": BANDED}, {"noise": BLT}, {"noise": BANDED, "randomness": "chacha20"}])
def test_no_file_of_a_checkpoint_or_of_the_end_holds_noise_or_its_key(parts, tmp_path, monkeypatch):
    """Who knows either can take the noise out of the updates. Keys are sought as bytes, in hexadecimal, in base64."""
    streams, kept, keys = [], [], set()
    begin, key_of, derive = CorrelatedStream.__init__, SecretKey.__init__, SecretKey.derive
    monkeypatch.setattr(CorrelatedStream, "__init__", lambda self, *args: (streams.append(self), begin(self, *args))[1])

    def made(self, entropy):
        key_of(self, entropy)
        keys.add(entropy)

    def derived(self, *address):
        keys.add(derive(self, *address))
        return derive(self, *address)

    monkeypatch.setattr(SecretKey, "__init__", made)
    monkeypatch.setattr(SecretKey, "derive", derived)

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            for tensors in (tensors for stream in streams for tensors in stream._kept.values()):
                kept.extend(one.numpy().astype(np.float32).tobytes() for one in tensors if one.numel() >= 16)

    run = trainer(
        tmp_path,
        dataset=rows(60),
        config=privacy(expected_batch_size=8, **parts),
        args=arguments(tmp_path, save_strategy="steps", save_steps=2),
        callbacks=[Look()],
    )
    run.train()
    run.save_model()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) > 20 and len(keys) > 20 and any("checkpoint-2" in str(path) for path in files)
    weights = next(iter(LlamaForCausalLM.from_pretrained(tmp_path).parameters())).detach().flatten()[:16]
    content = b"".join(path.read_bytes() for path in files)
    assert weights.float().numpy().tobytes() in content  # the search finds what is there
    for noise in kept:
        assert noise[: 16 * 4] not in content
    for key in keys:
        number = str(int.from_bytes(key, "little")).encode()
        for written in (key, key.hex().encode(), base64.b64encode(key)[:40], number):
            assert len(written) >= 32 and written not in content


@pytest.mark.parametrize(("level", "noise"), [("os", BANDED), deep_case("chacha20", BANDED), deep_case("os", BLT)])
def test_a_run_whose_noise_is_regenerated_has_the_weights_of_one_that_stores_it(level, noise, tmp_path):
    """Bit by bit, with one seed; without a seed no two runs have equal noise."""
    trained = {}
    for memory, seed in (("stored", 3), ("regenerated", 3), ("auto", 3), ("auto", None)):
        torch.manual_seed(0)
        folder = tmp_path / f"{memory}{seed}"
        run = trainer(
            folder,
            LlamaForCausalLM(tiny_llama_config()),
            rows(60),
            privacy(expected_batch_size=8, noise=noise, randomness=level, seed=seed),
            arguments(folder),
            noise_memory=memory,
        )
        run.train()
        trained[memory, seed] = [parameter.detach() for parameter in run.model.parameters()]
    first = trained["stored", 3]
    for choice, weights in trained.items():
        equal = all(torch.equal(one, other) for one, other in zip(first, weights, strict=True))
        assert equal == (choice[1] == 3), choice


def test_a_resume_begins_a_fresh_cycle_with_fresh_noise(tmp_path):
    """Steps of each start are counted by themselves, and the report is that of both."""
    config = privacy(expected_batch_size=8, noise=BANDED)
    args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=6)
    train_until_crash(tmp_path, config, args)
    run = resumed(tmp_path, config, args)
    history = read_ledger(tmp_path / LEDGER_FILE).history
    assert history == [(run.plan.event, 3), (run.plan.event, 3)]
    assert run.epsilon == epsilon(history, run.plan.delta) == epsilon([(run.plan.event, 6)], run.plan.delta)
    assert verify(tmp_path).ok
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_a_resume_of_a_fixed_order_is_a_second_release(tmp_path):
    """Its steps are counted by themselves, and both releases compose; the numbers of the report give the same ε."""
    config = privacy(expected_batch_size=8, noise=BLT, noise_multiplier=2.0, epsilon=50.0)
    args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=6)
    train_until_crash(tmp_path, config, args)
    run = resumed(tmp_path, config, args)
    event, history = run.plan.event, read_ledger(tmp_path / LEDGER_FILE).history
    assert history == [(event, 3), (event, 3)] and verify(tmp_path).ok
    twice = epsilon([(Step(sampling_rate=1.0, noise_multiplier=2 / event.sensitivity(3)), 2)], run.plan.delta)
    assert run.epsilon == twice > 1.2 * run.plan.epsilon
    command = json.loads((tmp_path / "privacy_report.json").read_text(encoding="utf-8"))["checkable"]
    words = command["recompute_from_the_numbers"].split()
    stated = dict(zip(words[2::2], words[3::2], strict=True))
    assert (stated["--steps"], stated["--sampling-rate"]) == ("1", "1.0")
    one = Step(sampling_rate=1.0, noise_multiplier=float(stated["--noise-multiplier"]))
    assert epsilon([(one, 1)], run.plan.delta) == pytest.approx(twice, rel=1e-4)


def test_a_run_in_a_fixed_order_takes_no_other_units():
    """Neither in another order nor one again before its pass is over: only the outstanding draw, unchanged."""
    charged = []
    ledger = SimpleNamespace(num_steps=0, steps_planned=None, append_step=lambda *args: charged.append(args))
    plan = make_plan(privacy(expected_batch_size=8, noise=BLT), 60, 4)
    drawn = plan.mechanism.sampler.steps(seeded_rng(0))
    first, second = next(drawn).tolist(), next(drawn).tolist()
    assert len(first) == len(second) == 8 and not set(first) & set(second)
    draws = Draws(plan, ledger, Processes(), iter([np.array(second)]))
    assert draws.next().tolist() == second and charged == [(0, plan.event)]
    for units in (first, sorted([*second[1:], first[0]]), second[:-1], [*second, first[0]]):
        with pytest.raises(DrawError, match="outstanding"):
            draws.take(units, "training", None)
    assert draws.take(second, "training", None)[0].tolist() == second


def test_the_epsilon_of_a_resumed_run_counts_its_starts(tmp_path):
    """In its logs, at its end and in its report: 2 and 4 steps are 3 rounds, and 6 in one go are 2."""
    config = privacy(expected_batch_size=8, noise=BANDED, noise_multiplier=1.0, epsilon=50.0)
    args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=6, logging_steps=1)
    trainer(tmp_path, dataset=rows(60), config=config, args=args, callbacks=[Stop(2)]).train()
    run = resumed(tmp_path, config, args)
    event, delta = run.plan.event, run.plan.delta
    logged = {entry["step"]: entry["epsilon"] for entry in run.state.log_history if "epsilon" in entry}
    for step in range(3, 7):
        assert logged[step] == epsilon_to_log(epsilon([(event, 2), (event, step - 2)], delta))
    assert run.epsilon == epsilon([(event, 2), (event, 4)], delta) > run.plan.epsilon
    assert run.epsilon == run.privacy_report()["statement"]["epsilon"]
    assert verify(tmp_path).ok


def four_bands(num_steps):
    return dataclasses.replace(plan_of(num_steps=num_steps), noise=Spec.of({"kind": "banded", "bands": 4}))


def take_steps(run, num_steps, before_step=lambda number: None):
    """Train with the public loop."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    for units in run.draws(num_steps):
        before_step(run.ledger.num_steps)
        run.step(units, loss_of)
        optimizer.step()
        optimizer.zero_grad()
    return model


def killed_in_step(folder, num_steps, last):
    """The program of a process that is killed when it has charged this step and not taken it."""

    def die(number):
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)

    take_steps(PrivateRun.start(folder, four_bands(num_steps), users_rows()), num_steps, die)


@deep  # the rule itself, without processes, is in `tests.privacy.test_stated`
@pytest.mark.parametrize(("num_steps", "last", "allowed"), [(12, 6, 10), (9, 6, 9), (12, 8, 12)])
def test_a_run_killed_in_mid_cycle_resumes_with_the_rounds_of_both_starts(num_steps, last, allowed, tmp_path):
    """kill -9: the charged step stays, a cycle of 4 begins again, and the run ends at the rounds of its plan."""
    plan = four_bands(num_steps)
    folder, log = tmp_path / "run", tmp_path / "log"
    died = children.Forked(killed_in_step, folder, num_steps, last, env=dict(os.environ), log=log, cwd=tmp_path)
    assert children.wait_all([died]) == [-signal.SIGKILL], log.read_text()
    assert read_ledger(folder / LEDGER_FILE).history == [(plan.event, last)]
    run = PrivateRun.resume(folder, plan, users_rows())
    assert run.steps_planned == allowed
    take_steps(run, allowed - last)
    with pytest.raises(ValueError, match=f"All {allowed} steps of the plan are taken"):
        next(run.draws(1))
    report = run.finish()
    history = read_ledger(folder / LEDGER_FILE).history
    assert history == [(plan.event, last), (plan.event, allowed - last)]
    rounds = -(-last // 4) - (-(allowed - last) // 4)
    assert rounds == -(-num_steps // 4)
    assert report["statement"]["epsilon"] == pytest.approx(epsilon([(plan.event, 4 * rounds)], plan.delta), abs=1e-4)
