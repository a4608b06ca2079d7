import pytest

from dpllm.config.query_recipe import load_query_recipe
from dpllm.teaching.prepare import prepare
from tests.teaching.school import write_recipe


@pytest.fixture
def school(tmp_path):
    """A function that writes a recipe, with changes, and prepares its run."""

    def prepared(**changes):
        return prepare(load_query_recipe(write_recipe(tmp_path, **changes), (), "teach"))

    return prepared
