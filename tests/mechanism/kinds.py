"""Every kind of clipping as recipes give it, with the defaults and with extreme options: a new kind adds a line.

Tests use them with one group of all parameters, so patterns of names are "*".
"""

from dpllm.mechanism.catalogue import clipping_of
from dpllm.mechanism.parts import Spec

CLIPPING_KINDS = [
    "flat",
    "automatic",
    {"kind": "automatic", "stability": 1e-9},
    {"kind": "psac", "stability": 0.5},
    {"kind": "psac", "stability": 1e-9},
    "per-layer",
    {"kind": "groups", "parameters": {"all": "*"}},
    "quantile",
    {"kind": "quantile", "start": 1e-6},
    {"kind": "quantile", "start": 2999.0},
]
"""As ``privacy.clipping`` of a recipe."""


def clipping(kind, clip_norm):
    """Return the clipping, as a plan makes it."""
    return clipping_of(Spec.of(kind), clip_norm)
