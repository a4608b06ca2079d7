"""`dpllm recipes`: list, print and copy the shipped recipes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from dpllm import registry
from dpllm.cli.common import AsJson, command, show_json, wrapped
from dpllm.config import ConfigError, nearest
from dpllm.config.recipe_file import method_in
from dpllm.config.shipped import FOLDERS, shipped_recipes, shipped_root
from dpllm.config.yaml12 import read_yaml

ALL = "all"
"""In place of a name: all shipped folders."""


@command("dpllm recipes quickstart --copy mine.yaml")
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A shipped recipe to print; or all.", show_default=False)
    ] = None,
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH", help="With --copy: the new file, or a folder; here without it.", show_default=False
        ),
    ] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy it; with all also the launch files. No file is replaced.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of all keys, by which editors complete them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the shipped recipes, print one, or copy it to be changed."""
    if schema:
        from dpllm.config.schema import recipe_schema
        from dpllm.config.train_values import OWN
        from dpllm.training.arguments import train_schema

        show_json(recipe_schema({**{name: {} for name in OWN}, **train_schema()}))
        return
    known = shipped_recipes()
    if copy:
        if name is None:
            raise ConfigError("--copy needs the name of a recipe, or all: dpllm recipes NAME --copy")
        made = _copied(name, path or Path("."))
        if as_json:
            show_json({"copied": [str(one) for one in made]})
        elif name == ALL:
            typer.echo("\n".join(f"copied: {one}" for one in made))
        else:
            typer.echo(f"copied: {made[0]} (run it with: {_command(method_in(made[0]))} {made[0]})")
        return
    if path is not None:
        raise ConfigError(f"{path}: a path is for --copy: add it, or leave the path out")
    if name is not None:
        text = _named(name).read_text(encoding="utf-8")
        if as_json:
            show_json({"name": name, "text": text})
        else:
            typer.echo(text, nl=False)
        return
    listed = {one: described(file.read_text(encoding="utf-8")) for one, file in known.items()}
    if as_json:
        show_json({"recipes": listed})
        return
    width = max(map(len, listed))
    for one, about in listed.items():
        typer.echo(wrapped(f"{one:<{width}}  {about['mode']}"))
        typer.echo(wrapped(f"{about['what']}. Cost: {about['cost']}", 4))
    typer.echo("\nPrint: dpllm recipes NAME · copy: add --copy · train: dpllm train NAME")


def described(text: str) -> dict[str, str]:
    """Return what a recipe is for, its mode and its cost, from the comment at its head and its values."""
    lines = re.match(r"(#.*\n)*", text)
    header = " ".join((lines[0] if lines else "").replace("\n#", "\n").lstrip("# ").split())
    found = re.search(r"Cost: (.+?)(?:[;,.] |[.]?$)", header)
    values: dict[str, Any] = dict(read_yaml(text))
    return {
        "what": re.split(r"(?<=[^\s])\. (?=[^a-z])", header)[0].rstrip("."),
        "mode": _mode(values),
        "cost": found[1] if found else "not stated",
    }


def _command(method: str | None) -> str:
    return "dpllm train" if method is None else registry.method(method).invocation


def _mode(values: dict[str, Any]) -> str:
    model, privacy = values.get("model") or {}, values["privacy"]
    model = {"name": model} if isinstance(model, str) else model
    method = next((name for name in registry.query_sections() if name in values), None)
    how = "LoRA" if model.get("adapter") else "full"
    if model.get("quantization"):
        how = "QLoRA"
    elif model.get("config"):
        how = "from scratch"
    if method is not None:
        how = registry.method(method).invocation
    if kind := (values.get("train") or {}).get("trainer"):
        how = f"{str(kind).upper()}, {how}"
    target = privacy.get("epsilon")
    cost = f"σ = {privacy.get('noise_multiplier')}" if target is None else f"ε = {target:g}"
    return f"{how}, {cost} per {'user' if ((values.get('data') or {}).get('columns') or {}).get('unit') else 'record'}"


def _named(name: str) -> Path:
    known = shipped_recipes()
    stem = name.removesuffix(".yaml").removeprefix("recipes/")
    if stem not in known:
        raise ConfigError(
            f"{name} is no shipped recipe{nearest(stem, known) or '.'} Known are: {', '.join(known)}, {ALL}"
        )
    return known[stem]


def _copied(name: str, path: Path) -> list[Path]:
    """Copy a recipe to a file or into a folder, or all shipped folders into a folder; return the copies."""
    if name == ALL:
        targets = [path / folder for folder in FOLDERS]
        _refuse_existing(targets)
        for target in targets:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(shipped_root() / target.name, target, ignore=ignored)
        return targets
    source = _named(name)
    target = path / source.name if path.is_dir() else path
    _refuse_existing([target])
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return [target]


def _refuse_existing(targets: list[Path]) -> None:
    for target in targets:
        if target.exists():
            raise ConfigError(f"{target} exists already and is not replaced: name another file or folder")
