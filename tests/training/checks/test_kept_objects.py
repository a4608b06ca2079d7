"""Numbers that a loss, a collator or a data set keeps in objects of the standard library are found."""

import argparse
import array
import collections
import queue
import threading
import types
from collections.abc import MutableMapping, MutableSequence

import pytest

from dpllm.training.checks.kept import Kept


def counter_in(space):
    """A number within an object of the standard library, which a loss writes."""
    if isinstance(space, MutableMapping):
        space["calls"] = space.get("calls", 0) + 1
    elif isinstance(space, queue.Queue):
        space.put(1)
    elif isinstance(space, MutableSequence | array.array):
        space.append(1)
    else:
        space.calls = getattr(space, "calls", 0) + 1


@pytest.mark.parametrize(
    "make",
    [
        *(types.SimpleNamespace, argparse.Namespace, threading.local, collections.UserDict, collections.UserList),
        *(queue.Queue, bytearray, lambda: array.array("d")),
    ],
)
def test_state_in_objects_of_the_standard_library_is_found(make):
    """Ordinary code keeps numbers and settings there."""
    space = make()

    def loss():
        counter_in(space)

    loss()
    before = Kept(loss)
    loss()
    now = Kept(loss)
    assert [path for path in now.changed(before) if path.startswith(".space")]
    with now.at(before):
        assert not Kept(loss).changed(before)
    assert not Kept(loss).changed(now)
