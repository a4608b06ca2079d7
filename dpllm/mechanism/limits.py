"""Bounds within which ε is computed in seconds, and the numbers of a step fit in float32.

The configuration checks these bounds when it is read, the events when they are created.
"""

ADJACENCIES = ("zero-out", "replace-one")
RANDOMNESS = ("os", "chacha20", "discrete")
"""The generators of noise (`dpllm.mechanism.generators`)."""
NOISE_MEMORIES = ("auto", "stored", "regenerated")
"""How the noise of earlier steps is stored (`dpllm.mechanism.generators`)."""
MAX_TARGET_EPSILON = 1000.0
MIN_NOISE, MAX_NOISE = 1e-3, 1e6
MIN_CLIP_NORM, MAX_CLIP_NORM = 1e-12, 1e12
MAX_ROWS_DRAWN_PER_UNIT = 10_000
MAX_UNITS = 10**15
MAX_STEPS = 10_000_000
"""The largest number of private steps."""
