"""The examples in the docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import dpllm

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(dpllm.__path__, "dpllm.") if "__main__" not in module.name
)


@pytest.mark.parametrize("name", MODULES)
def test_every_example_gives_what_it_says(name):
    """Each example runs as it stands."""
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_there_are_examples():
    """The walk finds the package, and examples all over it."""
    assert len(MODULES) > 50
    finder = doctest.DocTestFinder()
    counts = [sum(bool(test.examples) for test in finder.find(importlib.import_module(name))) for name in MODULES]
    assert sum(counts) >= 50
    assert sum(count > 0 for count in counts) >= 20
