"""Token ids of prompts: a private record as context, and a public prompt that the text continues.

Place in the flow: between the records and the model. The context of a record is made by a template; a long one is cut
to a public number of tokens. The prompt is the same for every record of a group and for the public model, so what a
record adds lies before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from dpllm.config import ConfigError, nearest
from dpllm.data.values import own_value

_FIELD = re.compile(r"\{(\w+)\}")


class Template:
    """A text with the names of columns in braces, such as "Review: {text}".

    Args:
        text: of the template.
        columns: of the records.
        name: of the template, for messages.

    Raises:
        ConfigError: it names no column, or one that the records lack.

    >>> Template("Review: {text}", ["text", "label"]).of({"text": "Good.", "label": 1})
    'Review: Good.'
    """

    def __init__(self, text: str, columns: Sequence[str], name: str = "predict.context") -> None:
        """Check the names."""
        self.text = text
        self.columns = list(dict.fromkeys(_FIELD.findall(text)))
        if not self.columns:
            raise ConfigError(
                f"{name}={text!r} names no column, so no text would depend on a record: write a column's "
                f"name in braces, one of {', '.join(columns)}"
            )
        if unknown := [name for name in self.columns if name not in columns]:
            raise ConfigError(
                f"{name} names the column {unknown[0]!r}, which the records lack"
                f"{nearest(unknown[0], columns)}: they have {', '.join(columns)}"
            )

    def of(self, record: Mapping[str, Any]) -> str:
        """Return the text for a record; a missing value becomes an empty text.

        Guarantee: other records change nothing in it. A number that is whole has no fraction (30 for 30.0), and keys
        without a value are left out of an object (`dpllm.data.values.own_value`).
        """
        values = {name: own_value(record[name]) for name in self.columns}
        return _FIELD.sub(lambda found: "" if values[found[1]] is None else str(values[found[1]]), self.text)


class PromptEncoder:
    """Turns contexts and prompts into rows of one public length.

    Args:
        tokenizer: of the model.
        max_context: the most tokens of a context; a longer one loses its end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_context: int) -> None:
        """Find the tokens that begin a text."""
        self._tokenizer, self._max = tokenizer, max_context
        bos = tokenizer.bos_token_id
        self._start = [] if bos is None else [int(bos)]

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a public prompt."""
        return self._ids(text)

    def length(self, prompt: Sequence[int]) -> int:
        """Return the public number of tokens of every row with this prompt."""
        return len(self._start) + self._max + len(prompt)

    def row(self, context: str, prompt: Sequence[int]) -> list[int]:
        """Return the tokens of a row: the start, the context, the prompt.

        Raises:
            ConfigError: there is no token at all.
        """
        row = [*self._start, *self._ids(context)[: self._max], *prompt]
        if row:
            return row
        end = self._tokenizer.eos_token_id
        if end is None:
            raise ConfigError(
                "the tokenizer has no token that begins or ends a text, so nothing can follow an empty prompt: give "
                "predict.prompts"
            )
        return [int(end)]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []
