"""One process is a group of size one; several are in `tests.distributed.test_agreement`."""

import numpy as np
import pytest

from dpllm.engines.board import told
from dpllm.engines.processes import OtherProcessError, Processes


def test_collectives_of_one_process_return_what_they_are_given():
    """Sums are floats, and nothing waits."""
    alone = Processes()
    assert (alone.rank, alone.size, alone.is_main) == (0, 1, True)
    assert alone.sum([1, 2.5, 0]) == [1.0, 2.5, 0.0] and all(isinstance(value, float) for value in alone.sum([1]))
    assert alone.any(True) and not alone.any(False)
    assert alone.gather({"rank": 0}) == [{"rank": 0}] and alone.gather_numbers([1, 2.5]) == [[1.0, 2.5]]
    assert alone.together(lambda: "made") == "made" and alone.int64s_from_main(np.arange(3), 3).tolist() == [0, 1, 2]
    alone.agree({"the plan": "a", "the number of rows": 3})
    alone.wait()


def test_a_function_of_the_main_process_runs_once_and_its_error_is_raised_as_it_is():
    """With one process there is no other to inform."""
    calls = []
    assert Processes().from_main(lambda: calls.append(1) or "made") == "made" and calls == [1]

    def fail():
        raise OSError(28, "No space left on device", "ledger")

    with pytest.raises(OSError, match="space left"):
        Processes().from_main(fail)


def test_the_words_of_another_processs_error_are_one_line():
    """Of an error of the user's own code, whose message may be long, in many lines, or fail itself."""

    class Silent(Exception):
        def __str__(self):
            raise ValueError("no words")

    class Two(Processes):
        def __init__(self, other):
            super().__init__()
            self.size, self._other = 2, other

        def gather_numbers(self, values):
            return [list(values), [1.0 if self._other else 0.0]]

        def gather(self, value):
            return [value, (self._other, 1) if self._other else None]

    with Two("").all_or_none("step 3"):
        pass
    with pytest.raises(OtherProcessError, match="rank 1: Broken") as caught, Two("Broken: x").all_or_none("step 3"):
        pass
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    for error in (Silent(), KeyError("own")):
        with pytest.raises(type(error)), Two("").all_or_none("step 3"):
            raise error
    assert told(Silent()) == ("Silent: its message is unreadable", 1) and told(ValueError("a\nb")) == ("a b", 2)
    words, code = told(KeyError("a" * 5000 + "cause"))
    assert len(words) < 2100 and words.endswith("cause'") and code == 1
