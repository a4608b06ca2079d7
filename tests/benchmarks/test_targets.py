"""benchmarks/targets.py: counts without computed products match a real run, and the depth is extended correctly."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace

import pytest
import torch

from tests.benchmarks.material import program
from tests.tiers import deep_case

benchmark = program("targets")
methods, throughput = sys.modules["methods"], sys.modules["throughput"]

PLAIN, OURS = benchmark.PLAIN, benchmark.OURS
SMALL = {"hidden_size": 64, "intermediate_size": 160}


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    """The rows of the table, on models that take no time."""
    monkeypatch.setattr(benchmark, "WIDTHS", {name: SMALL | {"num_hidden_layers": 5} for name in ("1B", "8B")})


def settings_of(layers, **changes):
    row = replace(benchmark.TARGETS[0], **{"batch": 2, "tokens": 16, **changes})
    return row.settings(layers, "cpu", 1, dtype="float32")


def as_it_runs(settings):
    """FLOPs and peak bytes with all products computed."""
    steps, _, ids_BT = benchmark.prepare(replace(settings, warmup=1), [PLAIN, OURS])
    figures = {}
    for name, step in steps.items():
        flops = sum(throughput.count_flops(lambda step=step: step.run(ids_BT)).values())
        figures[name] = flops, throughput.peak_memory(step, ids_BT)
        step.forget()
    return figures


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", ["none", deep_case("reentrant"), deep_case("nonreentrant")])
def test_counts_without_products_are_those_of_a_step(mode, checkpointing):
    """The same operations and the same bytes, for any trained parameters: values change neither."""
    settings = settings_of(1, mode=mode, checkpointing=checkpointing)
    without, ran = benchmark.counted(settings), as_it_runs(settings)
    for name in (PLAIN, OURS):
        assert without[name][0] == ran[name][0] > 0
        assert without[name][1] == pytest.approx(ran[name][1], rel=0.01)


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_the_extension_to_the_whole_depth(mode):
    """From two shallow models to five layers: operations exactly, bytes about, since the peak may lie elsewhere."""
    shallow, deeper, five = (benchmark.counted(settings_of(layers, mode=mode)) for layers in (*benchmark.DEPTHS, 5))
    for name in (PLAIN, OURS):
        assert benchmark.extended(shallow[name][0], deeper[name][0], benchmark.DEPTHS, 5) == five[name][0]
        peak = benchmark.extended(shallow[name][1], deeper[name][1], benchmark.DEPTHS, 5)
        assert peak == pytest.approx(five[name][1], rel=0.05)


def test_products_are_skipped_and_the_rest_is_not():
    """A product gives or writes zeros of its shape and type, one in place leaves its argument."""
    with benchmark.WithoutProducts():
        product = torch.ones(3, 4, dtype=torch.bfloat16) @ torch.ones(4, 5, dtype=torch.bfloat16)
        total = torch.ones(3, 5)
        total.addmm_(torch.ones(3, 4), torch.ones(4, 5))
        out = torch.ones(3, 5)
        torch.mm(torch.ones(3, 4), torch.ones(4, 5), out=out)
        added = torch.ones(3) + 1
    assert product.shape == (3, 5) and product.dtype == torch.bfloat16 and not product.any()
    assert total.eq(1).all() and not out.any() and added.eq(2).all()


@pytest.mark.deep
def test_command_line_prints_table_and_writes_files(tmp_path, capsys, monkeypatch):
    """Two rows, with the machine; ratios are of the figures beside them."""
    small = tuple(replace(target, batch=2, tokens=8) for target in benchmark.TARGETS)
    monkeypatch.setattr(benchmark, "TARGETS", small)
    markdown, path = tmp_path / "targets.md", tmp_path / "targets.json"
    benchmark.main(["--rows", "1", "5", "--device", "cpu", "--markdown", str(markdown), "--json", str(path)])
    report = json.loads(path.read_text())
    assert report["machine"]["torch"] == torch.__version__ in markdown.read_text()
    assert [row["name"] for row in report["rows"]] == [small[0].name, small[4].name]
    for row in report["rows"]:
        assert row["flop_ratio"] == row["flops"][PLAIN] / row["flops"][OURS]
        assert row["memory_ratio"] == row["peak_bytes"][OURS] / row["peak_bytes"][PLAIN]
        assert row["speed_ratio"] is None and row["opacus"] == row["fastdp"] == "not installed"
    assert capsys.readouterr().out == markdown.read_text()


def test_without_a_gpu_peers_are_counted_in_the_same_way(monkeypatch):
    """A peer that takes the model has ratios of its counts; one that refuses it has the reason."""

    def refusing(model):
        raise NotImplementedError("parameter tying\nand more")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(methods.METHODS, methods.OPACUS, methods.METHODS[methods.TWICE])
    monkeypatch.setitem(methods.METHODS, methods.FASTDP, refusing)
    row = benchmark.measure_row(replace(benchmark.TARGETS[0], batch=2, tokens=16), "cpu", 1)
    flops, memory = map(float, row["opacus"].split(" / "))
    assert flops < 0.9 < row["flop_ratio"] and 0.5 < memory < 2
    assert row["fastdp"] == "NotImplementedError: parameter tying"


def test_per_layer_clipping_frees_a_layer_in_the_backward_pass():
    """Under checkpointing with long rows, no more is alive at the peak than without privacy."""
    settings = settings_of(12, tokens=256, checkpointing="reentrant")
    small = json.dumps(json.loads(settings.config) | {"vocab_size": 1000})
    settings = replace(settings, config=small, dtype="bfloat16")
    flat, layers = benchmark.counted(settings), benchmark.counted(settings, benchmark.LAYERS)
    assert layers[OURS][1] < 0.9 * flat[OURS][1] and layers[OURS][1] <= 1.01 * layers[PLAIN][1]


@pytest.mark.parametrize("installed", [False, True])
def test_on_a_gpu_times_and_peers_are_in_the_row(monkeypatch, installed):
    """Whole models are measured; a refusal of a model is in its column. Triton's work cannot be counted."""

    def measured(settings, names, counting):
        assert json.loads(settings.config)["num_hidden_layers"] == 5 and not counting
        results = {
            PLAIN: throughput.Measurement([9.0], {}, 100),
            OURS: throughput.Measurement([10.0], {}, 110),
            methods.OPACUS: throughput.Measurement(refused="parameter tying"),
            methods.FASTDP: throughput.Measurement([12.0], {}, 130),
        }
        return {name: results[name] for name in names}

    monkeypatch.setattr(benchmark, "measure", measured)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    row = benchmark.measure_row(benchmark.TARGETS[0], "cuda", 1)
    assert (row["speed_ratio"], row["flop_ratio"], row["memory_ratio"]) == (0.9, None, 1.1)
    assert row["opacus"] == ("parameter tying" if installed else "not installed")
    assert row["fastdp"] == ("0.75 / 1.30" if installed else "not installed")


def test_an_error_in_our_step_keeps_the_time_without_privacy(monkeypatch, tmp_path):
    """The row says why, and the command fails."""

    def measured(settings, names, counting):
        return {PLAIN: throughput.Measurement([9.0], {}, 100), OURS: throughput.Measurement(refused="an error")}

    monkeypatch.setattr(benchmark, "measure", measured)
    row = benchmark.measure_row(benchmark.TARGETS[0], "cuda", 1)
    assert (row["ms"], row["peak_bytes"], row["error"]) == ({PLAIN: [9.0]}, {PLAIN: 100}, "an error")
    assert "an error" in benchmark.line_of(row)
    monkeypatch.setattr(benchmark, "measure_row", lambda *_: row)
    with pytest.raises(SystemExit):
        benchmark.main(["--rows", "1", "--device", "cpu", "--json", str(tmp_path / "targets.json")])
    assert json.loads((tmp_path / "targets.json").read_text())["rows"][0]["ms"] == {PLAIN: [9.0]}
