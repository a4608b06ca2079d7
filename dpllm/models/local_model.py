"""Read facts of a pretrained model on this machine: its kind, its size, the length of its rows, its tokenizer.

`dpllm init` chooses the settings of a recipe by them. Nothing is downloaded, and no weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PreTrainedTokenizerBase

from dpllm.config import ConfigError, ModelConfig
from dpllm.ghost.attach import is_linear, is_transposed
from dpllm.models.inputs import num_positions
from dpllm.models.load import load_tokenizer, skeleton
from dpllm.models.loading import NO_CODE, not_loaded, require_folder

_ENDLESS = 1_000_000  # a tokenizer without a limit states 10^30


@dataclass(frozen=True)
class ModelAtHand:
    """A model on this machine.

    Attributes:
        folder: folder with its config.json.
        encoder_decoder: whether it has an encoder and a decoder.
        parameters: number of its parameters.
        longest: the largest number of tokens of a row, by positions and tokenizer; None: no limit is stated.
        transposed: whether its matrices are stored as inputs by outputs (GPT-2).
        has_weights: whether its .safetensors files are on this machine.
        tokenizer: its tokenizer.
    """

    folder: str
    encoder_decoder: bool
    parameters: int
    longest: int | None
    transposed: bool
    has_weights: bool
    tokenizer: PreTrainedTokenizerBase

    @property
    def has_template(self) -> bool:
        """Return whether its tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)


def model_at_hand(name: str) -> ModelAtHand | None:
    """Return the facts of a model in a folder or in the cache of the Hub; None if it is not on this machine.

    Args:
        name: a folder, or a Hub id.

    Raises:
        ConfigError: there is no such folder, or its files are damaged.
    """
    require_folder("model", name)
    folder = Path(name)
    if not folder.is_dir():
        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    try:
        config: Any = AutoConfig.from_pretrained(str(folder), **NO_CODE)
    except (OSError, ValueError) as error:
        raise not_loaded("model", name, error) from error
    encoder_decoder = bool(config.is_encoder_decoder)
    section = ModelConfig(name=str(folder), task="seq2seq_lm" if encoder_decoder else "causal_lm")
    try:
        tokenizer = load_tokenizer(section)
    except ConfigError:
        if str(folder) != name:  # the cache may contain only a part of the model
            return None
        raise
    model = _built(section)
    limits = [num_positions(model), getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    known = [int(limit) for limit in limits if limit is not None and 0 < limit < _ENDLESS]
    return ModelAtHand(
        folder=str(folder),
        encoder_decoder=encoder_decoder,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        longest=min(known, default=None),
        transposed=any(is_linear(module) and is_transposed(module) for module in model.modules()),
        has_weights=any(folder.glob("*.safetensors")),
        tokenizer=tokenizer,
    )


def _built(section: ModelConfig) -> Any:
    """Return the model without weights: as a language model, or an encoder as a classifier."""
    try:
        return skeleton(section)
    except ConfigError:
        return skeleton(ModelConfig(name=section.name, task="sequence_classification", num_labels=2))
