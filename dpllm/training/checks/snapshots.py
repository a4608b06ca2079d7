"""Snapshots of tensors, which show cheaply whether something has written to them.

A *stamp* is the address and version counter of each local piece of a tensor; comparing stamps needs no device. A write
through ``.data`` raises no counter, so a snapshot also has a *sample* of each piece, at most 64 evenly spaced entries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpllm.engines.checksums import pieces

Stamp = tuple[tuple[int, int], ...]
"""Address and version of each piece of a tensor on this process."""
Samples = dict[tuple[torch.device, torch.dtype], Tensor]
"""Samples of many tensors, as integers, by device and width."""
_Views = dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]]
_SAMPLED = 64  # entries of a piece
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def stamp_of(tensor: Any) -> Stamp:
    """Return the stamp of a tensor; PyTorch raises the version at each write, except through ``.data``."""
    return tuple((piece.data_ptr(), 0 if piece.is_inference() else piece._version) for piece in pieces(tensor))


class Snapshot:
    """Stamps and samples of tensors at one moment.

    Args:
        tensors: the tensors by key; sharded, quantised or None are allowed.
        before: an earlier snapshot, whose views of the memory are used again if no tensor has moved.

    Attributes:
        stamps: the stamp of each tensor.
        samples: copies of the samples.

    >>> weights = {"weight": torch.zeros(9)}
    >>> before = Snapshot(weights)
    >>> weights["weight"].data += 1
    >>> before.written(weights), before.changed(before.read())
    ([], ['weight'])
    """

    @torch.no_grad()
    def __init__(self, tensors: Mapping[str, Any], before: Snapshot | None = None) -> None:
        """Read the stamps, and queue copies of the samples."""
        self.stamps = {key: stamp_of(tensor) for key, tensor in tensors.items()}
        stays = before is not None and _addresses(before.stamps) == _addresses(self.stamps)
        self._views: _Views = before._views if before is not None and stays else _views_of(tensors)
        self.samples = self.read()

    @torch.no_grad()
    def written(self, tensors: Mapping[str, Any]) -> list[str]:
        """Return the keys of the tensors that are new, written or replaced by their stamps; reads no device."""
        return [key for key, tensor in tensors.items() if stamp_of(tensor) != self.stamps.get(key)]

    def read(self) -> Samples:
        """Queue copies of the present samples, of the memory that the tensors had at the moment of the snapshot."""
        return {kind: torch.cat([view for _, view in parts]) for kind, parts in self._views.items()}

    def changed(self, samples: Samples) -> list[str]:
        """Return the keys of the tensors with other samples, where `samples` comes from `read`; waits for devices."""
        keys: dict[str, None] = {}
        for kind, parts in self._views.items():
            lengths = [len(view) for _, view in parts]
            pairs = zip(self.samples[kind].split(lengths), samples[kind].split(lengths), strict=True)
            keys |= {key: None for (key, _), pair in zip(parts, pairs, strict=True) if not torch.equal(*pair)}
        return list(keys)


def _addresses(stamps: Mapping[str, Stamp]) -> list[tuple[str, list[int]]]:
    return [(key, [address for address, _ in stamp]) for key, stamp in stamps.items()]


def _views_of(tensors: Mapping[str, Any]) -> _Views:
    """Return views of at most 64 entries of each piece, as integers, by device and width."""
    views: _Views = defaultdict(list)
    for key, tensor in tensors.items():
        for piece in pieces(tensor):
            if not piece.numel():
                continue
            part = piece.detach().as_subclass(Tensor)
            part = torch.view_as_real(part) if part.is_complex() else part
            part = part.view(-1) if part.is_contiguous() else part
            while part.dim() > 1:  # transposed, for instance: one row
                part = part[len(part) // 2]
            part = part[:: -(-len(part) // _SAMPLED)].view(_AS_INTEGER[part.element_size()])
            views[part.device, part.dtype].append((key, part))
    return dict(views)
