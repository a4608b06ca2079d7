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
