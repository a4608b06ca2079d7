import pytest

from dpllm.config.recipe_file import load_query_recipe
from dpllm.methods.pate.prepare import prepare
from tests.methods.pate.school import write_recipe, write_token_recipe


@pytest.fixture
def school(tmp_path):
    """A function that writes a recipe, with changes, and prepares its run."""

    def prepared(**changes):
        return prepare(load_query_recipe(write_recipe(tmp_path, **changes), (), "pate"))

    return prepared


@pytest.fixture
def writing_school(tmp_path):
    """The same of a run in which teachers continue texts."""

    def prepared(**changes):
        return prepare(load_query_recipe(write_token_recipe(tmp_path, **changes), (), "pate"))

    return prepared
