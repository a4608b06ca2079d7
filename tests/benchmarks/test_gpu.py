"""benchmarks/gpu.sh: every stage runs as far as a CPU can, and no figure that is wrong, missing or slow goes unseen."""

from __future__ import annotations

import doctest
import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests import children

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu import busy, record, report, wheels  # noqa: E402

GPU_ONLY = {
    "PyTorch forms": "no CUDA",
    "accelerate launch: fsdp2": "no CUDA",
    "accelerate launch: zero3": "no CUDA",
}
NOT_INSTALLED = ("opacus", "fastdp", "nf4")


def call(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    """The script, as it is started."""
    environment = {name: value for name, value in os.environ.items() if name not in ("OUT", "WHEELS", "PYTHONPATH")}
    return children.run(["bash", str(SCRIPT), *arguments], env={**environment, "PYTHON": sys.executable}, check=check)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The figures of all stages in the toy, and the printed output."""
    out = tmp_path_factory.mktemp("gpu")
    done = call("--toy", "--out", str(out), check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return out, json.loads((out / "gpu.json").read_text()), done.stdout


@pytest.mark.deep
def test_all_stages_run_on_a_cpu(toy):
    """Every step of every stage ran, or says that it needs a GPU or a package; none failed or was left out."""
    out, figures, printed = toy
    assert list(figures["stages"]) == list("123456")
    for number, stage in figures["stages"].items():
        assert stage["title"] in printed and stage["steps"]
        for name, step in stage["steps"].items():
            assert step["state"] in (record.PASSED, record.SKIPPED), (number, name, step)
            assert f"-- {name}: {step['state']}" in printed
            if step["state"] == record.PASSED:
                assert step["figures"] and step["seconds"] >= 0
            elif "in the toy the same" not in step["error"]:
                expected = GPU_ONLY.get(name, "is not installed" if name.startswith(NOT_INSTALLED) else None)
                assert expected is not None and expected in step["error"], (name, step)
    assert (out / "gpu.log").read_text() in printed


@pytest.mark.deep
def test_the_figures_say_where_they_are_from(toy):
    """Versions, and which code ran, whether or not its history is there."""
    _, figures, _ = toy
    machine = figures["machine"]
    assert machine["torch"] == torch.__version__ and machine["toy"] is True
    assert len(machine["source"]) == 16 and machine["commit"]


@pytest.mark.deep
def test_figures_become_a_section(toy, capsys):
    """Every step has its line, tables are whole, and a toy claims no speed."""
    out, figures, _ = toy
    section = call("report", str(out / "gpu.json")).stdout
    assert "no figure says anything about speed" in section
    for stage in figures["stages"].values():
        assert f"### {stage['title'].capitalize()}" in section
        assert all(f"| {name} |" in section for name in stage["steps"])
    bars = [[line.count("|") for line in block.splitlines()] for block in section.split("\n\n") if block[:1] == "|"]
    assert len(bars) == 2 + len(figures["stages"]) and all(len(set(counts)) == 1 for counts in bars)


# ------------------------------------------------------------------- the steps' runner


def run(folder: Path, *steps, seconds: float = 100.0, lost=lambda: False) -> dict:
    """The steps of a stage, and the file that is left."""
    book = record.Record(folder / "gpu.json")
    record.run_stage(book, 1, "a stage", list(steps), None, seconds, lost)
    return json.loads((folder / "gpu.json").read_text())["stages"]["1"]["steps"]


def good(figures, setting):
    figures.check("error", 1e-7, at_most=1e-5)


@pytest.mark.parametrize("value", [2e-5, math.nan, math.inf])
def test_a_wrong_figure_fails_its_step_alone(tmp_path, value):
    """It is kept with the later figures; the steps that follow run."""

    def wrong(figures, setting):
        figures.check("error", value, at_most=1e-5)
        figures["later"] = 3

    steps = run(tmp_path, ("wrong", wrong), ("good", good))
    assert steps["wrong"]["state"] == record.FAILED and "error is" in steps["wrong"]["error"]
    assert steps["wrong"]["figures"]["later"] == 3 and steps["good"]["state"] == record.PASSED


def test_an_error_keeps_what_was_found_before(tmp_path):
    """With its traceback, and a wrong figure beside it."""

    def breaks(figures, setting):
        figures.check("small", 1, at_least=2)
        raise RuntimeError("first line\nsecond line")

    step = run(tmp_path, ("breaks", breaks))["breaks"]
    assert step["state"] == record.FAILED and step["figures"] == {"small": 1}
    assert "small is 1" in step["error"] and "RuntimeError: first line" in step["error"]
    assert "second line" in step["traceback"]


def test_a_step_that_can_not_run_says_why(tmp_path):
    """It is neither passed nor failed; a wrong figure found before fails it all the same."""

    def elsewhere(figures, setting):
        raise record.Skipped("no CUDA")

    def wrong(figures, setting):
        figures.require(False, "this is wrong")
        raise record.Skipped("no CUDA")

    steps = run(tmp_path, ("elsewhere", elsewhere), ("wrong", wrong))
    assert (steps["elsewhere"]["state"], steps["elsewhere"]["error"]) == (record.SKIPPED, "no CUDA")
    assert steps["wrong"]["state"] == record.FAILED and "this is wrong" in steps["wrong"]["error"]


@pytest.mark.parametrize(("seconds", "lost"), [(-1.0, False), (100.0, True)])
def test_steps_that_are_not_reached_are_listed(tmp_path, seconds, lost):
    """When the time is over, or the device refuses to go on after an error."""

    def breaks(figures, setting):
        raise RuntimeError("an illegal memory access was encountered")

    steps = run(tmp_path, ("breaks", breaks), ("good", good), seconds=seconds, lost=lambda: lost)
    assert steps["good"]["state"] == record.NOT_REACHED and steps["good"]["error"]


def test_what_a_killed_process_had_found_is_kept(tmp_path):
    """The file is written before and after each step, so it says in which one the process ended."""
    found: dict = {}

    def killed(figures, setting):
        after = record.Record(tmp_path / "gpu.json")
        after.close([1, 2], "stopped after 9 s")
        found["states"] = {name: step["state"] for name, step in after.values["stages"]["1"]["steps"].items()}
        found["failed"] = [after.failed(number) for number in (1, 2)]

    run(tmp_path, ("good", good), ("killed", killed))
    assert found == {"states": {"good": record.PASSED, "killed": record.FAILED}, "failed": [1, 0]}
    empty = record.Record(tmp_path / "none.json")
    empty.close([3], "its process ended with status 1")
    assert empty.failed(3) == 1


def test_a_stage_that_can_not_begin_is_a_failure(tmp_path):
    """Also when its process ends before the first step, as without PyTorch."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "OUT": str(tmp_path / "out")}
    command = ["bash", str(SCRIPT), "--toy", "6"]
    done = children.run(command, env=environment, check=False)
    assert done.returncode == 1 and "its process ended with status 1" in done.stdout
    stage = json.loads((tmp_path / "out" / "gpu.json").read_text())["stages"]["6"]
    assert [step["state"] for step in stage["steps"].values()] == [record.FAILED]


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
    from gpu import first_contact
    from gpu.setting import Setting

    ended = subprocess.CompletedProcess([], status, printed, "")
    monkeypatch.setattr(first_contact.subprocess, "run", lambda *args, **options: ended)
    figures = record.Figures()
    first_contact.kernel_tests(figures, Setting(toy=False, folder=tmp_path, material=None))
    assert figures["pytest"] == printed.splitlines()[-1]
    assert figures["failures"] == [line for line in printed.splitlines() if line.startswith("FAILED")]
    assert figures.wrong == [] if wrong is None else wrong in "; ".join(figures.wrong)


def test_what_takes_too_long_or_is_not_there_ends_a_step_alone(monkeypatch, tmp_path):
    """A program that hangs, weights that were not given."""
    from gpu import first_contact, whole_run
    from gpu.setting import Setting

    def hangs(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout, output=b"...")

    setting = Setting(toy=False, folder=tmp_path, material=None)
    monkeypatch.setattr(first_contact.subprocess, "run", hangs)
    with pytest.raises(RuntimeError, match="pytest took more than"):
        first_contact.kernel_tests(record.Figures(), setting)
    with pytest.raises(record.Skipped, match="give --material"):
        whole_run.place_of(setting)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["7"], "stage 7 is none of 1, 2, 3, 4, 5, 6"), (["--material", "nowhere"], "nowhere, which is no folder")],
)
def test_wrong_options_are_one_line(arguments, message):
    """A wrong option ends before anything runs."""
    done = call(*arguments, check=False)
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("module", [record, report, busy, wheels], ids=lambda module: module.__name__)
def test_examples_are_true(module):
    """Those in the docstrings."""
    assert doctest.testmod(module).attempted > 0 == doctest.testmod(module).failed


def test_stages_end_within_their_pieces():
    """Two pieces of less than ten minutes, with the installation of wheels; twenty in all."""
    source = (ROOT / "benchmarks" / "gpu" / "__main__.py").read_text()
    line = next(line for line in source.splitlines() if line.startswith("LIMITS = "))
    limits = eval(line.removeprefix("LIMITS = "))
    assert limits.keys() == set(range(1, 7))
    assert limits[1] + limits[2] <= 560 and sum(limits[n] for n in (3, 4, 5, 6)) <= 560


# ------------------------------------------------------------------------- the profile


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


# -------------------------------------------------------------------------- the section


def figures_of(device="NVIDIA H100", **stages) -> dict:
    return {"machine": {"device": device, "torch": "2.11.0"}, "stages": stages}


def row(speed, target) -> dict:
    found = {"speed_ratio": speed, "memory_ratio": 1.2, "target_speed": target, "target_memory": 1.1}
    return {"state": "passed", "seconds": 2.0, "figures": {**found, "ms": {"non-private": [3.0], "dpllm": [4.0]}}}


def test_targets_that_are_missed_are_called_missed():
    """Met from the target on; memory the other way round; another library beside it."""
    steps = {"a": row(0.95, 0.95), "b": row(0.949, 0.95), "c": row(0.5, None)}
    steps["opacus: a"] = {"state": "passed", "figures": {"speed_ratio": 0.4, "memory_ratio": 1.5}}
    steps["opacus: b"] = {"state": "skipped", "error": "opacus is not installed", "figures": {}}
    section = report.as_markdown([figures_of(**{"2": {"title": "the target table", "steps": steps}})])
    assert "| a | ≥ 0.95 | 0.950, met | ≤ 1.1 | 1.200, missed | 3.0 | 4.0 | 0.400 / 1.500 | - |" in section
    assert "| b | ≥ 0.95 | 0.949, missed |" in section and "opacus is not installed" in section
    assert "| c | - | 0.500 |" in section


def test_failures_are_in_the_section():
    """By stage and step, with their reason."""
    steps = {"noise": {"state": "failed", "error": "mean is 3 | 4", "figures": {}}}
    section = report.as_markdown([figures_of(**{"1": {"title": "first contact", "steps": steps}})])
    assert "- stage 1, noise: mean is 3 / 4" in section and "Nothing failed" not in section


def test_pieces_of_one_section_are_of_one_machine():
    """Stages of several runs come together; runs of different machines do not."""
    first, second = (figures_of(**{n: {"title": f"stage {n}", "steps": {}}}) for n in ("2", "1"))
    assert list(report.merged([first, second])["stages"]) == ["1", "2"]
    with pytest.raises(ValueError, match="device is NVIDIA H100 in one and NVIDIA H200 in another"):
        report.merged([first, figures_of(device="NVIDIA H200")])
    with pytest.raises(ValueError, match="at least one"):
        report.merged([])


# --------------------------------------------------------------------------- the wheels


def test_the_list_of_wheels_is_exact_and_without_torch():
    """One version of each, none that the machine has, and everything else that this package needs."""
    names = [line.split("==") for line in wheels.wanted(wheels.LIST.read_text())]
    assert all(len(pair) == 2 for pair in names)
    packages = [name for name, _ in names]
    assert len(packages) == len(set(packages))
    assert not {"torch", "triton", "transformers", "accelerate", "peft"} & set(packages)
    assert {"dp-accounting", "prv-accountant", "datasets", "jsonschema", "deepspeed"} <= set(packages)


def test_what_pip_is_asked_for(tmp_path):
    """Nothing that is needed in turn, and binaries for the machine; source distributions are built."""
    download, *built = wheels.commands(tmp_path, ["hjson==3.1.0", "deepspeed==0.19.8"], ["folder"])
    assert all("--no-deps" in command for command in (download, *built))
    assert "--python-version=3.12" in download and "hjson==3.1.0" in download and "deepspeed==0.19.8" not in download
    assert [command[-1] for command in built] == ["deepspeed==0.19.8", "folder"]


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


@pytest.mark.parametrize(
    ("name", "size", "code"),
    [
        ("hjson-3.1.0-py3-none-any.whl", 10, 0),
        ("hjson-3.1.0-py3-none-any.whl", wheels.LIMIT + 1, 1),
        ("torch-2.11.0-cp312-cp312-manylinux_2_28_x86_64.whl", 10, 1),
        ("rpds_py-1-cp311-cp311-manylinux_2_17_x86_64.whl", 10, 1),
        ("rpds_py-1-cp312-cp312-manylinux_2_17_aarch64.whl", 10, 1),
    ],
)
def test_a_folder_that_would_not_do_is_refused(tmp_path, name, size, code):
    """Too large, or a wheel that does not run on the machine or must not come along."""
    with open(tmp_path / name, "wb") as file:
        file.truncate(size)
    assert wheels.check(tmp_path) == code


def test_a_folder_with_other_wheels_is_not_filled(tmp_path, capsys):
    """Two versions of one package stop an installation."""
    (tmp_path / "old.whl").write_text("")
    with pytest.raises(SystemExit):
        wheels.main([str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err
