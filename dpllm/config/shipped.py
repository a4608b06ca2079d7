"""Find the files that are installed with dpllm: recipes, accelerate configs and launch scripts.

A checkout and an editable installation have these folders at the top. A wheel has them in the package (`setup.py`).
"""

from __future__ import annotations

from pathlib import Path

from dpllm.config.values import ConfigError

RECIPES, ACCELERATE_CONFIGS, LAUNCH = FOLDERS = ("recipes", "accelerate_configs", "launch")
_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_root() -> Path:
    """Return the folder that contains the shipped folders.

    Raises:
        ConfigError: they are not there.
    """
    for root in (_PACKAGE / "shipped", _PACKAGE.parent):
        if (root / ACCELERATE_CONFIGS / "single.yaml").is_file():
            return root
    raise ConfigError(
        f"the recipes and accelerate configs of dpllm are not next to {_PACKAGE}: install dpllm again (pip install "
        "--force-reinstall dpllm)"
    )


def shipped_recipes() -> dict[str, Path]:
    """Return the shipped recipes by name."""
    return {path.stem: path for path in sorted((shipped_root() / RECIPES).glob("*.yaml"))}


def shipped_configs() -> dict[str, Path]:
    """Return the shipped accelerate configs by name."""
    return {path.stem: path for path in sorted((shipped_root() / ACCELERATE_CONFIGS).glob("*.yaml"))}


def recipe_file(given: str | Path) -> Path:
    """Return the file of a recipe: a file, or the shipped recipe "quickstart" or "recipes/quickstart.yaml"."""
    return _file(given, RECIPES)


def config_file(given: str | Path) -> Path:
    """Return the file of an accelerate config: a file, or a shipped one, as `recipe_file`."""
    return _file(given, ACCELERATE_CONFIGS)


def _file(given: str | Path, folder: str) -> Path:
    """Return a file, or the shipped one of this name; the path itself if there is neither."""
    path = Path(given).expanduser()
    if path.is_absolute() or path.is_file():
        return path
    short = path.parent in (Path("."), Path(folder))
    found = shipped_root() / folder / (path.name if path.suffix else f"{path.name}.yaml")
    return found if short and found.is_file() else path
