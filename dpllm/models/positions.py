"""The largest number of tokens in a row: the size of the table of learned positions, if a model has one.

Place in the flow: beside the losses; the checks before a run and the trainer use it. A longer row would cause an index
error within a step that was already charged.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from dpllm.data.lengths import TOKENS, input_of

_TABLE = re.compile(r"(?:^|\.)(?:wpe|embed_positions|position_embeddings?|pos_emb|positions_embed)$")


def num_positions(model: nn.Module) -> int | None:
    """Return the largest number of tokens in a row, None if positions are computed or relative.

    A tower for images or sound counts patches or frames, not tokens.

    >>> model = nn.ModuleDict({"wpe": nn.Embedding(16, 4)})
    >>> num_positions(model)
    16
    """
    config: Any = getattr(model, "config", None)
    stated = getattr(config, "max_position_embeddings", None)
    bounds = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _TABLE.search(name) and input_of(model, name) == TOKENS:
            rows = module.num_embeddings
            if module.padding_idx is not None:  # RoBERTa counts from behind the padding
                rows -= module.padding_idx + 1
            bounds.append(min(rows, stated) if isinstance(stated, int) and stated > 0 else rows)
    return min(bounds, default=None)
