"""The shipped files are found by name, and files of one's own come first."""

from pathlib import Path

import pytest

from dpllm.config import ConfigError, load_recipe
from dpllm.config.shipped import config_file, recipe_file, shipped_configs, shipped_recipes, shipped_root

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("given", ["quickstart", "quickstart.yaml", "recipes/quickstart.yaml"])
def test_a_recipe_has_a_name_wherever_one_is(given, tmp_path, monkeypatch):
    """As a user of the wheel has it, who is in another folder."""
    monkeypatch.chdir(tmp_path)
    assert recipe_file(given) == shipped_root() / "recipes" / "quickstart.yaml"
    assert load_recipe(given) == load_recipe(ROOT / "recipes" / "quickstart.yaml")


@pytest.mark.parametrize("given", ["fsdp2", "fsdp2.yaml", "accelerate_configs/fsdp2.yaml"])
def test_an_accelerate_config_has_a_name(given, tmp_path, monkeypatch):
    """Likewise."""
    monkeypatch.chdir(tmp_path)
    assert config_file(given) == ROOT / "accelerate_configs" / "fsdp2.yaml"


def test_a_file_of_ones_own_comes_first(tmp_path, monkeypatch):
    """Also under a shipped name; a folder is no recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart.yaml").write_text("{}", encoding="utf-8")
    assert recipe_file("quickstart.yaml") == Path("quickstart.yaml")
    assert recipe_file("quickstart") == shipped_recipes()["quickstart"]
    for given in ("elsewhere/quickstart.yaml", "none", str(tmp_path / "none")):
        assert recipe_file(given) == Path(given)


def test_a_misspelt_name_is_one_error_with_the_nearest(tmp_path, monkeypatch):
    """The path as it was given."""
    monkeypatch.chdir(tmp_path)
    close = r"^quickstar: there is no such file, .*; did you mean quickstart or quickstart_users\? dpllm recipes lists"
    with pytest.raises(ConfigError, match=close):
        load_recipe("quickstar")
    with pytest.raises(ConfigError, match="t5_e2e_full"):
        load_recipe("e2e")


def test_all_of_them_are_listed():
    """Under the names of their files."""
    assert set(shipped_recipes()) == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert {"single", "ddp", "fsdp2", "zero3"} <= set(shipped_configs())


def test_an_installation_without_them_says_so(tmp_path, monkeypatch):
    """Not an empty list."""
    monkeypatch.setattr("dpllm.config.shipped._PACKAGE", tmp_path / "dpllm")
    with pytest.raises(ConfigError, match="install"):
        shipped_recipes()
