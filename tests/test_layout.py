"""No class has more fields than a reader can keep in mind; records with more keys have parts."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import dpllm
from dpllm.config import DataConfig, PrivacyConfig
from dpllm.privacy.plan import PrivacyPlan
from dpllm.report.models import Accounting, Parameters, Part, Plan

MOST_FIELDS = 12
PACKAGE = Path(dpllm.__file__).parent


def own_fields(kind: ast.ClassDef) -> set[str]:
    """Return the fields that a class declares, and the attributes that its methods set; not those of its bases."""
    declared = {
        line.target.id
        for line in kind.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and not ast.unparse(line.annotation).startswith("ClassVar")
    }
    methods = (line for line in kind.body if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef))
    set_by_methods = {
        node.attr
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return declared | set_by_methods


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield every class of the package, with its place."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}", node


def test_no_class_has_more_than_twelve_fields_of_its_own():
    """A record with more keys, such as a section of a recipe, inherits them from parts of one topic each."""
    sizes = {place: len(own_fields(kind)) for place, kind in classes()}
    assert len(sizes) > 300
    assert {place: size for place, size in sizes.items() if size > MOST_FIELDS} == {}


def test_declared_fields_and_attributes_count():
    """Constants of the class and local variables do not."""
    kind = ast.parse(
        "class A(B):\n"
        "    one: int\n"
        "    two: ClassVar[int] = 2\n"
        "    three = 3\n"
        "    def method(self, other):\n"
        "        four = other.five = self.six = 1\n"
        "        self.seven: int = self.eight + 1\n"
    ).body[0]
    assert own_fields(kind) == {"one", "six", "seven"}


@pytest.mark.parametrize("record", [PrivacyConfig, DataConfig, PrivacyPlan, Plan, Parameters, Accounting])
def test_each_key_belongs_to_one_part(record):
    """If two parts declared the same key, one declaration would silently replace the other."""
    parts = [kind for kind in record.__mro__ if issubclass(kind, Part) or dataclasses.is_dataclass(kind)]
    declared = [name for kind in parts for name in vars(kind).get("__annotations__", {}) if name != "model_config"]
    keys = record.model_fields if issubclass(record, Part) else {item.name for item in dataclasses.fields(record)}
    assert sorted(declared) == sorted(keys) and len(keys) > MOST_FIELDS
