"""Which modules of a model will run one row at a time, from its configuration: no weight is allocated, no record read.

The taps of a recipe's model (`dpllm.ghost.attach`) are chosen on tensors that have shapes only. Modules whose gradients
no tap gives run row by row: exact, but with as many kernel launches as a microbatch has rows. The first call of the
real model also compares values (`dpllm.ghost.weights_check`), and may find more of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dpllm.config import ModelConfig
from dpllm.ghost.attach import Ladder
from dpllm.planning.model_shape import on_meta

_ROWS, _TOKENS = 2, 8
_NOBODY: Any = None  # in the place of a clipper: no call is clipped


def row_by_row_modules(model: ModelConfig) -> list[str] | None:
    """Return the paths of the modules that will run row by row, as far as shapes tell.

    Returns:
        None where they do not: the model's own code needs values, as some routers of experts do.

    Raises:
        ConfigError: as `dpllm.planning.model_shape.shape_of_model`.

    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> row_by_row_modules(ModelConfig(config={"model_type": "llama", "vocab_size": 300, **sizes}))
    []
    """
    base, prepared = on_meta(model)
    base.set_experts_implementation("batched_mm")  # of transformers', the one that works for any dtype without values
    ladder = Ladder(prepared, _NOBODY, {name: p for name, p in prepared.named_parameters() if p.requires_grad})
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
            ids = torch.zeros(_ROWS, _TOKENS, dtype=torch.int64)
            ladder.discover(lambda: prepared(input_ids=ids))
        ladder.attach()
    except Exception:  # of the model's own code, which gets tensors without values
        return None
    return sorted(ladder.splits)


def row_by_row_words(paths: list[str] | None, rows: int) -> str:
    """Say how many modules run row by row, which, and what it costs.

    >>> row_by_row_words(["layers.0.mixer", "layers.1.mixer"], 8)
    '2 (layers.0.mixer, …), each with 8 times its kernel launches'
    """
    if paths is None:
        return "not known before the first step"
    if not paths:
        return "none known before the first step"
    names = (paths[0] or "the model") + (", …" if len(paths) > 1 else "")
    return f"{len(paths)} ({names}), each with {rows} times its kernel launches"
