"""Embeddings: token tables, position tables fed with a (1, T) index, scaled tables, T5's relative position bias.

Row b's gradient of a table is sum_t onehot(index_t) (x) g_t.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.ghost.call import call_with, has_own_forward
from dpllm.ghost.contributions import Lookup
from dpllm.ghost.errors import GhostError, NoRuleError
from dpllm.ghost.tap import Recorder


def refuse_coupled_options(path: str, table: nn.Embedding) -> None:
    """Refuse options of ``nn.Embedding`` under which a row's gradient depends on other rows or is not a plain sum."""
    if table.max_norm is not None:
        raise GhostError(f"{path}: max_norm rewrites the rows of the table that the batch looks up. Set max_norm=None.")
    if table.scale_grad_by_freq:
        raise NoRuleError(
            f"{path}: scale_grad_by_freq divides by counts over the whole batch, so a row's gradient depends on "
            "other rows. Set scale_grad_by_freq=False."
        )


class EmbeddingRule:
    """Taps one embedding table.

    A subclass that overrides ``forward`` (Gemma's scaled table, OPT's positions computed from the mask) is called with
    a table of two columns, the row number and one: the output gives the index and the scale that the module applied.
    """

    def __init__(self, path: str, table: nn.Embedding, trainable: dict[str, nn.Parameter], book: Recorder) -> None:
        """Refuse options that couple rows."""
        if trainable.keys() != {"weight"}:
            raise NoRuleError(f"{path} ({type(table).__name__}) has parameters beside weight: {sorted(trainable)}.")
        refuse_coupled_options(path, table)
        self.path, self.weight, self.book = path, trainable["weight"], book
        self.padding_idx = table.padding_idx
        self.plain = type(table).forward is nn.Embedding.forward and not has_own_forward(table)
        self.verified = False

    def after(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor, rows: int | None) -> Tensor:
        """Tap the output; if the whole batch shares one index row, give every row its own copy of the output.

        An index without rows, such as positions (T,) or distances (T, T), gives a value that all rows share.
        """
        if self.plain:
            index = args[0] if args else kwargs["input"]
            saved = [index]
        elif not isinstance(output, Tensor):
            raise NoRuleError(
                f"{self.path} ({type(module).__name__}) returns {type(output).__name__}, not a tensor of looked up "
                "rows, so its per-row gradient is not known; freeze it."
            )
        else:
            index, scale = self._index_and_scale(module, args, kwargs, output)
            saved = [index, scale]
        entries = self._live(module).shape[0]  # now: a sharded table is whole only while its module runs
        if index.ndim < 2 or (index.ndim == 2 and rows is not None and index.shape[0] not in (1, rows)):
            return self._shared(saved, output, entries)
        if index.shape[0] == 1 and rows is not None and rows > 1:
            output = output.expand(rows, *output.shape[1:])
            saved = [t.expand(rows, *t.shape[1:]) for t in saved]
        return self.book.tap(output, lambda grad, tensors: self.receive(grad, tensors, entries), *saved)

    def _shared(self, saved: list[Tensor], output: Tensor, entries: int) -> Tensor:
        """Return the output as a value that all rows share."""

        def receive(grad_B: Tensor) -> None:
            rows = len(grad_B)
            index_BT, *scale = (t.expand(rows, *t.shape).reshape(rows, saved[0].numel(), -1) for t in saved)
            self.receive(grad_B.reshape(rows, saved[0].numel(), -1), [index_BT[..., 0], *scale], entries)

        return self.book.share(f"{self.path}.weight", output, receive)

    @staticmethod
    def _live(module: nn.Module) -> nn.Parameter:
        return module.get_parameter("weight")

    def _index_and_scale(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> tuple[Tensor, Tensor]:
        """Recover (index (B, T), scale (B, T, 1)) of ``output = scale * weight[index]``."""
        weight = self._live(module)
        entries = weight.shape[0]
        with torch.no_grad():
            number = torch.arange(entries, device=weight.device, dtype=torch.float64)
            probe = torch.stack([number, torch.ones_like(number)], 1)
            try:
                read = call_with(module, {"weight": probe}, args, kwargs)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, TypeError) as error:  # it needs the table's own width
                raise NoRuleError(
                    f"{self.path} ({type(module).__name__}) is not a scaled lookup in its table ({error}); freeze it."
                ) from error
            index = (read[..., 0] / read[..., 1]).round().nan_to_num(-1).long()
            ones = weight.new_ones(entries, 1)
            scale = call_with(module, {"weight": ones}, args, kwargs)
            if index.min() < 0 or index.max() >= entries:
                raise NoRuleError(
                    f"{self.path} ({type(module).__name__}) is not a scaled lookup in its table; freeze it."
                )
            if not self.verified:
                again = (scale * weight[index]).to(output.dtype)
                if again.shape != output.shape or not torch.allclose(
                    again, output, rtol=16 * torch.finfo(output.dtype).eps, atol=1e-12
                ):
                    raise NoRuleError(
                        f"{self.path} ({type(module).__name__}) is not a scaled lookup in its table; freeze it."
                    )
                self.verified = True
        return index, scale

    def receive(self, grad: Tensor, saved: list[Tensor], entries: int) -> None:
        """Record the lookup; the entry at ``padding_idx`` is not trained, as in PyTorch."""
        index_BT = saved[0]
        if index_BT.ndim > 2:
            index_BT, grad = index_BT.flatten(1), grad.flatten(1, -2)
            saved = [index_BT, *(scale.flatten(1, -2) for scale in saved[1:])]
        if not self.plain:
            grad = grad * saved[1]
        if self.padding_idx is not None:
            grad = grad.masked_fill((index_BT == self.padding_idx)[:, :, None], 0)
        index_BT, grad = self.book.by_rows(index_BT[..., None])[..., 0], self.book.by_rows(grad)
        self.book.record(self.weight, Lookup(index_BT, grad, entries))


def gives_relative_bias(module: nn.Module) -> bool:
    """Whether the module is an attention that adds T5's relative position bias from its own table, or a given one."""
    if not isinstance(getattr(module, "relative_attention_bias", None), nn.Embedding):
        return False
    compute_bias: Any = getattr(module, "compute_bias", None)
    try:
        inspect.signature(compute_bias).bind(1, 1, device=None)
    except TypeError:
        return False
    return "position_bias" in inspect.signature(module.forward).parameters


class RelativeBiasRule:
    """Gives T5's attention its position bias with one copy per row.

    The attention computes one (1, heads, Q, K) bias for the whole batch, which has no gradient per row. It also takes
    the bias as an argument (that is how later layers share it); this rule computes the same bias, gives every row its
    own copy of it, and taps the (B, heads, Q, K) result.
    """

    def __init__(self, path: str, attention: nn.Module, trainable: dict[str, nn.Parameter], book: Recorder) -> None:
        """Check the table."""
        (self.weight,) = trainable.values()
        self.path, self.book = path, book
        self.entries = 0
        self.table: nn.Embedding = attention.relative_attention_bias  # type: ignore[assignment]
        refuse_coupled_options(path, self.table)

    def before(self, attention: nn.Module, args: tuple, kwargs: dict, rows: int | None) -> tuple[tuple, dict] | None:
        """Add ``position_bias`` to the arguments if the attention would compute it."""
        if kwargs.get("position_bias") is not None:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        if rows is None or hidden.shape[0] != rows or len(args) > 1 or kwargs.get("key_value_states") is not None:
            raise NoRuleError(
                f"{self.path}: the relative position bias cannot be given to this attention row by row; freeze it."
            )
        caches = (kwargs.get(name) for name in ("cache", "past_key_values"))  # the second before transformers 5.24
        if any(cache is not None and cache.get_seq_length() > 0 for cache in caches):
            raise NoRuleError(f"{self.path}: training with a filled key-value cache. Set use_cache=False.")
        seen: list[Tensor] = []
        compute_bias: Any = attention.compute_bias
        handle = self.table.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            bias = compute_bias(hidden.shape[1], hidden.shape[1], device=hidden.device)
        finally:
            handle.remove()
        (bucket_QK,) = seen
        self.entries = self.table.weight.shape[0]  # now: a sharded table is whole only while its module runs
        bias = bias.expand(rows, *bias.shape[1:])
        if torch.is_grad_enabled():
            bias = self.book.tap(bias, self.receive, bucket_QK)
        return args, {**kwargs, "position_bias": bias}

    def receive(self, grad: Tensor, saved: list[Tensor]) -> None:
        """Record the lookup of one table row per pair of positions."""
        index_BT = saved[0].flatten().expand(grad.shape[0], -1)
        grad_BTH = grad.permute(0, 2, 3, 1).flatten(1, 2)
        self.book.record(self.weight, Lookup(index_BT, grad_BTH, self.entries))
