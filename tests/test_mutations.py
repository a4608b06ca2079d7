"""The mutations of the tests are of the code as it is, and a test that notices nothing is named."""

from dataclasses import replace

import pytest

from tests.mutations import collect, survives

CHEAP = ("the clip is deleted", "noise that is written is zero", "the sampler ignores the sampling rate")


def test_every_mutation_changes_its_file():
    """Into code that can still be compiled; each fault is named once."""
    mutations = collect()
    edited = {mutation.what: mutation.changed() for mutation in mutations}
    assert [what for what, text in edited.items() if text is None] == []
    assert len(edited) == len(mutations)
    for mutation in mutations:
        compile(edited[mutation.what], mutation.file, "exec")


@pytest.mark.parametrize("what", CHEAP)
def test_a_mutation_turns_its_test_red(what):
    """`python -m tests.mutations` tries all of them."""
    (mutation,) = (mutation for mutation in collect() if mutation.what == what)
    assert survives(mutation) is None


def test_a_test_that_notices_nothing_is_named():
    """So is an edit that changes nothing, and a copy that cannot be imported, on which no test fails."""
    (mutation,) = (mutation for mutation in collect() if mutation.what == CHEAP[0])
    assert "no longer contains" in survives(replace(mutation, before="no such text"))
    assert survives(replace(mutation, after=mutation.before + "  # the same")).startswith("exit code 0")
    assert survives(replace(mutation, after="return (")).startswith("exit code")
