"""A strict YAML reader: one meaning for every number, no repeated keys, and limits on size, depth and aliases.

Numbers are plain decimals. YAML 1.1 and 1.2 disagree on ``020`` (16 or 20), ``1:30`` (90 or a text) and ``1_6`` (16 or
a text), so these are refused: a value that affects privacy must not depend on the version of the reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from dpllm.config.values import ConfigError, shown

MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 32
MAX_NODES = 100_000
"""The most values a file may have; values repeated by aliases count each time."""

_FLOAT = r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
_RESOLVERS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", rf"{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+0123456789."),
    ("merge", r"<<", "<"),
)
_AMBIGUOUS = (
    r"[-+]?0[0-9_]+|[-+]?0[box][0-9a-fA-F_]+"  # octal, binary, hexadecimal
    r"|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?"  # base 60
    r"|[-+]?(?=[0-9.]*_)(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9_]+)(?:[eE][-+]?[0-9]+)?"  # underscores
)
_AMBIGUOUS_TAG = "!ambiguous"
_MOST_DIGITS = 30


def read_yaml(text: str) -> Any:
    """Return the value that a YAML text describes.

    Raises:
        ConfigError: the text is not YAML, has a number that readers disagree on, repeats a key, is too large or too
            deeply nested, or repeats too many values by aliases. The message gives the line and does not name the file.

    >>> read_yaml("{a: 1e-3, b: no, c: 20}")
    {'a': 0.001, 'b': 'no', 'c': 20}
    """
    return read_yaml_lines(text)[0]


def read_yaml_lines(text: str) -> tuple[Any, dict[tuple[Any, ...], int]]:
    r"""Return the value that a YAML text describes, and the line of each key by its path.

    Raises:
        ConfigError: as for `read_yaml`.

    >>> read_yaml_lines("a:\n  b: 3")
    ({'a': {'b': 3}}, {('a',): 1, ('a', 'b'): 2})
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"has {len(text):,} characters, but a recipe has at most {MAX_CHARACTERS:,}")
    try:
        _check_depth(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}
            if _count_nodes(node) > MAX_NODES:
                raise ConfigError(
                    f"repeats values by aliases (&, *) until there are more than {MAX_NODES:,}: write the values out, "
                    "or remove the aliases"
                )
            return loader.construct_document(node), dict(_lines(node))
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"is not valid YAML{where}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"is not valid YAML: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:  # an explicit !!tag
        raise ConfigError(f"is not valid YAML: {' '.join(str(error).split())[:200]}") from error


def write_yaml(value: Any) -> str:
    """Return the YAML text of plain values; `read_yaml` returns an equal value from it."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _check_depth(text: str) -> None:
    """Raise if lists and mappings are nested more deeply than in any recipe; the parser itself does not recurse."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise ConfigError(
                    f"nests lists and mappings more than {MAX_DEPTH} deep in line {event.start_mark.line + 1}: write "
                    "sections with values, as in the recipes that come with dpllm"
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _lines(node: yaml.Node, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the path of each key of a mapping and of those inside, and its line."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield (*path, key.value), key.start_mark.line + 1
        yield from _lines(value, (*path, key.value))


def _count_nodes(root: yaml.Node) -> int:
    """Return the number of values when every alias is written out."""
    counts: dict[int, int] = {}

    def count(node: yaml.Node) -> int:
        found = counts.get(id(node))
        if found is None:
            counts[id(node)] = MAX_NODES + 1  # an alias to a value that contains it
            inside: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                inside = [child for pair in node.value for child in pair]
            elif isinstance(node, yaml.SequenceNode):
                inside = list(node.value)
            found = counts[id(node)] = 1 + sum(map(count, inside))
        return found

    return count(root)


class _Loader(yaml.SafeLoader):
    """Loader of YAML 1.2 scalars; a repeated key is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise _mistake(f"key {shown(key)} is neither a text nor a whole number: put it in quotes", key_node)
            if key in seen:
                raise _mistake(f"key '{key}' is repeated: keep one of them", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: Any) -> int:
        """Read a plain decimal."""
        text = self.construct_scalar(node)
        if not re.fullmatch(r"[-+]?[0-9]+", text) or len(text) > _MOST_DIGITS:
            raise _mistake(f"{shown(text)} is not a whole number of at most {_MOST_DIGITS} digits", node)
        return int(text)

    def construct_yaml_float(self, node: Any) -> float:
        """Read a plain decimal, or .inf, .nan."""
        text = self.construct_scalar(node).lower()
        try:
            return float(text.replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            raise _mistake(f"{shown(text)} is not a number", node) from None

    def refuse_ambiguous(self, node: Any) -> Any:
        """Refuse a number that YAML 1.1 and 1.2 read differently."""
        raise _mistake(
            f"{node.value} is read differently by different readers of YAML (octal, base 60, underscores): write a "
            f"plain decimal number, or '{node.value}' in quotes for a text",
            node,
        )


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes a text which the loader would read as a number, or refuse."""


def _mistake(words: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, words, node.start_mark)


# Resolvers are stored in a dictionary on the class; a separate dictionary leaves PyYAML's own classes unchanged.
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT})$"), list("-+0123456789."))
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_AMBIGUOUS_TAG, re.compile(f"^(?:{_AMBIGUOUS})$"), list("-+0123456789."))
_Loader.add_constructor(_AMBIGUOUS_TAG, _Loader.refuse_ambiguous)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
