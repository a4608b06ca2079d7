"""Define the ignore value of labels, and the input names for the boundaries of packed rows, as in transformers."""

IGNORE = -100
"""Labels with this value are not targets."""

START, END = 1, 2
"""Labels of the first and the last token of an answer; a token that is both has their sum."""

BOUNDARIES = "cu_seq_lens_q"
"""Name of the input (B + 1,) of packed rows: the start of each row, and finally the end of the last one."""

KEY_BOUNDARIES = "cu_seq_lens_k"
"""Name of the input with the same numbers for the keys of the attention."""
