"""Embeddings of texts by a local public model: the mean of its last hidden states.

The evaluation of synthetic text and Private Evolution compare them. No text leaves the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, PreTrainedTokenizerBase

from dpllm.config import ConfigError, ModelConfig
from dpllm.ghost.model_calls import tokens_by_themselves
from dpllm.models.inputs import num_positions
from dpllm.models.load import NO_CODE, load_tokenizer, not_loaded, require_folder

Floats = NDArray[np.float64]
LONGEST = 512
"""Tokens of a text that are read, if the model reads that many independently of other texts."""


class Embedder:
    """A model that turns texts into vectors.

    Attributes:
        model: without a head, in evaluation mode.
        tokenizer: its own.
        most: tokens of a text that are read.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, most: int = LONGEST) -> None:
        """Store a loaded model."""
        encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        self.model = (model.get_encoder() if encoder_decoder else model).eval()
        self.tokenizer = tokenizer
        apart = tokens_by_themselves(model)  # beyond it, a text's vector depends on other texts
        self.most = min(most, num_positions(model) or most, apart or most)

    @torch.no_grad()
    def embed(self, texts: Sequence[str], batch_size: int = 64) -> Floats:
        """Return, (len(texts), D) float64, the mean of the last hidden states of each text's tokens.

        A row depends on its text only: padding is masked. A text without tokens, or with states that are not finite,
        has a row of zeros.
        """
        device = next(self.model.parameters()).device
        rows = [list(self.tokenizer(text, verbose=False)["input_ids"])[: self.most] for text in texts]
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        found: dict[int, NDArray[np.float64]] = {}
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            longest = max(1, max(len(rows[number]) for number in numbers))
            pad = int(self.tokenizer.pad_token_id or 0)
            ids_BT = torch.tensor([rows[n] + [pad] * (longest - len(rows[n])) for n in numbers], device=device)
            mask_BT = torch.tensor(
                [[1] * len(rows[n]) + [0] * (longest - len(rows[n])) for n in numbers], device=device
            )
            # A row without tokens attends to its padding; its mean below has no entry.
            seen_BT = torch.where(mask_BT.sum(1, keepdim=True) == 0, torch.ones_like(mask_BT), mask_BT)
            states_BTD = self.model(input_ids=ids_BT, attention_mask=seen_BT).last_hidden_state.double()
            weights_BT1 = mask_BT.unsqueeze(-1).double()
            mean_BD = (states_BTD * weights_BT1).sum(1) / weights_BT1.sum(1).clamp(min=1)
            mean_BD[~torch.isfinite(mean_BD).all(1)] = 0
            found.update(zip(numbers, mean_BD.cpu().numpy(), strict=True))
        width = int(getattr(self.model.config, "hidden_size", 0))
        return np.array([found[n] for n in range(len(rows))]) if rows else np.zeros((0, width))


def load_embedder(name: str) -> Embedder:
    """Load a model for embeddings: a folder in the format of transformers, or a Hub id.

    Raises:
        ConfigError: it cannot be loaded.
    """
    require_folder("embedding model", name)
    tokenizer = load_tokenizer(ModelConfig(name=name))
    try:
        model: Any = AutoModel.from_pretrained(name, dtype=torch.float32, **NO_CODE)
    except (torch.OutOfMemoryError, MemoryError, ConfigError):
        raise
    except Exception as error:  # any: damage raises SafetensorError, UnpicklingError, ...
        raise not_loaded("model", name, error) from error
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return Embedder(model.to(accelerator or "cpu"), tokenizer)
