"""A process that fails, stops or ends is told by the others, who end with its code; nobody waits in silence."""

import contextlib

import pytest
import torch.distributed as dist

from dpllm.engines import board
from tests.distributed import faults
from tests.mutations import kills
from tests.tiers import deep_case

LIMIT = ("train.ddp_timeout=15",)
SHOWN = {
    "key_error": "KeyError",
    "os_error": "/data/notes.jsonl",
    "value_error": "this row cannot be used",
    "out_of_memory": "Memory ran out",
    "exits": "sys.exit(3)",
    "interrupt": "Ctrl-C",
}
SILENT = ("exits", "interrupt")  # the failed rank prints no error


@pytest.mark.parametrize(
    ("engine", "fault", "rank", "step"),
    [
        ("ddp", "os_error", 1, 3),
        ("fsdp2", "key_error", 0, 3),
        *(deep_case("ddp", "key_error", 1, step) for step in (3, 4)),  # the fourth step checks rows
        *(deep_case("fsdp2", fault, 1, 3) for fault in SHOWN),
        *(deep_case(engine, "key_error", 1, 3) for engine in ("zero1", "zero2")),
    ],
)
def test_every_process_names_the_rank_that_failed_and_ends_with_its_code(engine, fault, rank, step, tmp_path):
    """The failed rank prints its error, the others the rank and its error; the step is charged."""
    ended = faults.run(tmp_path, engine, fault, rank, step)
    assert None not in ended.codes and len(set(ended.codes)) == 1 and ended.codes[0] != 0
    for number in range(2):
        if number == rank and fault in SILENT:
            continue
        (line,) = ended.errors(number)
        assert SHOWN[fault] in line
        assert line.startswith(f"error: rank {rank}: ") == (number != rank)
    assert ended.charged == step


@kills(
    "a process that went on after an error of rank 0 tells and hears nothing more",
    "dpllm/engines/board.py",
    "        follows = rank == 0 and time.monotonic() - since < GRACE\n",
    "        follows = any(one.rank == 0 for one in self._failures)\n",
)
def test_a_failure_that_a_program_went_on_from_silences_nobody(monkeypatch):
    """Rank 0, which holds the store, refused a value that was mended; rank 2 hears of a later failure of rank 1."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = dist.HashStore()
    boards = [board.FailureBoard(lambda: store, rank, 3, "a board") for rank in range(3)]
    closed = RuntimeError("Connection closed by peer")
    try:
        with contextlib.suppress(ValueError), boards[0].during("the checks"):
            raise ValueError("refused")
        for other in boards[1:]:
            with pytest.raises(board.OtherProcessError, match="rank 0: refused"), other.during("the checks"):
                raise closed
        with pytest.raises(board.OtherProcessError, match="rank 1: a bad record"), boards[2].during("step 5"):
            with contextlib.suppress(ValueError), boards[1].during("step 5"):
                raise ValueError("a bad record")
            raise closed
    finally:
        for one in boards:
            one.close()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("privacy.clip_norm=2", "differ in privacy.clip_norm (rank 0: 1.0, rank 1: 2.0)"),
        ("train.max_steps=5", "differ in train.max_steps (rank 0: 6, rank 1: 5)"),
        ("data.path=none.jsonl", "none.jsonl: no such file or folder"),
        ("train.output_dir=other", "is not the one that rank 1"),
    ],
)
def test_a_key_that_one_process_has_otherwise_is_named(key, says, tmp_path):
    """Before anything is charged; what all processes find is printed once."""
    ended = faults.run(tmp_path, "ddp", ranks={1: [key]})
    assert ended.codes == [2, 2] and ended.charged == 0
    lines = [line for number in range(2) for line in ended.errors(number)]
    assert lines and all(says in line for line in lines)


@pytest.mark.deep
@pytest.mark.parametrize("fault", ["clock_jumps", "sleep"])
def test_a_run_that_only_waits_a_little_goes_on(fault, tmp_path):
    """A clock that was set back, and a step of twenty seconds."""
    ended = faults.run(tmp_path, "ddp", fault)
    assert ended.codes == [0, 0] and ended.charged == 6


@pytest.mark.deep
def test_a_signal_to_one_process_stops_all_in_order(tmp_path):
    """After the step, with a checkpoint; nothing is lost."""
    ended = faults.run(tmp_path, "fsdp2", "terminate")
    assert ended.codes == [143, 143] and ended.charged == 3 and (tmp_path / "out" / "checkpoint-3").is_dir()


@pytest.mark.parametrize(
    ("engine", "rank"),
    [("fsdp2", 1), *(deep_case(engine, 1) for engine in ("ddp", "zero2")), deep_case("fsdp2", 0)],
)
def test_a_process_that_was_killed_is_named(engine, rank, tmp_path):
    """It could say nothing; and it is no fault of this library."""
    ended = faults.run(tmp_path, engine, "kill", rank)
    assert ended.codes[rank] == -9 and ended.codes[1 - rank] == 2 and ended.charged == 3
    (line,) = ended.errors(1 - rank)
    assert line.startswith(f"error: rank {rank} has ended")


@pytest.mark.parametrize(
    ("engine", "fault", "rank"),
    [
        ("ddp", "spin", 1),
        deep_case("ddp", "stop", 1),
        deep_case("fsdp2", "stop", 1),
        deep_case("fsdp2", "stop", 0),
        deep_case("fsdp2", "spin", 1),
        deep_case("ddp", "log_blocks", 0),
    ],
)
def test_a_process_that_does_not_go_on_ends_the_run_at_the_time_limit(engine, fault, rank, tmp_path):
    """Whether it is stopped or busy without end; the time limit is the user's."""
    ended = faults.run(tmp_path, engine, fault, rank, overrides=LIMIT)
    assert ended.codes[1 - rank] == 2 and ended.charged == 3
    assert any(f"rank {rank}" in line or "ranks 0, 1" in line for line in ended.errors(1 - rank))


def scenario(folder, name, rank, size=3):
    return faults.until_all_end(folder, faults.scenario, [[name, rank]] * size, 60.0, {})


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failure_reaches_processes_that_wait_in_a_barrier_of_another_library(rank, tmp_path):
    """As while one process reads the records: nothing else would tell them."""
    ended = scenario(tmp_path, "barrier", rank)
    others = [number for number in range(3) if number != rank]
    assert ended.codes == [2, 2, 2]
    for number in others:
        assert f"rank {rank}: /data/notes.jsonl: No such file or directory (in the reading)" in ended.logs[number]


@pytest.mark.parametrize("name", ["stop", "deadlock"])
def test_processes_that_wait_in_vain_end_at_the_limit(name, tmp_path):
    """A stopped process says nothing; one that is busy without end is told where it is."""
    ended = scenario(tmp_path, name, 1)
    assert ended.codes[0] == ended.codes[2] == 2
    assert any("rank 1" in line or "ranks 0, 1, 2" in line for line in ended.errors(0))
    if name == "deadlock":
        assert ended.codes[1] == 2 and "time.sleep(0.1)" in ended.logs[1]  # where it was


def test_a_process_that_is_slow_is_named_and_waited_for(tmp_path):
    """Work that may take any time is ended by no limit."""
    ended = scenario(tmp_path, "slow", 1)
    assert ended.codes == [0, 0, 0] and all("all went on" in log for log in ended.logs)
    assert any("rank 1 in the reading" in line for number in (0, 2) for line in ended.errors(number))
