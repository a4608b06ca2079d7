"""All keys of a recipe, from the sections themselves: a JSON schema for editors, and the table of `recipes/README.md`.

Place in the flow: beside the recipe; nothing in a run reads it.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import PydanticUndefined

from dpllm import registry
from dpllm.config.formats.catalogue import COLUMNS
from dpllm.config.query_recipe import SECTIONS
from dpllm.config.recipe import NESTED, Recipe
from dpllm.config.recipe_file import UNIT
from dpllm.config.sections import OneOf

_NULL = {"type": "null"}
_OBJECT = {"type": "object"}
_UNIT_WORDS = "the column whose value identifies the protected unit: all records with one value; without it each record"
_SHAPES: Mapping[tuple[str, str], dict[str, Any]] = {
    ("ModelConfig", "config"): {**_OBJECT, "required": ["model_type"]},
    ("ModelConfig", "adapter"): _OBJECT,
    ("DataConfig", "columns"): {
        **_OBJECT,
        "properties": {
            **{key: {"type": ["string", "null"], "description": about.words} for key, about in COLUMNS.items()},
            UNIT: {"type": ["string", "null"], "description": _UNIT_WORDS},
        },
        "additionalProperties": False,
    },
    ("DataConfig", "eval"): {
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            {"type": "string"},
            {"$ref": "#/$defs/HeldOut"},
        ]
    },
    ("Microbatch", "tokens"): {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]},
    ("PateConfig", "train"): _OBJECT,
    ("PublicPretrainConfig", "train"): _OBJECT,
}
"""What files may have where a validator takes several kinds."""


def recipe_schema(train: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON schema of a recipe file: of a training run, or of a query run.

    Args:
        train: schemas of the names of ``train``, such as those of `dpllm.training.arguments.train_schema`. None: any
            names.
    """
    beside, queries = registry.sections_beside_train(), registry.query_sections()
    definitions: dict[str, Any] = {}
    whole = TypeAdapter(Recipe).json_schema()
    definitions |= whole.pop("$defs")
    for kind in (*beside.values(), *queries.values(), *SECTIONS.values()):
        made = TypeAdapter(kind).json_schema()
        definitions |= made.pop("$defs", {})
        definitions[kind.__name__] = made
    kinds = {kind.__name__: kind for kind in (*NESTED[Recipe].values(), *queries.values(), *SECTIONS.values())}
    for name, one in definitions.items():
        own = one["properties"]
        if "sampling" in own or name == "QueryPrivacy":
            del own[UNIT]  # it is data.columns.unit
        for key in own:
            shape = _SHAPES.get(("DataConfig" if name == "QueryData" else name, key))
            said = description_of(kinds[name], key) if name in kinds else own[key].get("description")
            words = {"description": said} if said else {}
            own[key] |= words
            own[key] = _nullable({**shape, **words} if shape else own[key], key in one.get("required", ()))
    names = {"type": "object"} if train is None else {"type": "object", "properties": dict(train)}
    own = {key: value for key, value in whole["properties"].items() if key != "beside"}
    own |= {"train": names, **{key: _reference(kind) for key, kind in beside.items()}}
    of_query = {key: _reference(kind) for key, kind in {**SECTIONS, **queries}.items()}
    for properties in (own, of_query):
        properties["model"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/ModelConfig"}]}
    for properties, required in ((own, ("model", "data", "privacy")), (of_query, ("data", "privacy"))):
        properties |= {key: _nullable(value, key in required) for key, value in properties.items()}
    of_query["output_dir"] = {"type": "string", "minLength": 1}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Recipe of dpllm",
        "anyOf": [
            {**_OBJECT, "properties": own, "required": ["model", "data", "privacy"], "additionalProperties": False},
            {
                **_OBJECT,
                "properties": of_query,
                "required": ["data", "privacy", "output_dir"],
                "additionalProperties": False,
            },
        ],
        "$defs": definitions,
    }


def _reference(kind: type) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _nullable(schema: dict[str, Any], required: bool) -> dict[str, Any]:
    """Return a schema that an empty value fits too, which stands for the default."""
    return schema if required else {"anyOf": [schema, _NULL]}


def key_tables() -> str:
    """Return Markdown tables of all keys of a training run's recipe: the basic ones, and the advanced ones."""
    rows = list(_rows())
    head = "| section | key | default | meaning |\n|---|---|---|---|\n"
    basic, advanced = ("".join(row for row, is_basic in rows if is_basic is wanted) for wanted in (True, False))
    return f"{head}{basic}\nAdvanced keys, which most recipes leave out:\n\n{head}{advanced}"


def _rows() -> Iterator[tuple[str, bool]]:
    sections: dict[str, Any] = {**NESTED[Recipe], **registry.sections_beside_train(), "(top level)": Recipe}
    for section, kind in sections.items():
        for key, field in kind.__pydantic_fields__.items():
            if (section, key) in (("privacy", UNIT), ("(top level)", "beside")):
                continue
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            words = description_of(kind, key) + _choices(field)
            yield _row(section, key, _default(field), words), bool(extra.get("basic"))
            if (section, key) == ("data", "columns"):
                yield _row(section, f"columns.{UNIT}", "`null`", _UNIT_WORDS), True
                for name, about in COLUMNS.items():
                    yield _row(section, f"columns.{name}", f"`{name}`", about.words), False


def description_of(kind: Any, key: str) -> str:
    """Return the description of a key, which may be that of the class from which it is inherited."""
    fields = [one.__pydantic_fields__[key] for one in kind.__mro__ if key in getattr(one, "__pydantic_fields__", {})]
    return " ".join(next((field.description for field in fields if field.description), "").split())


def _choices(field: Any) -> str:
    """Return the texts that a key may have, where its description does not name them all."""
    kinds = [*field.metadata, *(one for part in typing.get_args(field.annotation) for one in typing.get_args(part))]
    found = next((one.choices for one in kinds if isinstance(one, OneOf)), ())
    if all(choice in (field.description or "") for choice in found):
        return ""
    return f" One of {', '.join(f'`{choice}`' for choice in found)}."


def _row(section: str, key: str, default: str, words: str) -> str:
    return f"| {section} | `{key}` | {default} | {' '.join(words.split()).replace('|', chr(92) + '|')} |\n"


def _default(field: Any) -> str:
    if field.default is PydanticUndefined and field.default_factory is None:
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, str):
        return f"`{value}`"
    return f"`{json.dumps(value)}`" if value is None or isinstance(value, bool | int | float | list | dict) else "`{}`"
