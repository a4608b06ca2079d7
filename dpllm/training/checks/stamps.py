"""Stamps of tensors, which show writes without reading the device, and the error of the watch.

Place in the flow: under `dpllm.training.checks.watch` and its parts.
"""

from __future__ import annotations

from typing import Any

from dpllm.engines.checksums import pieces

Stamp = tuple[tuple[int, int], ...]
"""Address and version of each piece of a tensor on this process."""


class WatchError(ValueError):
    """Private data reached, or may have reached, weights or saved state outside of the mechanism."""


def stamp_of(tensor: Any) -> Stamp:
    """Return the stamp of a tensor; PyTorch raises the version at each write, except through ``.data``."""
    return tuple((piece.data_ptr(), 0 if piece.is_inference() else piece._version) for piece in pieces(tensor))
