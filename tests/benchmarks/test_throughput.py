"""benchmarks/throughput.py: its counts match the run, and the DP step keeps its bounds."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dpllm.ghost import GhostClipper
from tests.benchmarks.material import program
from tests.tiers import deep_case

_PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "throughput.py"
_spec = importlib.util.spec_from_file_location("throughput", _PATH)
throughput = importlib.util.module_from_spec(_spec)
sys.modules["throughput"] = throughput
_spec.loader.exec_module(throughput)

PLAIN, OURS = throughput.PLAIN, throughput.OURS
TINY = {"hidden": 32, "layers": 1, "vocab": 97, "heads": 2, "batch": 2, "tokens": 8, "device": "cpu", "warmup": 1}
TINY_ARGUMENTS = [f"--{name}={value}" for name, value in TINY.items()] + ["--rounds=1"]


def flops(**changes) -> dict[str, int]:
    """Counted operations of one step without and with privacy."""
    steps, _, ids_BT = throughput.prepare(throughput.Settings(**TINY | changes), [PLAIN, OURS])
    return {
        name: sum(throughput.count_flops(lambda step=step: step.run(ids_BT)).values()) for name, step in steps.items()
    }


@pytest.mark.parametrize(("mode", "bound"), [("full", 1.25), ("lora", 1.05)])
def test_flop_ratio_of_a_four_layer_llama(mode, bound):
    """Norms and clipped sum cost no more than promised; neither count is below the minimum of the step."""
    shape = {"hidden": 512, "layers": 4, "vocab": 32_000, "heads": 8, "batch": 1, "tokens": 256, "warmup": 0}
    counted = flops(mode=mode, **shape)
    weights = 4 * (4 * 512 * 512 + 3 * 512 * 1376) + 512 * 32_000
    products = 3 if mode == "full" else 2  # forward, activation gradient, and weight gradient where weights are trained
    first = 3 * 512 * 512  # needs no activation gradient under LoRA
    assert counted[PLAIN] >= 2 * 256 * (products * weights - first)
    assert counted[PLAIN] <= counted[OURS] <= bound * counted[PLAIN]


def test_every_layer_is_counted():
    """Each further block adds the same number of operations: the count is not a constant and leaves no block out."""
    one, two, three = (flops(layers=layers) for layers in (1, 2, 3))
    for method in (PLAIN, OURS):
        assert two[method] - one[method] == three[method] - two[method] > 0


def test_private_step_counts_products_inside_the_backward_pass():
    """The clipped sum, an in-place product, is counted: a DP step costs no less than forward and weight gradient."""
    rows, tokens, inputs, outputs = 3, 4, 40, 50
    layer = nn.Linear(inputs, outputs, bias=False)
    clipper = GhostClipper(layer, clip_norm=1.0)
    x_BTD = torch.randn(rows, tokens, inputs)
    clipper.backward(layer(x_BTD).square().sum((1, 2)))  # the one-off checks
    counted = throughput.count_flops(lambda: clipper.backward(layer(x_BTD).square().sum((1, 2))))
    assert sum(counted.values()) >= 2 * (2 * rows * tokens * inputs * outputs)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: torch.zeros(3, 5).addmm_(torch.ones(4, 3).mT, torch.ones(4, 5)), 2 * 3 * 4 * 5),
        (lambda: torch.zeros(2, 3, 5).baddbmm_(torch.ones(2, 3, 4), torch.ones(2, 5, 4).mT), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.zeros(3, 5).addbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.mv(torch.ones(3, 4), torch.ones(4)), 2 * 3 * 4),
        (lambda: torch.zeros(3).addmv_(torch.ones(3, 4), torch.ones(4)), 2 * 3 * 4),
        (lambda: torch.dot(torch.ones(4), torch.ones(4)), 2 * 4),
        (lambda: nn.functional.linear(torch.ones(2, 3, 4), torch.ones(5, 4), torch.ones(5)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.tensordot(torch.ones(2), torch.ones(2, 3, 4), dims=1), 2 * 2 * 3 * 4),
        (lambda: nn.functional.scaled_dot_product_attention(*[torch.ones(2, 3, 8, 4)] * 3), 2 * 2 * 2 * 3 * 8 * 8 * 4),
    ],
)
def test_flops_of_single_operations(function, expected):
    """Every product counts 2 per multiply-add, in place or not, batched or not."""
    assert sum(throughput.count_flops(function).values()) == expected


def test_batched_product_with_an_output_dtype_has_a_formula():
    """The form the norms take on CUDA (bfloat16 in, float32 out) is counted like any batched product."""
    x, y = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((2, 3, 4), (2, 4, 5)))
    assert throughput.count_flops(lambda: torch.bmm(x, y, out_dtype=torch.float32)) == {"aten.bmm": 2 * 2 * 3 * 4 * 5}


def test_operation_without_a_formula_is_refused():
    """A product that cannot be counted stops the count instead of making it too small."""
    with pytest.raises(RuntimeError, match="formula"):
        throughput.count_flops(lambda: torch.cdist(torch.ones(3, 4), torch.ones(5, 4)))


def test_live_bytes_counts_what_is_alive_at_once():
    """Freed tensors leave the count, tensors held by autograd alone stay, and views count once."""
    with throughput.LiveBytes() as live:
        x = torch.ones(1000)
        y = x + 1
        assert live.current == 8000
        del x
        z = y.view(10, 100) * 2
        assert (live.current, live.peak) == (8000, 8000)
        del y, z
        weight = torch.ones(500, requires_grad=True)
        loss = (weight * 1).exp().sum()  # exp keeps its result for the backward pass; weight * 1 is freed
    assert (live.current, live.peak) == (4004, 8000)
    del loss, weight
    assert live.current == 0


def test_peak_memory_contains_weights_gradients_and_logits():
    """The peak of a step is at least weights + gradients, and grows with the batch by more than the logits."""
    peaks = []
    for batch in (2, 4):
        settings = throughput.Settings(**TINY | {"batch": batch})
        steps, _, ids_BT = throughput.prepare(settings, [PLAIN])
        peaks.append(throughput.peak_memory(steps[PLAIN], ids_BT))
    weights = sum(p.numel() * 4 for p in steps[PLAIN].model.parameters())
    assert peaks[0] >= 2 * weights
    assert peaks[1] - peaks[0] >= 2 * 8 * 97 * 4


@pytest.mark.parametrize("tied", [False, True])
def test_twin_shares_weights_and_nothing_else(tied):
    """Methods are compared on one set of weights; hooks and gradients of one do not reach the other; ties stay."""
    model = throughput.build_model(throughput.Settings(**TINY, tied=tied))
    other = throughput.twin(model)
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    assert all(p is not q and p.data_ptr() == q.data_ptr() for p, q in pairs)
    assert (other.lm_head.weight is other.get_input_embeddings().weight) == tied
    clipper = GhostClipper(other, clip_norm=1.0)
    model(input_ids=torch.zeros(2, 4, dtype=torch.long)).logits.sum().backward()
    assert all(p.grad is not None and q.grad is None for p, q in pairs)
    clipper.remove()


@pytest.mark.parametrize(
    "extra",
    [
        [],
        deep_case(["--mode", "lora", "--rank", "2", "--checkpointing", "reentrant"]),
        deep_case(["--mode", "lora", "--rank", "2", "--checkpointing", "nonreentrant", "--attention", "eager"]),
        deep_case(["--dtype", "bfloat16", "--tied", "--no-time"]),
        deep_case(["--clock", "cpu"]),
    ],
    ids=" ".join,
)
def test_command_line_writes_table_and_json(extra, tmp_path, capsys):
    """Every mode runs from the command line and names machine, versions and ratios in table and JSON."""
    path = tmp_path / "out.json"
    throughput.main([*TINY_ARGUMENTS, *extra, "--json", str(path)])
    report = json.loads(path.read_text())
    assert report["methods"][PLAIN]["flop_ratio"] == report["methods"][PLAIN]["memory_ratio"] == 1
    assert report["methods"][OURS]["flops"] == sum(report["methods"][OURS]["flops_by_op"].values()) > 0
    assert report["machine"]["torch"] == torch.__version__
    assert report["settings"]["hidden"] == 32
    assert ("time_ratio" in report["methods"][OURS]) == ("--no-time" not in extra)
    assert OURS in capsys.readouterr().out


def test_model_by_configuration(tmp_path):
    """A transformers configuration is taken as text, file or folder."""
    values = {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 50,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    for config in (json.dumps(values), str(path), str(tmp_path)):
        assert throughput.model_config(throughput.Settings(config=config)).vocab_size == 50
    with pytest.raises(ValueError, match="model_type"):
        throughput.model_config(throughput.Settings(config='{"n_embd": 16}'))


def test_methods_that_compute_different_norms_are_not_compared():
    """A comparison with a method whose norms are others would be of two different computations."""
    with pytest.raises(RuntimeError, match=r"50\.0%"):
        throughput._same_norms(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))


@pytest.mark.parametrize("at", [1, 4])
def test_an_error_in_our_step_keeps_the_others_figures(monkeypatch, tmp_path, at):
    """In the first step or in a later one; the command fails, and its file has the time without privacy."""
    kind = sys.modules["methods"].GhostStep
    run, steps = kind.run, []

    def failing(self, ids_BT):
        steps.append(0)
        if len(steps) >= at:
            raise RuntimeError("an error in our step")
        run(self, ids_BT)

    monkeypatch.setattr(kind, "run", failing)
    path = tmp_path / "throughput.json"
    with pytest.raises(SystemExit):
        throughput.main([*TINY_ARGUMENTS, "--rounds=4", f"--json={path}"])
    figures = json.loads(path.read_text())["methods"]
    assert "an error in our step" in figures[OURS]["refused"] and figures[PLAIN]["median_ms"] > 0


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("kernel_times", ["--rounds=0"], "--rounds is 0; at least 1 is needed"),
        ("kernel_times", ["--bandwidth=0"], "--bandwidth is 0.0; it has to be positive"),
        ("kernel_times", ["--only=nothing"], "invalid choice"),
        ("real_text", ["--steps=0"], "--steps is 0; at least 1 is needed"),
        ("real_text", ["--warmup=0"], "--warmup is 0; at least 1 is needed"),
        ("real_text", ["--max-tokens=-5"], "--max-tokens is -5; at least 1 is needed"),
        (
            "real_text",
            ["--columns", "a", "b", "c"],
            "--columns has 3 names; one (text) or two (prompt, ",
        ),
        (
            "real_text",
            ["--config", '{"model_type": "llama"}'],
            "--config has no tokenizer of its own; give",
        ),
        ("real_text", ["--config", '{"hidden_size": 3}'], "the configuration has no model_type; add it"),
        ("real_text", ["--config", "nowhere.json"], "nowhere.json is neither JSON nor a file of it"),
        ("sampling", ["--units=many"], "many is not a whole number of at least 1; write it as 1000000 or 1e6"),
        ("sampling", ["--units=1.5"], "1.5 is not a whole number"),
        ("sampling", ["--rounds=0"], "0 is not a whole number of at least 1"),
        ("sampling", ["--rates=2"], "--rates has 2; a sampling rate is above 0 and at most 1"),
        ("sampling", ["--rates=nan"], "--rates has nan; a sampling rate is above 0"),
        ("sampling", ["--units=1000", "--rates=1e-6"], "is no unit in most steps; raise one of the two"),
        ("sampling", ["--clock=sun"], "invalid choice"),
        ("targets", ["--rounds=0"], "--rounds is 0; at least 1 is needed"),
        ("targets", ["--rows", "13"], "--rows has 13; the table has the rows 1 to 12"),
        ("throughput", ["--batch=0"], "--batch is 0; at least 1 is needed"),
        ("throughput", ["--device=cuda", "--clock=cpu"], "does not see what a GPU does"),
        ("throughput", ["--compare=opacus"], "pip install opacus"),
    ],
)
def test_a_wrong_option_of_a_program_ends_it_with_one_line(name, arguments, message, capsys, monkeypatch):
    """What cannot be measured is refused before anything runs."""
    benchmark = program(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(arguments)
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_what_the_stock_trainer_would_spread_over_several_gpus_is_not_measured(monkeypatch, capsys):
    """Nor is processor time taken where a GPU works."""
    benchmark = program("real_text")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, arguments, message in (
        (2, [], "2 GPUs are visible to one process"),
        (1, ["--clock=cpu"], "does not see"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(SystemExit):
            benchmark.parse_arguments(arguments)
        assert message in capsys.readouterr().err
