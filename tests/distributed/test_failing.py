"""An error of one process ends the step on all of them; nothing of it is released."""

import pickle

import pytest
import torch

from dpllm.config.mistakes import words_of
from dpllm.engines.processes import OtherProcessError
from tests.distributed import faults, world


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of each of two processes."""
    folder = tmp_path_factory.mktemp("failing")
    return world.run(folder / "world", "tests.distributed.failing:everything", size=2, root=folder)


@pytest.mark.parametrize(
    ("case", "rank", "error"),
    [
        ("loss", 1, "of the loss of rank 1"),
        ("loss, caught", 1, "of the loss of rank 1"),
        ("backward", 0, "of the backward pass in two lines"),
        ("collator", 1, "of the collator of rank 1"),
    ],
)
def test_an_error_on_one_process_ends_the_step_on_all(ranks, case, rank, error):
    """Where it happened it stays the error that it is; the others get a line that names the rank and the error."""
    failed, other = ranks[rank][case], ranks[1 - rank][case]
    kind, message = other["error"]
    assert kind == "OtherProcessError" and "\n" not in message
    assert message.startswith(f"rank {rank}: Broken: {error} (in step 3). No process goes on with it")
    own, notes = failed["own"]
    assert " ".join(own.split()) == error and notes == []
    if case == "loss, caught":  # by a loop that goes on
        assert failed["error"][0] == "ValueError" and "failed half-way" in failed["error"][1]
    else:
        assert failed["error"] == ("Broken", own)


def test_an_error_on_all_processes_stays_what_it_is_on_each(ranks):
    """Such as that of a loss which is wrong everywhere."""
    for rank, found in enumerate(one["both"] for one in ranks):
        assert found["error"] == ("Broken", f"of the loss of rank {rank}")


def test_an_error_in_a_check_of_the_rows_is_raised_on_all(ranks):
    """The checks before steps 1, 2, 4 and so on run the loss too; the rank is named."""
    other, failed = (one["loss in a check"] for one in ranks)
    assert failed["error"] == ("Broken", "of the loss of rank 1")
    assert other["error"][0] == "OtherProcessError" and other["error"][1].startswith("rank 1: Broken: of the loss")
    assert all(found["taken"] == 1 and found["unmoved"] for found in (failed, other))


@pytest.mark.parametrize("case", ["loss", "loss, caught", "backward", "collator", "both"])
def test_nothing_of_a_step_that_failed_is_released(ranks, case):
    """It stays charged; no weight moves; and all processes can end the run together."""
    for found in (one[case] for one in ranks):
        assert found["taken"] == 2 and found["charged"] == 3 and found["unmoved"]
        assert found["end"] == "failed" and found["seconds"] < 60


def test_processes_that_shard_the_model_learn_the_error_from_the_board(tmp_path):
    """Their passes communicate: the one that waits names the error, and the failed process takes no further draw."""
    (tmp_path / "arguments.pickle").write_bytes(pickle.dumps({"root": tmp_path}))
    target = ["tests.distributed.failing:sharded", tmp_path]
    ended = faults.until_all_end(tmp_path, world.main, [target] * 2, 120.0, {})
    assert ended.codes == [0, 0], ended.logs
    waiting, failed = (pickle.loads((tmp_path / f"result.{rank}").read_bytes()) for rank in range(2))
    kind, words = waiting["error"]
    assert kind == "OtherProcessError" and words.startswith("rank 1: Broken: of the loss of rank 1 (in step 3)")
    own, notes = failed["own"]
    assert own == "of the loss of rank 1" and notes == []
    assert failed["error"][0] == "ValueError" and "failed half-way" in failed["error"][1]
    for found in (waiting, failed):
        assert found["taken"] == 2 and found["charged"] == 3 and found["unmoved"]


def test_an_end_by_the_main_process_only_is_one_line(tmp_path):
    """Where the others have ended, so that their connections are closed."""
    error, _ = world.run(tmp_path / "world", "tests.distributed.failing:main_only", size=2, root=tmp_path)
    assert error[0] == "DisagreementError" and "\n" not in error[1], error
    assert "ends the run" in error[1] and "on every process" in error[1]


@pytest.mark.deep
def test_a_process_that_ends_in_mid_step_is_one_line_on_the_others(tmp_path):
    """And no fault of this library."""
    (error, shown), _ = world.run(
        tmp_path / "world", "tests.distributed.failing:ended_in_mid_step", size=2, root=tmp_path
    )
    assert error[0] in ("OtherProcessError", "DisagreementError") and "\n" not in error[1], error
    assert "has ended" in error[1] and shown == error[1]


def test_a_process_that_fails_while_the_sums_are_added_up_is_one_line_on_the_others(tmp_path):
    """They wait for it there, and theirs was a bare *RuntimeError* of gloo; the board has the cause."""
    waiting, failed = world.run(tmp_path / "world", "tests.distributed.failing:ended_in_the_sum", size=2, root=tmp_path)
    (kind, words, notes, first), _ = waiting
    assert kind == "OtherProcessError" and words.startswith("rank 1: ") and "none left" in words and "\n" not in words
    (kind, words, notes, second), _ = failed
    assert (kind, words) == ("OutOfMemoryError", "none left") and not notes
    assert torch.equal(first, second)  # after the first step, of which both had the update


def test_an_error_of_another_process_is_no_fault_of_this_library():
    """The recipes' script prints it as one line."""
    assert words_of(OtherProcessError("Rank 1 failed during step 3")) == "Rank 1 failed during step 3"
