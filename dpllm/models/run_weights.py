"""The weights as a private run left them: a later save, and a later run in this process, can recognise them.

Place in the flow: after the last step, whether the run ended, failed or was abandoned. A report describes the weights
at the end of the run. Users may change them afterwards. The guarantee covers a change that depends only on the releases
of the run, so a save of other weights is an open point. A run that begins at a copy of these weights begins at an
earlier run's release.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpllm.engines.checksums import Checksum, values
from dpllm.engines.processes import Processes
from dpllm.privacy.identity import RunName
from dpllm.privacy.ledger import LedgerError

_FEWEST = 16  # entries of a tensor that can be recognised: shorter ones may be equal by chance
_LEFT: dict[tuple[tuple[int, ...], int], RunName] = {}
"""Shape and checksum of tensors that private runs of this process trained, with the run."""
_GOING: weakref.WeakKeyDictionary[nn.Module, list[RunWeights]] = weakref.WeakKeyDictionary()
"""Models that a run has begun to train, with the runs that have not ended: leaving a loop gives no signal."""


def _sums(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    with torch.no_grad():
        return dict(zip(parameters, values([Checksum([p.detach()]) for p in parameters.values()]), strict=True))


def _whole(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    return {
        n: p for n, p in parameters if p.numel() >= _FEWEST and not isinstance(p, DTensor) and not hasattr(p, "ds_id")
    }


def _is_sharded(model: nn.Module) -> bool:
    """Whether an engine alternates between shards and whole tensors in place of the parameters."""
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
        is_written: returns whether a trained parameter now differs from the last update; its owner is not kept alive.

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

    def note_step(self) -> None:
        """Recognise the weights from now on, however the run ends; called before its first step."""
        model = self._model()
        if model is not None and self.run is not None:
            _GOING.setdefault(model, []).append(self)

    def leave(self) -> None:
        """Recognise the current weights as left by this run, beside those of its end."""
        model = self._model()
        if model is not None:
            self._leave(model)

    def end(self) -> None:
        """Record the weights at the end of the run; those that it trained are recognised in this process."""
        model = self._model()
        if self._ended is not None or model is None:
            return
        self._ended = self._leave(model)
        if self in _GOING.get(model, []):
            _GOING[model].remove(self)

    def _leave(self, model: nn.Module) -> dict[str, int] | None:
        """Note the current weights as left by this run, and return their checksums; None if they are sharded."""
        if _is_sharded(model):
            return None
        parameters = dict(model.named_parameters())
        sums = _sums(parameters)
        for name, begun in self._begun.items():
            if self.run is not None and name in parameters and sums[name] != begun:
                _LEFT[tuple(parameters[name].shape), sums[name]] = self.run
        return sums

    @property
    def model(self) -> nn.Module | None:
        """The model; None: it is gone."""
        return self._model()

    @staticmethod
    def look_at_others(own: RunName | None) -> None:
        """Note the current weights of all runs that have not ended, except one."""
        for model, going in list(_GOING.items()):
            for weights in going:
                if weights.run != own:
                    weights._leave(model)

    def changed(self, model: nn.Module) -> list[str]:
        """Return the names of parameters that changed after the run's end; none before its end, or if sharded.

        Args:
            model: the model that is about to be saved.
        """
        if self._ended is None:
            return []
        now = _sums(dict(model.named_parameters()))
        return sorted(name for name in self._ended.keys() | now.keys() if self._ended.get(name) != now.get(name))

    @property
    def is_written(self) -> bool:
        """Whether the run has not ended and a trained parameter differs from its last update; waits for the device."""
        method = None if self._is_written is None or self._ended is not None else self._is_written()
        return method is not None and method()


def earlier_run(model: Any, own: RunName | None) -> Path | None:
    """Return the folder of an earlier run of this process whose trained weights a model holds, if there is one.

    Args:
        model: with its adapters; sharded parameters are skipped.
        own: the run that begins or continues; its weights do not count as an earlier run's.
    """
    RunWeights.look_at_others(own)
    if not _LEFT or not isinstance(model, nn.Module):
        return None
    parameters = _whole(model.named_parameters())
    found = (_LEFT.get((tuple(parameters[name].shape), total)) for name, total in _sums(parameters).items())
    return next((run.folder for run in found if run is not None and run != own), None)


def sums_of_trained(model: nn.Module | None) -> dict[str, tuple[str, int]]:
    """Return dtype and checksum of each trainable parameter, for the state beside saved weights; nothing if sharded.

    Args:
        model: the module inside its engine's wrapper; None: no model is attached.
    """
    if model is None or _is_sharded(model):
        return {}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: (str(trained[name].dtype), total) for name, total in _sums(trained).items()}


def refuse_other_weights(model: nn.Module | None, saved: Mapping[str, Any], processes: Processes) -> None:
    """Make sure that loaded weights are those that a state was saved with. Called by all processes together.

    Args:
        model: as for `sums_of_trained`, with the weights that were loaded.
        saved: `sums_of_trained` when they were saved; parameters whose dtype has changed are skipped.
        processes: of the run.

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
            f"{other[0]} is not as it was when this checkpoint was saved ({len(other)} parameter(s) differ): its "
            "weights were replaced, or the state of the run was loaded without them. Load the whole checkpoint "
            "(accelerator.load_state), with the files that it was saved with"
        )


def note_changes(weights: RunWeights | None, model: nn.Module | None, ledger: Any, processes: Processes) -> None:
    """Append an open point if the weights to be saved are not those of the run. Called by all processes together.

    Args:
        weights: of the run; None: no model was attached.
        model: the model that is about to be saved; None: it is gone.
        ledger: of the run.
        processes: of the run.
    """
    if processes.any(weights is not None and weights.is_written) and ledger is not None:
        ledger.append_open_point(
            "Weights were saved in the middle of the training with other values than its last update had left. The "
            "guarantee covers that only where the change depends on nothing but what the run released (an average of "
            "its weights, for instance): confirm it, or take these files out of what is released."
        )
    here = [] if weights is None or model is None else weights.changed(model)
    changed = sorted({n for names in processes.gather(here) for n in names})
    if changed and ledger is not None:
        more = f" and {len(changed) - 1} other parameter(s)" if len(changed) > 1 else ""
        ledger.append_open_point(
            f"{changed[0]}{more} changed after the end of the private training and before they were saved. The "
            "guarantee covers that only where the change depends on nothing but what the run released: confirm it, or "
            "save the weights as the run left them."
        )
