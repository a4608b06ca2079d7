"""Two checks on the first batch: every use of a parameter is seen, and rows are independent."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.data.labels import BOUNDARIES
from dpllm.ghost import kernels
from dpllm.ghost.contributions import Use
from dpllm.ghost.errors import CoupledError, GhostError, NoRuleError, UnreachedError
from dpllm.ghost.graph import flatten_tensors, leaves_of

_ROW_ARGUMENTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "attention_mask", "pixel_values", "input_features")
_PLACEHOLDER = re.compile(r"(image|video|audio|speech)_token_(id|index)$")


def rows_of_call(args: tuple, kwargs: dict[str, Any]) -> int | None:
    """Return the number of rows in a call of the model: the first dimension of its main input, or first tensor."""
    for named in (kwargs, *(value for value in (*args, *kwargs.values()) if isinstance(value, Mapping))):
        for name in _ROW_ARGUMENTS:
            if isinstance(named.get(name), Tensor):
                return int(named[name].shape[0])
    given = next((value for value in flatten_tensors((*args, *kwargs.values())) if value.ndim > 0), None)
    return None if given is None else given.shape[0]


def tokens_by_themselves(model: nn.Module) -> int | None:
    """Return the tokens up to which a row's position embeddings do not depend on other rows; None: any number.

    Rotary embeddings of the types "dynamic" and "longrope" choose their frequencies by the longest row of the batch
    (transformers, ``modeling_rope_utils.py``): beyond the length that the model was first trained for, a row's loss
    depends on the length of the other rows. No gradient shows that. "dynamic" keeps the frequencies of the longest row
    until a short one comes, so that it depends on earlier batches as well.
    """
    config: Any = getattr(model, "config", None)
    described = config.to_dict() if hasattr(config, "to_dict") else {}
    return min(_rope_limits(described, described.get("max_position_embeddings")), default=None)


def _rope_limits(section: dict, longest: int | None) -> Iterator[int]:
    longest = section.get("max_position_embeddings", longest)
    kind = str(section.get("rope_type", section.get("type", "")))
    if "dynamic" in kind or kind == "longrope":
        yield section.get("original_max_position_embeddings") or longest or 0
    for value in section.values():
        if isinstance(value, dict):
            yield from _rope_limits(value, longest)


def refuse_long_rows(longest: int, most: int | None) -> None:
    """Raise `GhostError` for rows of more tokens than `tokens_by_themselves` allows."""
    if most is not None and longest > most:
        raise GhostError(
            f"Rows of {longest} tokens: beyond {most} this model chooses its position embeddings by the longest row of "
            "the batch, or of a batch before (dynamic or longrope), so that a row's loss depends on the others. Set "
            f"data.max_length={most}, or another rope type."
        )


def placeholders_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ids of the tokens in whose places a model puts what it computed of images or sound."""
    config: Any = getattr(model, "config", None)
    described = config.to_dict() if hasattr(config, "to_dict") else {}
    return tuple(
        sorted({token for name, token in described.items() if _PLACEHOLDER.match(name) and type(token) is int})
    )


def refuse_shared_media(kwargs: Mapping[str, Any], placeholders: Sequence[int]) -> None:
    """Raise `GhostError` where a row may take another's image: features fill the placeholders of all rows in order.

    The models compare the number of features with that of placeholders over the whole batch only (``masked_scatter`` in
    transformers), so a row with too few passes on what is left of its image to the next.
    """
    ids = kwargs.get("input_ids")
    media = [value for value in kwargs.values() if _is_media(value)]
    if not placeholders or not isinstance(ids, Tensor) or not media:
        return
    places_B = torch.isin(ids, torch.tensor(placeholders, device=ids.device)).sum(dim=1)
    # Some models leave out images of zeros, which pad a row with fewer images than another (B, images, C, H, W).
    images_B = [(value != 0).flatten(2).any(dim=2).sum(dim=1) for value in media if value.ndim > 4]
    if any(bool((count_B != count_B[0]).any()) for count_B in (places_B, *images_B)):
        raise GhostError(
            "The rows of a call have different numbers of images, or of tokens that stand for images or sound: "
            f"{int(places_B.min())} to {int(places_B.max())} tokens. The model puts features in their places in the "
            "order of the rows, so a row could take the image of another unit. Give all rows as many (a fixed size: no "
            "splitting of images in the processor), or train one unit at a time (privacy.gradients=per_unit)."
        )


def _is_media(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.ndim > 2 or (value.ndim == 2 and value.is_floating_point()))


def refuse_other_rows(name: str, shape: Sequence[int], num_rows: int, packed: bool) -> None:
    """Raise `GhostError` where a use of the parameter ``name`` has another number of rows than the losses."""
    if shape[0] == num_rows:
        return
    if packed:
        raise NoRuleError(
            f"{name}: a module that uses it works on {tuple(shape)}, which cannot be cut into the packed rows. Freeze "
            "the parameter, or do not pack the rows (pack_rows: false)."
        )
    raise NoRuleError(
        f"{name}: a module that uses it works on {shape[0]} rows, the losses on {num_rows}. Every module with "
        "trainable parameters has to keep the rows of the batch as its first dimension, and all calls of the model "
        "that a loss is computed from need the same rows. Or freeze these parameters."
    )


def unmeasured_spread() -> GhostError:
    """Return the error for a packed unit that is not finite and may have reached other units."""
    return GhostError(
        "A unit's gradient is not finite, and it was not measured that such values stay within their packed row: they "
        "may have reached other units. Call GhostClipper.check_rows() before the first step, or do not pack the rows "
        "(pack_rows: false)."
    )


def unmeasured_function() -> GhostError:
    """Return the error for a function of parameters that a recomputed module called for the first time."""
    return NoRuleError(
        "A module that activation checkpointing recomputes used a parameter in a function that no earlier pass had, so "
        "it was not measured that its rows are independent. Set use_reentrant=False."
    )


def refuse_missing(parameters: Mapping[str, nn.Parameter], seen: Collection[int]) -> None:
    """Raise `GhostError` for a trainable parameter that is not among the ids of those that received a gradient."""
    missing = [name for name, p in parameters.items() if id(p) not in seen]
    if missing:
        raise no_gradient(missing)


def no_gradient(missing: Sequence[str]) -> UnreachedError:
    """Return the error for trainable parameters that no loss reaches."""
    return UnreachedError(
        f"No gradient reached {len(missing)} trainable parameter(s), the first is {missing[0]}. Either it has no "
        "part in the loss (then freeze it: privacy.unused_parameters=freeze, or requires_grad_(False)), or only some "
        "rows use it (then privacy.gradients=per_unit), or activation checkpointing with use_reentrant=True cut the "
        "graph (then call model.enable_input_require_grads() or set use_reentrant=False)."
    )


def refuse_others(model: nn.Module, known: Collection[int]) -> None:
    """Raise `GhostError` for a trainable parameter of the model whose id is not among the known ones."""
    if not _has_others(model, known):  # names take most of the time of this check, and an error alone needs them
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise GhostError(
                f"{name} was unfrozen or added after GhostClipper was made: its gradient would be neither clipped nor "
                "given noise. Set requires_grad of all parameters before, or call remove() and make another "
                "GhostClipper, which clips all of them together"
            )


def _has_others(model: nn.Module, known: Collection[int]) -> bool:
    """Whether a parameter of a module within the model is trainable and not known."""
    modules, seen = [model], {id(model)}
    for module in modules:  # grows
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in known:
                return True
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return False


def refuse_outside(loss_B: Tensor, known: Collection[int]) -> None:
    """Raise `GhostError` for a trainable parameter behind the losses whose id is not among the known ones.

    Other leaf tensors are allowed: the output of a frozen embedding is one where activations are recomputed.

    Args:
        loss_B: (B,) losses with a graph.
        known: the ids of the parameters that are clipped.
    """
    for leaf in leaves_of(loss_B):
        if isinstance(leaf, nn.Parameter) and leaf.requires_grad and id(leaf) not in known:
            raise GhostError(
                f"The losses depend on a trainable parameter of shape {tuple(leaf.shape)} that the model given to "
                "GhostClipper does not hold: its gradient would be neither clipped nor given noise. Make it a part of "
                "that model, or freeze it (requires_grad_(False)); compute a reference model's output in "
                "torch.no_grad()"
            )


def refuse_uses_in_loss(loss_B: Tensor, name_of: Callable[[nn.Parameter], str | None]) -> None:
    """Raise `GhostError` for a trainable parameter that the losses use where no rule sees it.

    While a rule applies to a parameter, the parameter is out of autograd. A graph that leads to it therefore contains
    another use: in the loss, or by an operation inside the model that is no function of PyTorch's. Its gradient would
    be missing from norm and sum.

    Args:
        loss_B: (B,) losses with a graph.
        name_of: returns the name of a trainable parameter, None for any other.
    """
    for leaf in leaves_of(loss_B):
        name = name_of(leaf) if isinstance(leaf, nn.Parameter) else None
        if name is not None:
            raise NoRuleError(
                f"{name} is used by the loss outside the model's call, or by an operation within it that cannot be "
                "seen (a kernel of a library, a torch.autograd.Function or compiled code), so its per-row gradient is "
                "not known. Move the computation into the forward pass of the model, let the model run without that "
                "kernel, or freeze the parameter."
            )


def probed_rows(real_B: Tensor, packed: bool) -> list[Tensor]:
    """Return the sets of rows whose losses are differentiated for the check, each as row numbers.

    Unpacked: the first row and the last row. Packed: every other row, then the remaining ones. A dependence across a
    boundary goes from one set to the other, so every boundary of the microbatch is tested. The third set is the last
    row: a dependence that skips a whole row reaches it as well.

    Args:
        real_B: (B,) true for rows that are not padding.
        packed: whether the rows were laid end to end.
    """
    (real,) = torch.nonzero(real_B, as_tuple=True)
    if real.numel() == 0:
        real = real.new_zeros(1)
    return [real[::2], real[1::2], real[-1:]] if packed else [real[:1], real[-1:]]


class RowProbe:
    """Receives the gradients of some rows' losses; any gradient in another row is an error."""

    def __init__(self, rows: Tensor, packed: bool) -> None:
        """Remember the rows to probe."""
        self.rows, self._packed = rows, packed
        self.finite_B: Tensor | None = None  # rows that received only finite values

    def take(self, name: str, parameter: nn.Parameter, use: Use) -> None:
        """Check the gradient that one use of a parameter received."""
        others = kernels.entries(use.grad.detach()).clone()
        if self._packed:
            finite_B = torch.isfinite(others).all(1)
            self.finite_B = finite_B if self.finite_B is None else self.finite_B & finite_B
        others[self.rows] = 0
        touched = (torch.isfinite(others) & (others != 0)).any(1)
        if not bool(touched.any()):
            return
        other = int(torch.nonzero(touched)[0])
        if self._packed:
            raise CoupledError(
                f"A packed row's loss depends on the packed row {other} (seen at {name}), so a unit cannot "
                "be bounded: something in the model mixes tokens across the end of a row. Do not pack the "
                f"rows of this model (pack_rows: false), or give it an attention that reads {BOUNDARIES}."
            )
        raise CoupledError(
            f"The loss of row {int(self.rows[0])} depends on row {other} of the batch (seen at {name}), so a unit "
            "cannot be bounded. Remove the parts that couple rows: batch statistics, in-batch negatives, several "
            "units packed into one row, a loss normalised over the batch."
        )


class SpreadProbe:
    """Receives the gradients of packed rows of which some were made NaN; any such value in another row is an error.

    A gradient does not show such a path: attention that multiplies masked values by zero separates finite rows, but
    0 * NaN is NaN, and one unit that overflows would remove all its neighbours from the sum.
    """

    def __init__(self, poisoned_B: Tensor, finite_B: Tensor) -> None:
        """Remember which rows (B,) are NaN, and which are not finite by themselves."""
        self.poisoned_B, self.healthy_B = poisoned_B, finite_B & ~poisoned_B

    def take(self, name: str, parameter: nn.Parameter, use: Use) -> None:
        """Check the gradient that one use of a parameter received."""
        if not bool(torch.isfinite(kernels.entries(use.grad.detach())[self.healthy_B]).all()):
            raise GhostError(
                f"A value that is not finite reaches other packed rows (seen at {name}): the attention masks by "
                "multiplying with zero, so one unit that overflows would change the contributions of the others. Use "
                "an attention that runs each row separately (dpllm.models.packing, flash_attention_2), or do not pack "
                "the rows (pack_rows: false)."
            )
