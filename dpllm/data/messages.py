"""Read conversations in common storage formats as the messages that a chat template accepts.

The formats are OpenAI's (``role`` and ``content``, tool calls, text parts), ShareGPT's (``from`` and ``value``) and
LLaMA-Factory's (``function_call``, ``observation``, and columns `BESIDE` the conversation). Lists and objects may also
be JSON texts. Each conversation is read independently, in a form that depends on no other record
(`dpllm.data.values.own_value`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpllm.config.formats.catalogue import BESIDE, OPTIONS, SYSTEM
from dpllm.data.readers import DataError
from dpllm.data.values import own_value

CONVERSATIONS = "conversations"

_CALLS = "function_call"
ROLES: Mapping[str, str] = {
    **{name: name for name in (SYSTEM, "developer", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model", _CALLS), "assistant"),
    **dict.fromkeys(("function", "observation", "ipython"), "tool"),
}
"""Roles in data to roles of chat templates."""
_ALWAYS = {name for name, role in ROLES.items() if role in (SYSTEM, "user", "assistant")}
_KEYS = {"role": "from", "content": "value"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_ORDER = ("type", "function", "name", "description", "parameters", "properties", "required")
_REMEDY = "fill it in, or remove the record before this run"


def read_messages(value: Any, where: str, named: Callable[[str], bool] | None = None) -> list[dict[str, Any]]:
    """Return the messages of a conversation, each with the texts ``role`` and ``content``.

    A tool call without content has an empty one; arguments of tools that are JSON text are objects; parts of text are
    joined by line breaks.

    Args:
        value: a list of messages in one of the forms of this module, or its JSON text.
        where: the record, for messages, such as "record 3".
        named: whether the chat template mentions a role, which is then left unchanged. None: unknown roles are
            accepted.

    Raises:
        DataError: it is in none of these forms; the error gives the message's number, and none of its texts.
    """
    chat = _decoded(value)
    if not isinstance(chat, list):
        raise DataError(f"{where}: a chat is a list of {{role, content}}, and this is {_kind(chat)}: {_REMEDY}")
    if not chat:
        raise DataError(f"{where}: the chat has no message: {_REMEDY}")
    return [_message(one, f"{where}: message {position}", named) for position, one in enumerate(chat)]


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of objects."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def read_beside(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what a record has `BESIDE` its conversation, by column name; empty values are omitted.

    A tool is in OpenAI's form: ``{"type": "function", "function": {...}}``, with its keys in the usual order.

    Raises:
        DataError: a value is of another kind.
    """
    found: dict[str, Any] = {}
    for name in BESIDE:
        given = own_value(record.get(name))
        value = given if name == SYSTEM else _decoded(given)
        if not value:
            continue
        wanted = str if name == SYSTEM else Mapping if name == OPTIONS else list
        if name == "tools" and isinstance(value, Mapping):
            value = [value]
        if not isinstance(value, wanted):
            shown = {str: "a text", Mapping: "an object", list: "a list"}[wanted]
            form = "" if wanted is str else ", or the JSON text of one"
            raise DataError(f"{where}: '{name}' must be {shown}{form}. Correct it, or rename the column")
        if name == "tools":  # the keys of a JSON text are in the order that its writer wanted
            value = [_tool(_decoded(one), where) for one in value]
            value = value if isinstance(given, str) else _ordered(value)
        found[name] = value
    return found


def with_system(messages: list[dict[str, Any]], prompt: str | None, where: str) -> list[dict[str, Any]]:
    """Return the messages with the system prompt from a separate column at their beginning.

    Raises:
        DataError: they begin with a different system prompt.
    """
    if not prompt:
        return messages
    own = [message["content"] for message in messages if message["role"] in (SYSTEM, "developer")]
    if not own:
        return [{"role": SYSTEM, "content": prompt}, *messages]
    if own[0].strip() != prompt.strip():
        raise DataError(
            f"{where} has one system prompt in its messages and a different one in the column '{SYSTEM}'. Keep only one"
        )
    return messages


def _message(raw: Any, where: str, named: Callable[[str], bool] | None) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise DataError(f"{where} has no text in 'role'; a chat is a list of {{role, content}}: {_REMEDY}")
    message = dict(own_value(raw))
    for key, other in _KEYS.items():
        if key not in message and other in message:
            message[key] = message.pop(other)
    given, content = message.pop("role", None), message.pop("content", None)
    if not isinstance(given, str):
        raise DataError(f"{where} has no text in 'role'; a chat is a list of {{role, content}}: {_REMEDY}")
    calls = _decoded(message.pop("tool_calls", None)) or []
    if isinstance(legacy := _decoded(message.get(_CALLS)), Mapping):
        calls = [*calls, legacy]
        del message[_CALLS]
    if given.strip().lower() == _CALLS:
        calls, content = _calls_in(content)
    calls = [_call(one, where) for one in ([calls] if isinstance(calls, Mapping) else calls)]
    role = _role(given, where, named)
    text = "" if content is None and calls else _text(content, role, where)
    return {"role": role, "content": text, **message, **({"tool_calls": calls} if calls else {})}


def _role(given: str, where: str, named: Callable[[str], bool] | None) -> str:
    plain = given.strip().lower()
    role = ROLES.get(plain)
    if plain not in _ALWAYS and named is not None and named(given):
        return given
    if role == "developer" and named is not None:
        return SYSTEM  # OpenAI's later name of the same turn
    if role is None and named is not None:
        raise DataError(
            f"{where} has a role that neither the chat template nor dpllm supports. Use one of {', '.join(ROLES)}, or "
            "remove the message before this run"
        )
    return role or given


def _text(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "\n".join(_part(part, where) for part in content)
    if role == "tool" and isinstance(content, Mapping | int | float):
        return json.dumps(content, ensure_ascii=False)
    raise DataError(f"{where} has no text in 'content'; a chat is a list of {{role, content}}: {_REMEDY}")


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise DataError(
        f"{where} has a part that is not text, such as an image or a sound, but only texts are trained on. Remove the "
        "part or the record before this run"
    )


def _calls_in(content: Any) -> tuple[list[Any], Any]:
    """Return the tool calls in the value of a turn ``function_call``, and its text: one of the two is empty."""
    found = _decoded(content)
    found = [found] if isinstance(found, Mapping) else found
    if isinstance(found, list) and found and all(isinstance(one, Mapping) and "name" in one for one in found):
        return found, None
    return [], content


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call in OpenAI's form, with an object of arguments, as chat templates take it."""
    call = _decoded(call)
    if not isinstance(call, Mapping):
        raise DataError(f"{where} has a tool call that is not an object. Write {{name, arguments}}, or remove it")
    function = _decoded(call.get("function", {k: v for k, v in call.items() if k not in ("id", "type")}))
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} has a tool call without a name. Write {{name, arguments}}, or remove the record")
    arguments = function.get("arguments", {})
    decoded = _decoded(arguments)
    if isinstance(arguments, str) and (isinstance(decoded, Mapping) or not arguments.strip()):
        arguments = decoded or {}
    others = {k: v for k, v in call.items() if k == "id" or ("function" in call and k not in ("type", "function"))}
    rest = {key: function[key] for key in function if key not in ("name", "arguments")}
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments, **rest}, **others}


def _tool(tool: Any, where: str) -> Any:
    if not isinstance(tool, Mapping):
        raise DataError(f"{where}: a tool must be an object with name, description and parameters. Correct 'tools'")
    if "name" in tool and "function" not in tool:
        return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    return tool


def _ordered(value: Any) -> Any:
    """Return tools from a table with their keys in the usual order, since a table sorts them alphabetically."""
    if isinstance(value, list):
        return [_ordered(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    first = [key for key in _ORDER if key in value]
    return {key: _ordered(value[key]) for key in [*first, *(key for key in value if key not in _ORDER)]}


def _decoded(value: Any) -> Any:
    """Return the list or object that a JSON text represents; any other value is returned unchanged."""
    if isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _kind(value: Any) -> str:
    return "a text" if isinstance(value, str) else "an object" if isinstance(value, Mapping) else "no list"


def refuse_weights(messages: Sequence[Mapping[str, Any]], where: str) -> None:
    """Refuse OpenAI's ``weight`` of a turn if the loss ignores it.

    Raises:
        DataError: a turn has weight 0.
    """
    if any(message.get("weight") == 0 for message in messages):
        raise DataError(
            f"{where}: a message has weight 0, which this trainer does not support. Use a recipe with "
            "data.format='chat' and without train.trainer, or remove 'weight'"
        )
