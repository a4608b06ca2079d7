"""Compute the losses of a microbatch's rows from the model's inputs.

`dpllm.DPTrainer` makes the object, and `dpllm.training.run.PrivateRun.step` calls it for each microbatch.

A causal language model's token losses are computed with its head in chunks (`dpllm.ghost.chunked_head`), where that is
possible. The model is called as usual, so that hooks of engines and wrappers run. During the call, the forward function
of its head is replaced by one that computes the losses from the hidden states and returns them instead of the logits.

The model's use of its logits is read from its configuration and compared once with the model itself. Where it
differs, and for a head that is not a plain linear layer, the model computes all logits, and the log says why.

Shape suffixes: B rows, T tokens, D width of a hidden state, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpllm.config.recipe import HEADS
from dpllm.config.values import choice
from dpllm.data.labels import BOUNDARIES
from dpllm.ghost import GhostClipper
from dpllm.ghost.attach import is_linear
from dpllm.ghost.chunked_head import LogitFormula, token_losses
from dpllm.ghost.parameters import logits_outweigh
from dpllm.ghost.refusals import is_shortage
from dpllm.ghost.taps import subclass
from dpllm.models.inputs import attention_by_row
from dpllm.models.losses import (
    next_packed_tokens,
    next_tokens,
    packed_row_means,
    packed_sequence_loss,
    row_means,
    take_labels,
)
from dpllm.models.tasks import RowLoss, task_of
from dpllm.training.choose_clipper import in_mode

_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
_COMPARED, _LARGE = 64, 32.0  # synthetic hidden states; they are also compared at that multiple, where a cap shows
logger = logging.getLogger(__name__)


def formula_of(config: Any) -> LogitFormula:
    """Return the factor and the cap that a model's configuration sets for its logits.

    >>> import types
    >>> formula_of(types.SimpleNamespace(logits_scaling=8.0, final_logit_softcapping=30.0))
    LogitFormula(scale=0.125, cap=30.0, smoothing=0.0)
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def numbers(names: tuple[str, ...]) -> list[float]:
        values = (getattr(config, name, None) for name in names)
        return [float(x) for x in values if isinstance(x, int | float) and not isinstance(x, bool) and x]

    scale = math.prod(numbers(_FACTORS)) / math.prod(numbers(_DIVISORS))
    return LogitFormula(scale, next(iter(numbers(_CAPS)), None))


class HeadLosses:
    """Calls a causal language model and computes the losses of its tokens in chunks of the head, where it can.

    Args:
        mode: "auto": in chunks for a head that is not trained, which costs nothing; and for a trained one under
            activation checkpointing where the logits outweigh the stored part of the blocks (see
            `dpllm.ghost.parameters.logits_outweigh`). "chunks": every trained head, whose logits are then computed
            twice. "whole": never.
        has_prompt: whether the model prepends the tokens of a soft prompt to those of a row.

    Attributes:
        clipper: computes the gradient of a trained head in the backward pass. None: trained heads stay whole.

    Raises:
        ConfigError: the mode is unknown.
    """

    def __init__(self, mode: str = "auto", has_prompt: bool = False) -> None:
        """Store the arguments; no model has been compared yet."""
        choice("head", mode, HEADS)
        self._mode, self._has_prompt = mode, has_prompt
        self.clipper: GhostClipper | None = None
        self._compared: weakref.WeakKeyDictionary[nn.Module, LogitFormula | str] = weakref.WeakKeyDictionary()
        self._logged: set[str] = set()

    def __call__(self, model: Any, inputs: Mapping[str, Any], target_BT: Tensor) -> tuple[Any, Tensor | None]:
        """Call the model.

        Args:
            model: the model, PEFT-wrapped or not.
            inputs: its inputs, without labels.
            target_BT: the target of each position, -100 where there is none.

        Returns:
            The model's output and the losses (B, T). Without losses, the output has all logits.

        Raises:
            ValueError: the labels are not as long as the input.
        """
        clipper = self.clipper if torch.is_grad_enabled() else None
        if clipper is not None:
            clipper.prepare(inputs)
        formula = "model.head is whole" if self._mode == "whole" else self._formula(model, inputs)
        if isinstance(formula, str):
            self._log(f"all logits exist: {formula}")
            return model(**inputs), None
        self._log("the losses are computed in chunks of the head")
        table = _table_of(model)

        def losses_of(head: Any, hidden_BTD: Tensor) -> Tensor:
            hidden_BTD = hidden_BTD[:, -target_BT.shape[1] :] if self._has_prompt else hidden_BTD
            target = target_BT[: len(hidden_BTD)]  # a clipper tries its taps on a few rows of its first call
            if hidden_BTD.shape[:2] != target.shape:
                raise ValueError(
                    f"The head reads hidden states {tuple(hidden_BTD.shape)}, but the labels are "
                    f"{tuple(target_BT.shape)}. Labels must be as long as the input and the logits."
                )
            index_BT = inputs.get("input_ids") if table is head.weight else None
            for parameter in _trained(head):
                assert clipper is not None, "a trained head has a clipper"
                clipper.expect(parameter)
            return token_losses(
                hidden_BTD, target, head.weight, head.bias, formula, None if clipper is None else clipper.take, index_BT
            )[..., None]

        with _replaced_head(model, losses_of) as returned:
            outputs = model(**inputs)
        loss_BT = returned[-1][..., 0]
        # Engines gather weights for the backward pass when a gradient reaches the model's output.
        return outputs, _Joined.apply(loss_BT, outputs.logits) if outputs.logits.requires_grad else loss_BT

    def _log(self, words: str) -> None:
        if words not in self._logged:
            self._logged.add(words)
            logger.info("Head: %s", words)

    def _formula(self, model: Any, inputs: Mapping[str, Any]) -> LogitFormula | str:
        """Return the formula of a model whose head is computed in chunks, or why it is computed whole."""
        head = _head_of(model)
        if not isinstance(head, nn.Linear) or not is_linear(head):
            return "the model's head is not a plain linear layer"
        hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
        if "forward" in vars(head) or any(hooks):
            return "the head has hooks or its own forward function"
        if _trained(head) and (why := self._whole_if_trained(model, head, inputs)):
            return why
        if model not in self._compared:
            self._compared[model] = _compare(model, inputs)
        return self._compared[model]

    def _whole_if_trained(self, model: Any, head: Any, inputs: Mapping[str, Any]) -> str | None:
        clipper, config = self.clipper, _inside(model).config
        if clipper is None:
            return "the head is trained, and its gradient per unit is computed from all logits"
        if BOUNDARIES in inputs:
            return "the head is trained, and rows are packed"
        if not clipper.takes_uses:
            return "the head is trained, and the model is sharded, or modules run row by row"
        if self._mode == "auto":
            config = config.get_text_config() if hasattr(config, "get_text_config") else config
            (vocabulary, width), layers = head.weight.shape, getattr(config, "num_hidden_layers", math.inf)
            if not (clipper.recomputes and logits_outweigh(vocabulary, width, layers)):
                return "the head is trained, and chunks would compute its logits twice"
        return None


def _trained(head: Any) -> list[nn.Parameter]:
    """Return the parameters of a head that get a gradient."""
    parameters = (head.weight, head.bias) if torch.is_grad_enabled() else ()
    return [p for p in parameters if p is not None and p.requires_grad]


def _inside(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _head_of(model: Any) -> Any:
    try:
        return _inside(model).get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _table_of(model: Any) -> Any:
    try:
        return getattr(_inside(model).get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):
        return None


def _forward(head: Any, hidden_BTD: Tensor) -> Tensor:
    """Compute what a head computes within `_replaced_head`."""
    function, returned = head._tap_head
    returned.append(function(head, hidden_BTD))
    return returned[-1]


@contextlib.contextmanager
def _replaced_head(model: Any, function: Callable[[Any, Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """Temporarily give a model's head a subclass that computes something else; yield the list of its results.

    Raises:
        RuntimeError: the model does not call its head, or, without gradients, more than once.
    """
    returned: list[Tensor] = []
    head = _head_of(model)
    kind = type(head)
    head.__class__ = subclass(kind, "chunked_head", forward=_forward)
    head.__dict__["_tap_head"] = function, returned
    try:
        yield returned
    finally:
        head.__class__ = kind
        del head.__dict__["_tap_head"]
    if not returned or (len(returned) > 1 and not torch.is_grad_enabled()):  # a clipper may call the model before
        raise RuntimeError(f"the model calls its head {len(returned)} times. Set model.head: whole")


def _compare(model: Any, inputs: Mapping[str, Any]) -> LogitFormula | str:
    """Return the formula whose losses equal those of the model's own logits, or how the two differ.

    Hidden states and labels are synthetic, so the decision and the log depend on no row. Then one number per token
    replaces the logits, as the losses do later.
    """
    formulas = list(dict.fromkeys([formula_of(_inside(model).config), LogitFormula()]))
    targets: list[Tensor] = []
    losses: list[Tensor] = []

    def logits_of(head: Any, hidden_BTD: Tensor) -> Tensor:
        width = hidden_BTD.shape[-1]
        few = torch.arange(_COMPARED * width, device=hidden_BTD.device).sin().view(1, -1, width)
        few = torch.cat([few, _LARGE * few], 1).to(hidden_BTD.dtype)
        targets.append(torch.arange(few.shape[1], device=few.device)[None] * 7919 % len(head.weight))
        losses.extend(token_losses(few, targets[0], head.weight, head.bias, one)[0] for one in formulas)
        return F.linear(few, head.weight, head.bias)

    try:
        with in_mode(model, training=False), torch.no_grad():
            with _replaced_head(model, logits_of) as products:
                outputs = model(**inputs)
            whole = outputs.logits[0].to(losses[0].dtype)
            expected = F.cross_entropy(whole, targets[0][0], reduction="none")
            errors = [float((expected - one).abs().max() / (1 + whole.abs().max())) for one in losses]
            with _replaced_head(model, lambda _, hidden_BTD: hidden_BTD[..., :1]) as numbers:
                small = model(**inputs)
            if small.logits.shape != numbers[-1].shape:
                return "the model's output and its head's output have different shapes"
    except Exception as raised:  # from the model's own code; the ordinary call also raises a mistake in the inputs
        if is_shortage(raised):
            raise
        return f"the model's logits cannot be replaced ({type(raised).__name__})"
    tolerance = math.sqrt(max(torch.finfo(one.dtype).eps for one in (products[-1], outputs.logits)))
    for formula, error in zip(formulas, errors, strict=True):
        if error <= tolerance:
            return formula
    return f"{type(_inside(model)).__name__} computes them differently (relative difference {errors[0]:.1e})"


class _Joined(torch.autograd.Function):
    """The losses, with an edge to the model's output through which zeros flow back."""

    @staticmethod
    def forward(ctx: Any, loss_BT: Tensor, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return loss_BT.view_as(loss_BT)

    @staticmethod
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor, Tensor]:
        (output,) = ctx.saved_tensors
        return grad_BT, torch.zeros_like(output)


# -------------------------------------------------------------------------------------------- losses of all rows


def _is_decoded(model: Any) -> bool:
    """Return whether the labels are the text that a decoder writes, not the classes of a classifier on top of it."""
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(is_encoder_decoder) and task_of(model) in (None, "seq2seq_lm")


class RowLosses:
    """Runs the model on a microbatch and returns one loss per row (B,), each computed only from its own row.

    Args:
        row_loss: ``(outputs, labels) -> (B,)``; not used for packed rows.
        packed: whether rows are concatenated without padding.
        head: computes the losses of a causal language model's tokens without all logits, where it can; ``row_loss`` is
            then their mean. None: the model computes all logits.
    """

    def __init__(self, row_loss: RowLoss, packed: bool, head: HeadLosses | None = None) -> None:
        """Store the loss and the layout."""
        self._row_loss, self._packed, self._head = row_loss, packed, head
        self.__wrapped__ = row_loss  # for checks of the user's function

    def attention(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model's attention processes packed rows separately."""
        return attention_by_row(model) if self._packed else contextlib.nullcontext()

    def after(self, prepare: Callable[[Any], Any]) -> Callable[[Any, Mapping[str, Any]], Tensor]:
        """Return this function on inputs that are prepared first, for instance moved to the model's device."""
        return functools.partial(self, prepare=prepare)

    def __call__(
        self, model: Any, inputs: Mapping[str, Any], prepare: Callable[[Any], Mapping[str, Any]] | None = None
    ) -> Tensor:
        """Return the losses (B,) with a graph.

        Args:
            model: the model to run.
            inputs: the collator's result, with labels; on the model's device, or anywhere, as tensors or arrays, with
                ``prepare``.
            prepare: see `after`.
        """
        if prepare is not None:
            inputs = prepare({n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in inputs.items()})
        inputs = dict(inputs)
        labels = take_labels(inputs)
        bounds = inputs[BOUNDARIES] if self._packed else None
        if self._head is not None:
            target = next_tokens(labels) if bounds is None else next_packed_tokens(labels, bounds)
            outputs, loss_BT = self._head(model, inputs, target)
            if loss_BT is not None:
                return row_means(loss_BT, target) if bounds is None else packed_row_means(loss_BT, target, bounds)
        else:
            if bounds is None and "decoder_input_ids" not in inputs and _is_decoded(model):
                shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)  # M2M100 shifts labels itself
                inputs.update({"labels": labels} if shift is None else {"decoder_input_ids": shift(labels)})
            outputs = model(**inputs)
        if bounds is not None:
            return packed_sequence_loss(outputs.logits, labels, bounds)
        return self._row_loss(outputs, labels)
