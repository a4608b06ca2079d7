"""A few sizes to which rows and lengths are rounded up, so that the shapes of microbatches repeat.

Place in the flow: where passes run from recordings (`dpllm.ghost.replay`), used by the collator for tokens and by
`dpllm.training.microbatches` for rows. Padding is masked, and padding rows have a loss of weight 0: only the work
grows.
"""

from __future__ import annotations

import numpy as np

_TOKENS = 16  # no step of tokens is smaller: the kernels' tiles begin there
_PARTS_OF_TOKENS, _PARTS_OF_ROWS = 8, 4


def up_in_steps(number: np.ndarray | int, parts: int, least: int = 1) -> np.ndarray:
    """Round up to a multiple of the step of a number's octave: 1/``parts`` of the power of two below it.

    Args:
        number: positive, or an array of these.
        parts: steps between two powers of two; at most a share of 1/``parts`` is added, beyond the smallest step.
        least: the smallest step.

    >>> up_in_steps(np.array([1, 7, 9, 17, 40]), 4).tolist()
    [1, 7, 10, 20, 40]
    """
    number = np.maximum(1, np.asarray(number, dtype=np.int64))  # unsigned ones have no negative
    step = np.maximum(least, 2 ** (np.log2(number).astype(np.int64)) // parts)
    return -(-number // step) * step


def tokens_in_steps(lengths: np.ndarray | int, longest: int) -> np.ndarray:
    """Round lengths up, at most to the longest of all rows: beyond it a model may have no positions.

    >>> tokens_in_steps(np.array([5, 33, 200, 1000]), 1000).tolist()
    [16, 48, 208, 1000]
    """
    return np.minimum(up_in_steps(lengths, _PARTS_OF_TOKENS, _TOKENS), max(longest, int(np.max(lengths, initial=1))))


def rows_in_steps(count: int, room: int) -> int:
    """Round a number of rows up, at most to the rows that fit.

    >>> rows_in_steps(33, 64), rows_in_steps(33, 36)
    (40, 36)
    """
    return max(count, min(int(up_in_steps(count, _PARTS_OF_ROWS)), room))
