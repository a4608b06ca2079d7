"""The public model of a PATE run in memory, and rows of records and texts for it.

Place in the flow: made before the first teacher is trained; teachers and student start from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import numpy as np

from dpllm.config import ConfigError
from dpllm.data.rows import RowCollator, tokenize_records
from dpllm.data.units import Int64Array
from dpllm.ghost.model_calls import tokens_by_themselves
from dpllm.methods.pate.prepare import Prepared
from dpllm.methods.pate.trainings import OneBase
from dpllm.methods.pate.votes import NO_LABEL
from dpllm.models.generation import TextGenerator
from dpllm.models.load import load_base_model, load_tokenizer, prepare_model
from dpllm.models.starting_point import check_start


class Classroom:
    """The public model in memory, with its tokenizer, and rows of texts for it.

    Args:
        prepared: of the run.
    """

    def __init__(self, prepared: Prepared) -> None:
        """Load the model with the recipe's adapters, and its tokenizer, which may be trained on the public texts.

        Raises:
            ConfigError: they cannot be loaded, or the start holds private records.
        """
        self.prepared = prepared
        self.tokenizer = load_tokenizer(prepared.model, prepared.prompts[prepared.prompts_data.column("text")])
        base = load_base_model(prepared.model, self.tokenizer, prepared.num_classes)
        model = prepare_model(base, prepared.model)
        declared = check_start(model, None, prepared.model.start_is_independent)
        self.points = (*prepared.points, *declared)
        self.base = OneBase(model)
        self.collator = RowCollator(pad_token_id=self.tokenizer.pad_token_id, task=prepared.model.task)

    def rows(self, records: datasets.Dataset, keep: Sequence[str] = ()) -> datasets.Dataset:
        """Return the rows of records."""
        prepared = self.prepared
        data, task = prepared.recipe.data, prepared.model.task
        return tokenize_records(records, self.tokenizer, data, keep, task, prepared.num_classes)

    def private_rows(self) -> datasets.Dataset:
        """Return the rows of the private records, with the ids of their users."""
        column = self.prepared.recipe.privacy.unit
        return self.rows(self.prepared.private, [column] if column else [])

    def prompts(self) -> datasets.Dataset:
        """Return the rows of the public texts, with class 0, which is not read."""
        return self.rows(self.labelled(np.zeros(len(self.prepared.prompts), dtype=np.int64)))

    def labelled(self, labels_N: Int64Array) -> datasets.Dataset:
        """Return the public texts that have a label, with it, in the columns of the private records."""
        prepared, data = self.prepared, self.prepared.recipe.data
        chosen = np.flatnonzero(labels_N != NO_LABEL)
        texts = prepared.prompts.select(chosen)[prepared.prompts_data.column("text")]
        return datasets.Dataset.from_dict({data.column("text"): texts, data.column("label"): labels_N[chosen].tolist()})

    def require_room(self) -> None:
        """Refuse public texts after which T new tokens have no room.

        Raises:
            ConfigError: a text is too long, for the model or for a row of the student.
        """
        prepared = self.prepared
        if not prepared.tokens:
            return
        new = prepared.new_tokens
        sees = getattr(self.base.model.config, "max_position_embeddings", None) or prepared.recipe.data.max_length
        apart = tokens_by_themselves(self.base.model)  # beyond it, a text depends on those beside it
        limit = min(sees, prepared.recipe.data.max_length, sees if apart is None else apart)
        for number, row in enumerate(self.encoded_prompts()):
            if len(row) + new > limit:
                raise ConfigError(
                    f"public text {number} has {len(row)} tokens, {len(row) + new} with pate.max_new_tokens={new}, "
                    f"and a row has room for {limit}: shorten it, lower pate.max_new_tokens, or raise data.max_length"
                )

    def encoded_prompts(self) -> list[list[int]]:
        """Return the tokens of each public text, as they begin a row of a record."""
        encode = TextGenerator(self.base.model, self.tokenizer).encode
        return [encode(text) for text in self._prompt_texts()]

    def ends(self) -> list[int]:
        """Return the tokens that end a text."""
        return TextGenerator(self.base.model, self.tokenizer).ends

    def completed(self, texts: Sequence[Sequence[int]]) -> datasets.Dataset:
        """Return the public texts that have new tokens, with these, in the columns of the private records.

        Args:
            texts: new tokens of each public text, as far as they were written.
        """
        data, prompts = self.prepared.recipe.data, self._prompt_texts()
        records = [
            data.form.record(prompt, self._decoded(row, new)) or {}
            for prompt, row, new in zip(prompts, self.encoded_prompts(), texts, strict=True)
            if new
        ]
        return datasets.Dataset.from_dict({name: [one[name] for one in records] for name in data.form.required})

    def _prompt_texts(self) -> list[str]:
        return list(self.prepared.prompts[self.prepared.prompts_data.column("text")])

    def _decoded(self, row: Sequence[int], new: Sequence[int]) -> str:
        """Return the text of new tokens; tokens at the begin of a text may be decoded without their space."""
        head, whole = self._text([*row]), self._text([*row, *new])
        return whole[len(head) :] if whole.startswith(head) else self._text(new)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
