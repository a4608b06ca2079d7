"""The ignore value of labels, and the names of packed rows' boundaries, as the whole ecosystem writes them.

Place in the flow: below everything that makes or reads a microbatch.
"""

IGNORE = -100
"""Labels with this value are not targets."""

START, END = 1, 2
"""Labels of the first and the last token of an answer; a token that is both has their sum."""

BOUNDARIES = "cu_seq_lens_q"
"""Name of the input (B + 1,) of packed rows: where each row begins, and at last where all of them end."""

KEY_BOUNDARIES = "cu_seq_lens_k"
"""Name of the input with the same numbers for the keys of the attention."""
