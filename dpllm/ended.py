"""The weights as a private run left them: a later save, and a later run in this process, know them again.

Place in the flow: after the last step, whether the run ended, failed or was left there. A report speaks of the weights
that the run ended with. People may change them afterwards, and that is covered where the change depends on nothing but
what the run released; so a save of other weights is an open point. And another run that begins at a copy of them begins
at an earlier run's release.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpllm.checksums import Checksum, values
from dpllm.processes import Processes

_FEWEST = 16  # entries of a tensor that is known again: shorter ones may be equal by chance
_LEFT: dict[tuple[tuple[int, ...], int], Path] = {}
"""Shape and checksum of tensors that private runs of this process trained, with the folder of the run."""
_GOING: weakref.WeakKeyDictionary[nn.Module, list[RunWeights]] = weakref.WeakKeyDictionary()
"""Models that a run has begun to train, with the runs that have not ended: nobody says so when a loop is left."""


def _sums(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    with torch.no_grad():
        return dict(zip(parameters, values([Checksum([p.detach()]) for p in parameters.values()]), strict=True))


def _whole(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    return {
        n: p for n, p in parameters if p.numel() >= _FEWEST and not isinstance(p, DTensor) and not hasattr(p, "ds_id")
    }


def _is_sharded(model: nn.Module) -> bool:
    """Whether an engine puts shards and whole tensors by turns where the parameters are."""
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters()
    )


class RunWeights:
    """The weights of one run, from its start to what is saved after its end; nothing of those that are sharded.

    Args:
        model: the module inside its engine's wrapper.
        folder: of the run; None: it has none.

    >>> model = nn.Linear(8, 8)
    >>> weights = RunWeights(model, None)
    >>> weights.end()
    >>> weights.changed(model)
    []
    >>> model.weight.data += 1
    >>> weights.changed(model)
    ['weight']
    """

    def __init__(self, model: nn.Module, folder: Path | None) -> None:
        """Take the weights that the run begins at."""
        self._model, self._folder = weakref.ref(model), folder
        self._begun = _sums(_whole((n, p) for n, p in model.named_parameters() if p.requires_grad))
        self._ended: dict[str, int] | None = None

    def note_step(self) -> None:
        """Know the weights again from now on, however the run ends; before its first step."""
        model = self._model()
        if model is not None and self._folder is not None:
            _GOING.setdefault(model, []).append(self)

    def end(self) -> None:
        """Take the weights that the run ends with; those that it trained are known again in this process."""
        model = self._model()
        if self._ended is not None or model is None:
            return
        self._ended = self._leave(model)
        if self in _GOING.get(model, []):
            _GOING[model].remove(self)

    def _leave(self, model: nn.Module) -> dict[str, int] | None:
        """Note the present weights as left by this run, and return their sums; None of those that are sharded."""
        if _is_sharded(model):
            return None
        parameters = dict(model.named_parameters())
        sums = _sums(parameters)
        for name, begun in self._begun.items():
            if self._folder is not None and name in parameters and sums[name] != begun:
                _LEFT[tuple(parameters[name].shape), sums[name]] = self._folder
        return sums

    @staticmethod
    def look_at_others(own_folder: Path | None) -> None:
        """Note the present weights of all runs that have not ended, but those of a folder."""
        for model, runs in list(_GOING.items()):
            for run in runs:
                if run._folder != own_folder:
                    run._leave(model)

    def changed(self, model: nn.Module) -> list[str]:
        """Return the parameters that are not as the run left them, by name; before its end, and of shards, none.

        Args:
            model: that is about to be saved.
        """
        if self._ended is None:
            return []
        now = _sums(dict(model.named_parameters()))
        return sorted(name for name in self._ended.keys() | now.keys() if self._ended.get(name) != now.get(name))


def earlier_run(model: Any, own_folder: Path | None) -> Path | None:
    """Return the folder of an earlier run of this process whose trained weights a model holds, if there is one.

    Args:
        model: with its adapters; parameters that are sharded are not looked at.
        own_folder: of the run that begins or goes on, whose own weights are none of an earlier run.
    """
    RunWeights.look_at_others(own_folder)
    if not _LEFT or not isinstance(model, nn.Module):
        return None
    parameters = _whole(model.named_parameters())
    found = (_LEFT.get((tuple(parameters[name].shape), total)) for name, total in _sums(parameters).items())
    return next((folder for folder in found if folder is not None and folder != own_folder), None)


def note_changes(weights: RunWeights | None, model: nn.Module, ledger: Any, processes: Processes) -> None:
    """Append an open point where weights are saved that are not those of the run. Called by all processes together.

    Args:
        weights: of the run; None: it was not attached.
        model: that is about to be saved.
        ledger: of the run.
        processes: of the run.
    """
    changed = sorted(
        {n for names in processes.gather([] if weights is None else weights.changed(model)) for n in names}
    )
    if changed and ledger is not None:
        more = f" and {len(changed) - 1} other parameter(s)" if len(changed) > 1 else ""
        ledger.append_open_point(
            f"{changed[0]}{more} changed after the end of the private training and before they were saved. The "
            "guarantee covers that only where the change depends on nothing but what the run released: confirm it, or "
            "save the weights as the run left them."
        )
