"""benchmarks/gpu.sh: both visits run as far as a CPU can, and no failure loses the figures of anything else."""

from __future__ import annotations

import doctest
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import children
from tests.benchmarks.material import program

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu import busy, plan, prepare, record, report, summary, wheels  # noqa: E402

ROW = plan.FULL_1B
OPACUS = {  # a step in which memory runs out
    "grad_sample.py": "import torch\n"
    "class GradSampleModuleFastGradientClipping(torch.nn.Module):\n"
    "    def __init__(self, model, **_):\n        super().__init__()\n        self.model = model\n"
    "    def forward(self, **_):\n        raise torch.OutOfMemoryError('CUDA out of memory')\n",
    "optimizers.py": "def DPOptimizerFastGradientClipping(*_, **__):\n    pass\n",
    "utils/fast_gradient_clipping_utils.py": "def DPLossFastGradientClipping(*_, **__):\n    pass\n",
}
FASTDP = "class PrivacyEngine:\n    def __init__(self, *_, **__):\n        import os, time\n        "


def environment(**values: str) -> dict[str, str]:
    left = {name: value for name, value in os.environ.items() if name not in ("OUT", "PYTHONPATH")}
    return {**left, "PYTHON": sys.executable, "WHEELS": "none", **values}


def call(*arguments: str, path: Path | None = None, check: bool = True) -> subprocess.CompletedProcess:
    """The script, as it is started."""
    values = {"PYTHONPATH": str(path)} if path else {}
    return children.run(["bash", str(SCRIPT), *arguments], env=environment(**values), check=check)


def package(folder: Path, name: str, **files: str) -> None:
    """Write a package that takes the place of another library."""
    for file, text in {"__init__.py": "", **files}.items():
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def figures_in(out: Path) -> dict:
    return json.loads((out / "gpu.json").read_text())


def methods_of(values: dict, name: str = ROW) -> dict:
    return values["steps"]["headline"][name]["figures"]["methods"]


def measured(values: dict, name: str = ROW) -> set[str]:
    """The methods of a row that have all their figures."""
    return {name for name, one in methods_of(values, name).items() if {"ms", "peak_bytes", "median_ms"} <= one.keys()}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """One step of each kind of the first visit, with a library that runs out of memory, and the printed output."""
    folder = tmp_path_factory.mktemp("gpu")
    package(folder, "opacus", **OPACUS)
    kinds = ["device", "headline", "profile", "whole step"]
    done = call("first", "--toy", "--out", str(folder / "out"), "--only", *kinds, path=folder, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return folder / "out", figures_in(folder / "out"), done.stdout


@pytest.mark.deep
def test_each_kind_of_step_has_its_figures(toy):
    """Every part ran, is printed and has figures; nothing is WRONG."""
    out, values, printed = toy
    assert list(values["steps"]) == ["device", "headline", "profile", "whole step"]
    for step, parts in values["steps"].items():
        for name, part in parts.items():
            assert part["state"] == record.OK and part["figures"] and part["seconds"] > 0, (step, name, part)
            assert f"-- {step}: {name}" in printed
    assert (out / "gpu.log").read_text() in printed
    assert values["machine"]["toy"] is True and len(values["machine"]["source"]) == 16


@pytest.mark.deep
def test_memory_that_runs_out_in_one_library_loses_no_other_figure(toy):
    """The peer has the reason, and the methods before and after it have their times and memory."""
    for name in (ROW, plan.LORA_8B):
        assert "CUDA out of memory" in methods_of(toy[1], name)["opacus"]["error"]
        assert {plan.PLAIN, plan.OURS} <= measured(toy[1], name)


@pytest.mark.deep
def test_compiled_methods_are_in_the_table(toy):
    """Training without privacy has its figures; the private step has them or the reason why not."""
    compiled = f"{ROW}, compiled"
    assert set(plan.COMPILED) <= methods_of(toy[1], compiled).keys()
    assert {plan.PLAIN, plan.COMPILED[0]} <= measured(toy[1], compiled)


@pytest.mark.deep
def test_an_error_or_a_crash_in_one_method_loses_no_other_figure(tmp_path):
    """The Triton kernels raise and a library ends the process; the PyTorch forms are measured, and all else is."""
    once = f"os.path.exists({str(tmp_path / 'ended')!r}) or (open({str(tmp_path / 'ended')!r}, 'w'), os.abort())\n"
    package(tmp_path, "fastDP", **{"__init__.py": FASTDP + once})
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any(one.startswith('--part') for one in sys.orig_argv):\n"
        "    from dpllm.ghost import NormMethod\n"
        "    def fuses(self, *_):\n"
        "        if self.fused is None:\n"
        "            raise RuntimeError('Triton Error [CUDA]')\n"
        "        return self.fused\n"
        "    NormMethod.fuses = fuses\n"
    )
    arguments = ["first", "--toy", "--only", "headline", "--out", str(tmp_path / "out")]
    done = call(*arguments, path=tmp_path, check=False)
    values = figures_in(tmp_path / "out")
    assert done.returncode == 1
    assert measured(values) == {plan.PLAIN, f"{plan.OURS}, PyTorch forms"}
    assert "Triton Error" in methods_of(values)[plan.OURS]["error"]
    assert f"WRONG headline, {ROW}: {plan.OURS}" in summary_in(done.stdout)
    assert "its process ended" in methods_of(values)["fastdp"]["error"]
    assert measured(values, plan.LORA_8B) == {plan.PLAIN, plan.OURS}  # a model this small runs no kernel
    assert measured(values, f"{ROW}, compiled") == {plan.PLAIN, plan.COMPILED[0]}


def summary_in(printed: str) -> str:
    return printed[printed.rindex("\n== ") :]


@pytest.mark.deep
def test_a_visit_that_is_stopped_keeps_its_figures(tmp_path):
    """What was measured is in the file, and no process remains; a library that hangs is in the way of the rest."""
    package(tmp_path, "fastDP", **{"__init__.py": FASTDP + "time.sleep(1e6)\n"})
    out = tmp_path / "out"
    command = ["bash", str(SCRIPT), "first", "--toy", "--only", "headline", "--out", str(out)]
    child = children.Child(command, env=environment(PYTHONPATH=str(tmp_path)), stdout=subprocess.DEVNULL)

    def hangs() -> bool:
        assert child.poll() is None, "the visit ended by itself"
        try:
            return "fastdp" in methods_of(figures_in(out))
        except (OSError, KeyError):
            return False

    try:
        children.wait_for(hangs)
        child.send_signal(signal.SIGTERM)
        child.wait()
        children.wait_for(lambda: not list(child.family()))
    finally:
        child.kill()
    assert {plan.PLAIN, plan.OURS} <= measured(figures_in(out))


@pytest.mark.deep
def test_a_method_that_hangs_is_ended_at_its_limit(tmp_path):
    """The next row is measured, and the row's own methods keep their figures."""
    package(tmp_path, "fastDP", **{"__init__.py": FASTDP + "time.sleep(1e6)\n"})
    arguments = ["first", "--toy", "--only", "headline", "--limit", "40", "--out", str(tmp_path / "out")]
    done = call(*arguments, path=tmp_path, check=False)
    values = figures_in(tmp_path / "out")
    assert "stopped after 40 s" in done.stdout
    for name in (ROW, plan.LORA_8B):
        assert measured(values, name) == {plan.PLAIN, plan.OURS}
        assert "stopped after 40 s" in methods_of(values, name)["fastdp"]["error"]


@pytest.mark.deep
@pytest.mark.parametrize("command", ["first", "second"])
def test_a_whole_visit_runs_on_a_cpu(tmp_path, command):
    """Every part ran, or says that it needs a GPU or a package."""
    done = call(command, "--toy", "--out", str(tmp_path), check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    values = figures_in(tmp_path)
    for part in plan.COMMANDS[command].parts:
        entry = values["steps"][part.step][part.name]
        assert entry["state"] in (record.OK, record.SKIPPED), (part.name, entry)


def test_a_visit_that_can_not_begin_ends(tmp_path):
    """As without PyTorch: all parts are listed as not reached, with the reason."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')")
    done = call("second", "--toy", "--out", str(tmp_path / "out"), path=tmp_path, check=False)
    states = {part["state"] for parts in figures_in(tmp_path / "out")["steps"].values() for part in parts.values()}
    assert done.returncode == 1 and states == {record.NOT_REACHED} and "not reached" in summary_in(done.stdout)


def test_a_visit_whose_time_is_over_lists_what_it_did_not_reach(tmp_path):
    """No part begins after the end."""
    done = call("first", "--toy", "--seconds", "1", "--out", str(tmp_path), check=False)
    parts = [part for parts in figures_in(tmp_path)["steps"].values() for part in parts.values()]
    assert done.returncode == 1 and len(parts) == len(plan.FIRST.parts)
    assert {part["state"] for part in parts} == {record.NOT_REACHED}


# ---------------------------------------------------------------------------------- the plan


def test_both_visits_fit_into_their_time():
    """With the wheels and the start of each process; the headline is there two minutes after the start."""
    assert plan.FIRST.planned <= plan.FIRST.seconds <= 590
    assert plan.SECOND.planned <= plan.SECOND.seconds <= 150
    first = list(plan.FIRST.processes[0])
    headline = [part for part in first if part.step == "headline" and "compiled" not in part.name]
    assert plan.WHEELS + plan.START + sum(part.seconds for part in first[: first.index(headline[-1]) + 1]) <= 120
    end = max(n for n, part in enumerate(plan.FIRST.parts) if part.step == "memory")
    starts = plan.START * len(plan.FIRST.processes)
    assert plan.WHEELS + starts + sum(part.seconds for part in plan.FIRST.parts[: end + 1]) <= 450


def test_parts_are_those_that_exist():
    """Names are unique, and those of rows are the target table's."""
    targets = program("targets").TARGETS
    for command in plan.COMMANDS.values():
        assert len({(part.step, part.name) for part in command.parts}) == len(command.parts)
        for part in command.parts:
            assert (ROOT / "benchmarks" / "gpu" / f"{part.function.split(':')[0]}.py").exists()
            if part.function == "rows:measure":
                assert part.name.removesuffix(", compiled") == targets[part.arguments[0] - 1].name


# ---------------------------------------------------------------------------------- the end


def empty() -> dict:
    return {"seconds": 0.0, "figures": {}, "lines": [], "wrong": []}


# ---------------------------------------------------------------------------------- what travels


PIP = """
import os, sys, zipfile
for flag in ("-d", "-w"):
    if flag in sys.argv:
        folder = sys.argv[sys.argv.index(flag) + 1]
open(os.path.join(folder, "hjson-3.1.0-py3-none-any.whl"), "wb").close()
with zipfile.ZipFile(os.path.join(folder, "bitsandbytes-1-py3-none-manylinux_2_24_x86_64.whl"), "w") as wheel:
    wheel.writestr("bitsandbytes/data", os.urandom(1 << 20))
    wheel.writestr("bitsandbytes-1.dist-info/RECORD", "")
"""


@pytest.mark.deep
@pytest.mark.parametrize(("room", "built", "quantized"), [(9, True, True), (0.5, True, False), (-1, False, False)])
def test_what_is_prepared_fits(tmp_path, room, built, quantized):
    """Up to 60 MiB, tracked files included; bitsandbytes stays behind first; what is refused changes nothing."""
    package(tmp_path, "pip", **{"__main__.py": PIP})
    source = tmp_path / "source"
    for folder in ("stories15M", "e2e"):
        (source / folder).mkdir(parents=True)
    for name in prepare.WEIGHTS:
        (source / "stories15M" / name).write_text("{}")
    with open(source / "stories15M" / "model.safetensors", "wb") as file:
        file.truncate(int((prepare.LIMIT - prepare.tracked_mib() - room) * 2**20))
    for name in ("trainset.csv", "devset.csv"):
        (source / "e2e" / name).write_text("mr,ref\n" + "".join(f"{n},text {n}\n" for n in range(9000)))
    (tmp_path / ".whl").mkdir()
    (tmp_path / ".whl" / "old.whl").touch()
    done = call("prepare", "--material", str(source), "--into", str(tmp_path), path=tmp_path, check=False)
    there = {path.name for path in (tmp_path / ".whl").iterdir()}
    assert (done.returncode == 0) == built == (tmp_path / ".material").exists() == ("old.whl" not in there)
    assert any(name.startswith("bitsandbytes") for name in there) == quantized
    if built:
        lines = (tmp_path / ".material" / "e2e" / "trainset.csv").read_text().splitlines()
        assert len(lines) == 1 + prepare.RECORDS and lines[-1] == "8998,text 8998"
        assert "benchmarks/gpu.sh first" in done.stdout and "benchmarks/gpu.sh second" in done.stdout
    assert not list(tmp_path.glob(".prepare-*"))


def test_the_list_of_wheels_is_exact_and_without_torch():
    """One version of each, none that the machine has, and everything else that this package needs."""
    names = [line.split("==") for line in wheels.wanted(wheels.LIST.read_text())]
    assert all(len(pair) == 2 for pair in names)
    packages = [name for name, _ in names]
    assert len(packages) == len(set(packages))
    assert not {"torch", "triton", "transformers", "accelerate", "peft"} & set(packages)
    assert {"dp-accounting", "datasets", "jsonschema", "deepspeed"} <= set(packages)


def test_libraries_for_other_devices_stay_behind(tmp_path):
    """The wheel of bitsandbytes keeps its Python files and CUDA 13, and lists its contents."""
    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        for name in ("__init__.py", *(f"libbitsandbytes_{device}.so" for device in ("cuda130", "cuda118", "rocm70"))):
            made.writestr(f"bitsandbytes/{name}", name)
        made.writestr("bitsandbytes-1.dist-info/RECORD", "old")
    wheels.slim(wheel)
    with zipfile.ZipFile(wheel) as slimmed:
        names = slimmed.namelist()
        listed = [line.split(",")[0] for line in slimmed.read("bitsandbytes-1.dist-info/RECORD").decode().splitlines()]
    assert sorted(listed) == sorted(names)
    assert [name for name in names if name.endswith(".so")] == ["bitsandbytes/libbitsandbytes_cuda130.so"]


# ---------------------------------------------------------------------------------- modules


@pytest.mark.parametrize("module", [busy, record, report, summary, wheels])
def test_examples_of_the_modules(module):
    """Examples in docstrings hold."""
    assert doctest.testmod(module).failed == 0


def event(name, category, begin, duration):
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": duration}


def test_a_profile_counts_what_the_gpu_does():
    """Kernels and copies count, once where they overlap; work of the CPU and annotations do not."""
    events = [
        event("gemm", "kernel", 0, 40),
        event("gemm", "kernel", 30, 20),
        event("copy", "gpu_memcpy", 90, 10),
        event("aten::mm", "cpu_op", 0, 500),
        event("step", "gpu_user_annotation", 0, 100),
    ]
    found = busy.summarize({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}, steps=1, on_gpu=True)
    assert found["share_busy_profiled"] == 0.6 and found["launches"] == 3 and found["busy_ms"] == 0.06
    assert [busy.with_time(found, ms)["launch_bound"] for ms in (0.061, 0.08)] == [False, True]
    assert found["top"] == [
        {"name": "gemm", "ms": 0.06, "calls": 2},
        {"name": "copy", "ms": 0.01, "calls": 1},
    ]
    with pytest.raises(ValueError, match="no event of the device"):
        busy.summarize({"traceEvents": events[3:]}, steps=1, on_gpu=True)


def test_visits_of_one_section_are_of_one_machine():
    """Parts of several visits come together, the last that has figures; visits to different machines do not."""
    step = {"headline": {ROW: {**empty(), "state": record.OK, "figures": {"a": 1}}}}
    first = {"machine": {"device": "NVIDIA H100", "torch": "2.11.0"}, "steps": step}
    second = {**first, "steps": {"headline": {ROW: {**empty(), "state": record.NOT_REACHED}}, "rows": {}}}
    assert report.merged([first, second])["steps"]["headline"] == step["headline"]
    with pytest.raises(ValueError, match="H100"):
        report.merged([first, {"machine": {"device": "NVIDIA H200", "torch": "2.11.0"}, "steps": {}}])
    with pytest.raises(ValueError, match="at least one"):
        report.merged([])


@pytest.mark.parametrize(
    ("status", "printed", "wrong"),
    [
        (0, "....\n40 passed in 3.0s", None),
        (1, "FAILED tests/a.py::b - assert 1 == 2\n1 failed, 3 passed in 3.0s", "pytest ended with status 1"),
        (5, "40 deselected in 0.1s", "no test ran"),
    ],
)
def test_the_kernels_tests_run_on_the_device(monkeypatch, tmp_path, status, printed, wrong):
    """Failing tests are named; it is also a failure if none ran."""
    from gpu import kernel_checks
    from gpu.setting import Setting

    ended = subprocess.CompletedProcess([], status, printed, "")
    monkeypatch.setattr(kernel_checks.subprocess, "run", lambda *args, **options: ended)
    figures = record.Figures()
    kernel_checks.own_tests(figures, Setting(toy=False, folder=tmp_path))
    assert figures["failures"] == [line for line in printed.splitlines() if line.startswith("FAILED")]
    assert figures.wrong == [] if wrong is None else wrong in "; ".join(figures.wrong)
