"""A difference on one process stops all of them, and no step is charged wrongly."""

import pytest
import torch

from dpllm.engines.checksums import Checksum, _replicated, differing
from dpllm.engines.processes import Processes
from tests.distributed import world
from tests.mutations import kills


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of each of two processes."""
    folder = tmp_path_factory.mktemp("replicas")
    return world.run(folder / "world", "tests.distributed.drifting:everything", size=2, root=folder)


@pytest.fixture
def seen(ranks):
    """Return a case's result, the same on both ranks unless they are distinguished."""

    def of(case):
        assert ranks[0][case]["error"] == ranks[1][case]["error"]
        return ranks[0][case], ranks[1][case]

    return of


def said(results, kind, *texts):
    """Every rank raised one error of this kind with these texts."""
    name, message = results[0]["error"]
    assert name == kind and all(text in message for text in texts), message
    return True


@pytest.mark.parametrize("case", ["alike", "hybrid alike"])
def test_replicas_that_stay_equal_take_all_steps(seen, case):
    """The comparison is exact and has no tolerance."""
    assert all(one["error"] is None and one["taken"] == one["charged"] == 4 for one in seen(case))


@pytest.mark.parametrize(
    ("case", "taken"),
    [("learning rate changed", 2), ("weight edited", 1), ("rows swapped", 1), ("own randomness", 1), ("hybrid", 1)],
)
def test_replicas_that_drift_stop_all_processes_before_the_next_step_is_used(seen, case, taken):
    """The step that finds it is charged, moves no weight, and no further step can be taken."""
    results = seen(case)
    assert said(results, "DisagreementError", f"differ between processes before step {taken + 1} (rank 0: ", "rank 1: ")
    assert said(results, "DisagreementError", f"Step {taken + 1} is charged", "resume from a checkpoint")
    for one in results:
        assert one["taken"] == taken and one["charged"] == taken + 1 and one["unmoved"]
        assert "failed half-way" in one["again"][1]


def test_the_last_update_is_compared_before_anything_is_saved(seen):
    """No step follows it that would find the difference: the end of the run and each save do."""
    for case in ("last update", "last update of the trainer", "last update before a checkpoint"):
        results = seen(case)
        assert said(
            results, "DisagreementError", "differ between processes after the last update (rank 0: ", "rank 1: "
        )
        assert not any(one.get("ended") or one.get("reported") or one.get("saved") for one in results)
    assert [one["charged"] for one in seen("last update of the trainer")] == [2, 2]


@pytest.mark.parametrize("control", ["training_stop", "save"])
def test_a_callback_of_one_process_does_not_let_the_others_wait(seen, control):
    """They stopped answering: one of them in a collective of the Trainer, the others at the next draw."""
    results = seen("stop of one" if control == "training_stop" else "save of one")
    assert said(results, "DisagreementError", f"control.should_{control} on some processes only")
    assert [one["charged"] for one in results] == [1, 1] and not any(one["saved"] for one in results)


def test_small_parameters_that_zero_3_keeps_whole_are_replicas():
    """A partition has one owner, and while a parameter is not gathered there is nothing to compare."""
    whole, partition, absent = (torch.nn.Parameter(torch.ones(size)) for size in (4, 2, 0))
    for number, (parameter, persists) in enumerate(((whole, True), (partition, False), (absent, True))):
        parameter.ds_id, parameter.ds_persist, parameter.ds_numel = number, persists, 4
    assert [one.numel() for one in _replicated([whole, partition, absent, torch.ones(3)])] == [4, 3]
    whole.ds_tensor = torch.zeros(2)  # of this process: others hold another one beside the same values
    assert Checksum(_replicated([whole])).value() == Checksum([torch.ones(4)]).value()


def test_an_extra_draw_on_one_process_stops_all_of_them(seen):
    """A process that is ahead is found in the next comparison of calls; its extra draw is not charged."""
    results = seen("extra draw")
    assert said(results, "DisagreementError", "rank 0: takes step 2, rank 1: draws the units of step 3")
    assert said(results, "DisagreementError", "No further step is charged", "equally often")
    assert [one["charged"] for one in results] == [2, 2]
    assert results[0]["drawn"] == results[1]["drawn"] and len(results[0]["drawn"]) == 2


@pytest.mark.parametrize(
    ("case", "charged", "text"),
    [
        ("other units", 1, "the units of this step"),  # charged for its draw
        ("autocast", 1, "rank 1: cpu autocast torch.bfloat16"),
        ("learning rate", 0, "differ in the optimizer's lr (rank 0: [0.1], rank 1: [1.1])"),
        ("frozen weights", 0, "hold different parameters (rank 0: "),
        ("microbatch", 0, "differ in the bound max_rows of a microbatch (rank 0: 5, rank 1: 4)"),
        ("collator", 0, "differ in the collator"),
        ("train.learning_rate", 0, "differ in train.learning_rate (rank 0: 0.01, rank 1: 0.02)"),
        ("train.bf16", 0, "differ in train.bf16 (rank 0: False, rank 1: True)"),
        ("train.per_device_train_batch_size", 0, "differ in train.per_device_train_batch_size (rank 0: 2, rank 1: 3)"),
    ],
)
def test_what_decides_the_computation_is_compared_before_anything_is_computed(seen, case, charged, text):
    """The step's units and context; optimizer and weights when they are attached; rows when the run begins.

    Training arguments are compared before a row is read.
    """
    results = seen(case)
    assert said(results, "DisagreementError", text, *(["No further step is charged"] * charged))
    assert [one["charged"] for one in results] == [charged] * 2
    if case.startswith("train."):
        assert said(results, "DisagreementError", "with the same recipe, data and package versions")
        assert not any(one["touched"] for one in results)


def test_an_argument_refused_on_one_process_stops_all(ranks):
    """Rank 0 does not wait for a process that has left."""
    first, second = (one["train.fp16"] for one in ranks)
    assert said([second], "ConfigError", "train.fp16=True cannot be used in private training")
    assert said([first], "OtherProcessError", "rank 1: train.fp16=True cannot be used in private training")
    assert not first["touched"] and not second["touched"]


@pytest.mark.parametrize("case", ["local folder", "trainer's folder"])
def test_a_folder_that_one_machine_has_for_itself_is_refused_before_the_ledger(seen, case):
    """No ledger, no plan and no trace of the check is left."""
    results = seen(case)
    assert said(results, "ConfigError", "node 0", "rank 1 on ", "a file system that all machines share")
    assert said(results, "ConfigError", "nothing was charged")
    assert all(not one.get("left") and not one.get("charged") for one in results)


def test_a_group_of_some_processes_is_refused(seen):
    """DistributedDataParallel over a subgroup would add up some of the sums."""
    assert said(seen("subgroup"), "EngineError", "a process group of 1 of 2 processes", "process_group")


def test_meshes_that_split_a_unit_are_refused_by_their_dimensions(seen):
    """Also where accelerate joins context parallelism with the shards of data parallelism under one name."""
    (found, other) = seen("meshes")
    assert found == other and found["hybrid"] is None and found["joint of data"] is None
    for case, dimension in (("tp", "tp"), ("cp", "cp"), ("joint", "cp")):
        kind, message = found[case]
        assert kind == "EngineError" and f"with the dimension {dimension}: tensor, pipeline, context" in message


@kills(
    "replicas are not compared",
    "dpllm/engines/checksums.py",
    "if any(first_of.setdefault(triple[0], triple) != triple for triple in triples):",
    "if False:",
)
def test_only_processes_with_the_same_shard_are_compared():
    """Shards differ; replicas of one may not."""
    assert not differing([[1, 5, 5], [2, 6, 6], [1, 5, 5]])
    assert differing([[1, 5, 5], [2, 6, 6], [1, 5, 6]]) and Processes().size == 1
