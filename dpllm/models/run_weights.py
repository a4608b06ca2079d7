"""Record the weights that a private run left, so that a later save or run in this process recognises them.

A run may have ended, failed or been abandoned. A report describes the weights at the end of the run. Users may change
them afterwards. The guarantee covers a change that depends only on the releases of the run, so a save of changed
weights is an open point. A run that starts from a copy of these weights starts from an earlier run's release.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpllm.engines.checksums import Checksum, values
from dpllm.engines.processes import Processes
from dpllm.privacy.ledger import LedgerError
from dpllm.privacy.run_folder import RunName

_FEWEST = 16  # entries of a tensor that can be recognised: shorter ones may be equal by chance
_RUNS: list[RunWeights] = []
"""Runs of this process that took a step or left changed weights.

Neither a run nor its model can own this list: a later model, which no run has seen, may contain a copy of weights whose
model and run no longer exist.
"""


def _sums(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    with torch.no_grad():
        return dict(zip(parameters, values([Checksum([p.detach()]) for p in parameters.values()]), strict=True))


def _sums_of_modules(modules: Sequence[nn.Module]) -> list[int]:
    """Return a checksum of each module's own parameters."""
    with torch.no_grad():
        return values([Checksum(module.parameters(recurse=False)) for module in modules])


def _is_whole(module: nn.Module) -> bool:
    """Return whether a module directly holds parameters, all of them unsharded."""
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in own)


def _whole(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    return {
        n: p for n, p in parameters if p.numel() >= _FEWEST and not isinstance(p, DTensor) and not hasattr(p, "ds_id")
    }


def _is_sharded(model: nn.Module) -> bool:
    """Return whether an engine alternates between shards and whole tensors instead of the parameters."""
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters()
    )


class RunWeights:
    """The weights of one run, from its start to saves after its end; sharded weights are not recorded.

    Attributes:
        run: the run that trained the weights; None: it has no folder.

    Args:
        model: the module inside its engine's wrapper.
        run: the run that trains the weights; None: it has no folder.
        is_written: returns whether a trained parameter has changed since the last update; its owner is not kept alive.

    >>> model = nn.Linear(8, 8)
    >>> weights = RunWeights(model, None)
    >>> weights.end()
    >>> weights.changed(model)
    []
    >>> model.weight.data += 1
    >>> weights.changed(model)
    ['weight']
    """

    def __init__(self, model: nn.Module, run: RunName | None, is_written: Callable[[], bool] | None = None) -> None:
        """Record the weights at the start of the run."""
        self.run, self._model = run, weakref.ref(model)
        self._is_written = None if is_written is None else weakref.WeakMethod(is_written)
        self._begun = _sums(_whole((n, p) for n, p in model.named_parameters() if p.requires_grad))
        self._ended: dict[str, int] | None = None
        self._left: set[tuple[tuple[int, ...], int]] = set()
        # Checksums of modules when they were noted: of trained ones at the start of the run, None if it was resumed.
        self._trained: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
        self._frozen: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def note_step(self, begins: bool) -> None:
        """Recognise the weights from now on, however the run ends; called before its first step.

        Args:
            begins: whether these are still the weights from the run's start, from which another run may start, too.
        """
        model = self._model()
        if model is None or self.run is None:
            return
        modules = list(model.modules())
        trained = {m: None for m in modules if any(p.requires_grad for p in m.parameters(recurse=False))}
        first = [m for m in trained if begins and _is_whole(m) and not _runs_of(m, "_trained")]
        frozen = [m for m in modules if m not in trained and _is_whole(m) and not _runs_of(m, "_frozen")]
        self._trained.update(trained)
        self._trained.update(zip(first, _sums_of_modules(first), strict=True))
        self._frozen.update(zip(frozen, _sums_of_modules(frozen), strict=True))
        self._recognise()

    def _recognise(self) -> None:
        if self not in _RUNS:
            _RUNS.append(self)

    def leave(self) -> None:
        """Recognise the current weights as left by this run, in addition to those of its end."""
        model = self._model()
        if model is not None:
            self._leave(model)

    def end(self) -> None:
        """Record the weights at the end of the run; this process then recognises the trained ones."""
        model = self._model()
        if self._ended is None and model is not None:
            self._ended = self._leave(model)

    def _leave(self, model: nn.Module) -> dict[str, int] | None:
        """Note the current weights as left by this run, and return their checksums; None if they are sharded."""
        if _is_sharded(model):
            return None
        parameters = dict(model.named_parameters())
        sums = _sums(parameters)
        for name, begun in self._begun.items():
            if self.run is not None and name in parameters and sums[name] != begun:
                self._left.add((tuple(parameters[name].shape), sums[name]))
                self._recognise()
        return sums

    def left(self) -> set[tuple[tuple[int, ...], int]]:
        """Return shape and checksum of the tensors that the run left, or, if it has not ended, has trained so far."""
        if self._ended is None:
            self.leave()
        return self._left

    @property
    def model(self) -> nn.Module | None:
        """The model; None: it no longer exists."""
        return self._model()

    def changed(self, model: nn.Module) -> list[str]:
        """Return the names of parameters that changed after the run's end; none before its end, or if sharded."""
        if self._ended is None:
            return []
        now = _sums(dict(model.named_parameters()))
        return sorted(name for name in self._ended.keys() | now.keys() if self._ended.get(name) != now.get(name))

    @property
    def is_written(self) -> bool:
        """Return whether the run has not ended and a trained parameter changed since its last update; reads devices."""
        method = None if self._is_written is None or self._ended is not None else self._is_written()
        return method is not None and method()


def _runs_of(module: nn.Module, part: str) -> list[RunWeights]:
    """Return the runs with a module in one of their parts, ``_trained`` or ``_frozen``, in order."""
    return [weights for weights in _RUNS if module in getattr(weights, part)]


def runs_that_trained(model: nn.Module, own: RunName | None) -> list[Path]:
    """Return the folders of other runs of this process that trained modules of a model, in alphabetical order.

    Modules whose weights are those from which the first such run started do not count.
    """
    trained = {module: runs for module in model.modules() if (runs := _runs_of(module, "_trained"))}
    begun = {module: runs[0]._trained[module] for module, runs in trained.items() if _is_whole(module)}
    now = dict(zip(begun, _sums_of_modules(list(begun)), strict=True))
    other = [runs for module, runs in trained.items() if begun.get(module) is None or begun[module] != now[module]]
    return sorted({one.run.folder for runs in other for one in runs if one.run is not None and one.run != own})


def runs_below(model: nn.Module, own: RunName | None) -> list[Path]:
    """Return the folders of other runs of this process that trained on top of modules that changed afterwards."""
    first = {module: runs[0] for module in model.modules() if (runs := _runs_of(module, "_frozen"))}
    known = {module: one for module, one in first.items() if one.run != own and _is_whole(module)}
    sums = zip(known.items(), _sums_of_modules(list(known)), strict=True)
    changed = [one.run for (module, one), now in sums if one._frozen[module] != now]
    return list(dict.fromkeys(run.folder for run in changed if run is not None))


def earlier_run(model: Any, own: RunName | None) -> Path | None:
    """Return the folder of an earlier run of this process whose trained weights a model contains, or None.

    Args:
        model: model with its adapters; sharded parameters are skipped.
        own: the run that begins or continues; its weights do not count as an earlier run's.
    """
    left = {key: one.run for one in _RUNS if one.run != own for key in one.left()}
    if not left or not isinstance(model, nn.Module):
        return None
    parameters = _whole(model.named_parameters())
    found = (left.get((tuple(parameters[name].shape), total)) for name, total in _sums(parameters).items())
    return next((run.folder for run in found if run is not None), None)


def sums_of_trained(model: nn.Module | None) -> dict[str, tuple[str, int]]:
    """Return dtype and checksum of each trainable parameter, for the run state of a checkpoint; empty if sharded.

    Args:
        model: the module inside its engine's wrapper; None: no model is attached.
    """
    if model is None or _is_sharded(model):
        return {}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: (str(trained[name].dtype), total) for name, total in _sums(trained).items()}


def refuse_other_weights(model: nn.Module | None, saved: Mapping[str, Any], processes: Processes) -> None:
    """Check that loaded weights are those with which a state was saved. Called by all processes together.

    Args:
        model: as for `sums_of_trained`, with the loaded weights.
        saved: `sums_of_trained` when they were saved; parameters whose dtype has changed are skipped.
        processes: processes of the run.

    Raises:
        LedgerError: they differ; raised on every process.
    """
    now = sums_of_trained(model) if saved else {}
    here = [
        name for name, one in now.items() if name in saved and saved[name][0] == one[0] and saved[name][1] != one[1]
    ]
    other = sorted({name for names in processes.gather(here) for name in names})
    if other:
        raise LedgerError(
            f"{other[0]} has changed since this checkpoint was saved ({len(other)} parameter(s) differ): its "
            "weights were replaced, or the run state was loaded without them. Load the whole checkpoint "
            "(accelerator.load_state) with the files that belong to it"
        )


def note_changes(weights: RunWeights | None, model: nn.Module | None, ledger: Any, processes: Processes) -> None:
    """Append an open point if the weights to be saved differ from the run's. Called by all processes together.

    Args:
        weights: weights of the run; None: no model was attached.
        model: the model that is about to be saved; None: it no longer exists.
        ledger: ledger of the run.
        processes: processes of the run.
    """
    if processes.any(weights is not None and weights.is_written) and ledger is not None:
        ledger.append_open_point(
            "Weights were saved in the middle of the training with values that differ from those after its last "
            "update. The guarantee covers that only where the change depends on nothing but what the run released (an "
            "average of its weights, for instance): confirm it, or do not release these files."
        )
    here = [] if weights is None or model is None else weights.changed(model)
    changed = sorted({n for names in processes.gather(here) for n in names})
    if changed and ledger is not None:
        more = f" and {len(changed) - 1} other parameter(s)" if len(changed) > 1 else ""
        ledger.append_open_point(
            f"{changed[0]}{more} changed after the end of the private training and before the save. The "
            "guarantee covers that only where the change depends on nothing but what the run released: confirm it, or "
            "save the weights unchanged."
        )
