"""Trainable parameters that no loss reaches: named and, on request, frozen.

Place in the flow: before the optimizer is made. Such parameters take no part in the loss, so noise alone would train
them: the pooler of BigBird, the encoder's embeddings of a decoder that is used alone. Whether a loss reaches a
parameter is read from the graph of autograd behind losses of made-up rows (`dpllm.training.made_up`). Neither the
values of private rows nor those of gradients take part, so the frozen names can be stated.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from dpllm.config.values import ConfigError
from dpllm.ghost.graph import leaves_of
from dpllm.training.made_up import NotMadeUp, in_mode, made_up
from dpllm.training.rows import LossOf, TrainingRows

FROZEN = "trainable parameters that no loss reaches, and that were frozen"
"""The ledger's fact of that name."""
_LENGTHS, _MICROBATCHES = (48, 17), 4


def unused(model: nn.Module, rows: TrainingRows, loss_of: LossOf) -> list[str]:
    """Return the names of the trainable parameters that losses of rows that are made up do not reach.

    Args:
        model: the module that computes the losses.
        rows: rows of the run.
        loss_of: called with the model and the inputs of rows that are made up.

    Raises:
        NotMadeUp: such rows cannot be made up.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    reached: set[int] = set()
    # Evaluation mode first: it skips no layer at random, and activations are not recomputed.
    for training in (False, True):
        with in_mode(model, training):
            for number in range(_MICROBATCHES):
                reached.update(map(id, leaves_of(loss_of(model, made_up(rows, model, _LENGTHS, number)))))
        if all(id(p) in reached for p in trainable.values()):
            return []
    return [name for name, p in trainable.items() if id(p) not in reached]


def freeze_unused(model: nn.Module, rows: TrainingRows, loss_of: LossOf) -> list[str]:
    """Freeze the trainable parameters that losses do not reach; see `dpllm.training.run.PrivateRun.freeze_unused`.

    Args:
        model: the module that computes the losses, before it is distributed.
        rows: rows of the run.
        loss_of: called with the model and the inputs of rows that are made up.

    Returns:
        Their names.

    Raises:
        ConfigError: the parameters are sharded, rows cannot be made up, or losses reach no parameter at all.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in trainable.values()):
        raise ConfigError(
            "privacy.unused_parameters=freeze runs the model before it is distributed, and its parameters are sharded "
            "already. Freeze them by hand (requires_grad_(False))"
        )
    try:
        names = unused(model, rows, loss_of)
    except NotMadeUp as error:
        raise ConfigError(
            f"privacy.unused_parameters=freeze needs rows that are made up, and {error}. Freeze the parameters that "
            "the error of privacy.unused_parameters=error names, by hand (requires_grad_(False))"
        ) from error
    if names and len(names) == len(trainable):
        raise ConfigError(
            "The losses of made-up rows reach no trainable parameter, so privacy.unused_parameters=freeze would freeze "
            "all of them. Compute the losses with gradients on, from the model"
        )
    for name in names:
        trainable[name].requires_grad_(False)
    return names


def in_parts(names: list[str], most: int = 4000) -> Iterator[str]:
    """Yield the names, comma by comma, in texts of limited length for the ledger."""
    part = ""
    for name in names:
        if part and len(part) + len(name) > most:
            yield part
            part = ""
        part = f"{part}, {name}" if part else name
    if part:
        yield part
