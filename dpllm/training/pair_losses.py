"""Compute the losses of a microbatch's preference pairs, and the reference with which they are compared.

`dpllm.DPDPOTrainer` uses it instead of `dpllm.training.row_losses`. The reference is the model at the start of the
training, or another one, and does not change. Its log-probabilities are computed once for each pair, before the first
step, with no other pair in the call, so a pair's loss is a function of that pair and the weights. This needs no second
model next to the trained one, and works alike on every engine.

Shape suffixes: B pairs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from datasets.utils import tqdm
from torch import Tensor, nn

from dpllm.config import ConfigError
from dpllm.config.tasks import Score
from dpllm.data.examples import LOG_PROBS, PairCollator
from dpllm.engines.processes import Processes
from dpllm.models.preference import PairLoss, answer_tokens, pair_log_probs
from dpllm.training.choose_clipper import in_mode
from dpllm.training.evaluation import Measurement, sums_over

PREFERENCE_ACCURACY = Score("preference accuracy", larger_is_better=True)


class PairLosses:
    """Calls the model with both answers of each pair and returns one loss per pair (B,).

    Args:
        loss: computes the loss from log-probabilities.
    """

    def __init__(self, loss: PairLoss) -> None:
        """Store the loss."""
        self.loss = loss

    def attention(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context without effect: pairs are padded."""
        del model
        return contextlib.nullcontext()

    def after(self, prepare: Callable[[Any], Any]) -> Callable[[Any, Mapping[str, Any]], Tensor]:
        """Return this function on inputs that are prepared first, for instance moved to the model's device."""
        return lambda model, inputs: self(model, prepare(dict(inputs)))

    def __call__(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return the losses (B,) with a graph; each is computed from its own pair.

        Args:
            model: model to call.
            inputs: inputs by `dpllm.data.examples.PairCollator`, on the model's device.
        """
        return self.scored(model, inputs)[0]

    def scored(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the losses (B,), and the rewards (B, 2): β times the log-ratios of the two answers."""
        log_probs_B2 = pair_log_probs(model, inputs, self.loss.tail_weight)
        reference_B2 = inputs[LOG_PROBS].to(log_probs_B2)
        loss_B = self.loss(log_probs_B2, reference_B2, answer_tokens(inputs))
        return loss_B, self.loss.beta * (log_probs_B2.detach() - reference_B2)


def reference_log_probs(
    model: Any,
    dataset: Any,
    collate: PairCollator,
    tail_weight: float | None,
    device: torch.device,
    processes: Processes,
    words: str,
) -> np.ndarray:
    """Return (num_rows, 2): the log-probabilities of both answers of each pair. Called by all processes together.

    Guarantee: the numbers of a pair depend only on that pair and the model; each call of the model has one pair. The
    processes divide the pairs, and each gets all numbers.

    Args:
        model: the reference, unsharded.
        dataset: rows of `dpllm.data.examples.Preferences`.
        collate: makes inputs from rows.
        tail_weight: as for `PairLoss`.
        device: device on which the model runs.
        processes: processes of the run.
        words: name of the data set, for the progress bar.

    Raises:
        ConfigError: the model's parameters are sharded over processes.
        DataError: a number is not finite.
    """
    if any(hasattr(p, "ds_id") or hasattr(p, "placements") for p in model.parameters()):
        raise ConfigError(
            "The reference has parameters that are sharded over processes (ZeRO-3), so no process can compute its "
            "log-probabilities alone. Compute them beforehand in one process, and pass them in the columns "
            "ref_chosen_logps and ref_rejected_logps"
        )
    numbers = np.arange(processes.rank, len(dataset), processes.size)
    found = np.zeros((len(numbers), 2))
    with torch.no_grad(), in_mode(model, training=False), _placed(model, device):
        for place, number in enumerate(tqdm(numbers, f"reference of {words}", disable=not processes.is_main or None)):
            inputs = {name: value.to(device) for name, value in collate([dataset[int(number)]]).items()}
            found[place] = pair_log_probs(model, inputs, tail_weight)[0].double().cpu().numpy()
    whole = np.zeros((len(dataset), 2))
    for rank, share in enumerate(processes.gather(found)):
        whole[rank :: processes.size] = share
    return whole


_TIE = 1e-3  # of log-ratios; sums of many rounded log-probabilities differ by less
_PAIRS = 16  # pairs of a forward pass


class HeldOutPairs:
    """Held-out pairs, and the score that is measured on them.

    Attributes:
        size: number of pairs.

    Args:
        losses: losses of the training.
        rows: pairs whose reference the collator has.
        collator: collator of the rows.
    """

    def __init__(self, losses: PairLosses, rows: Any, collator: PairCollator) -> None:
        """Store the pairs."""
        self._losses, self._rows, self._collator = losses, rows, collator
        self.size = len(rows)

    @torch.no_grad()
    def measure(
        self, model: Any, processes: Processes | None = None, moved: Callable[[int], None] | None = None
    ) -> Measurement:
        """Return the share of pairs whose chosen answer gained more probability than the rejected one, and the loss.

        A pair in which both gained equally counts half, so the model before the training has 0.5.

        Args:
            model: model on its device.
            processes: as for `dpllm.training.evaluation.measure`.
            moved: as for `measure`.
        """

        def score(inputs: dict[str, Any]) -> tuple[float, float]:
            loss_B, rewards_B2 = self._losses.scored(model, inputs)
            margin_B = (rewards_B2[:, 0] - rewards_B2[:, 1]) / self._losses.loss.beta
            hits_B = (margin_B > _TIE).double() + 0.5 * (margin_B.abs() <= _TIE).double()
            return float(loss_B.double().sum()), float(hits_B.sum())

        order = np.argsort([-len(ids) for ids in self._rows["chosen_input_ids"]], kind="stable")
        loss, hits = sums_over(model, self._rows, order, self._collator, score, _PAIRS, processes, moved)
        mean = loss / self.size
        return Measurement(score=PREFERENCE_ACCURACY, value=hits / self.size, loss=mean, row_loss=mean)


@contextlib.contextmanager
def _placed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Place a model on a device for the duration of the block, before an engine that shards it has placed it."""
    before = next(model.parameters()).device
    if before.type != device.type:
        model.to(device)
    try:
        yield
    finally:
        if before.type != device.type:
            model.to(before)
