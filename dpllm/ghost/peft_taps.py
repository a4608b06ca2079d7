"""Taps for PEFT layers with their own way of using a trained parameter.

Without them the layers run row by row, which costs one launch per row and does not work for packed rows. A layer runs
PEFT's own forward with the parameter detached, and a tap adds the parameter's gradient. LoRA layers would not need
their own tap, but one tap for both factors costs the host half as much as two. Whether a tap is exact is checked by
value (`dpllm.ghost.weights_check`).

Sources: PEFT's ``peft_model.py``, and under ``tuners/`` ``lora/dora.py`` and the ``layer.py`` of ``lora``,
``ia3``, ``vera`` and ``trainable_tokens``. Classes are recognised by name: PEFT need not be installed.

Shape suffixes: B rows, T tokens, N entries.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpllm.ghost import kernels
from dpllm.ghost.taps import (
    AUTOCAST,
    LINEAR,
    Call,
    Hand,
    LinearSite,
    Site,
    SpreadSite,
    TableSite,
    TapLinear,
    Target,
    active,
    apply_of,
    is_hooked,
    saved_by,
    subclass,
    tap_output,
)

_OF_VERA = ("vera_lambda_b", "vera_lambda_d")
_any_global_hook: Callable[[], bool] = nn.modules.module._has_any_global_hook  # a module's own call checks it, too
_CASTS = (Tensor.to, Tensor.type, Tensor.float)


def tap(module: Any, trained: Callable[[Any], Target | None]) -> tuple[type[nn.Module], dict[str, Site]] | None:
    """Return the subclass of a PEFT layer, and the sites of the parameters that it uses; None if there is no tap.

    ``trained`` returns the target of a trained parameter, and None for any other value.
    """
    kind = type(module)
    way = "prompts" if hasattr(module, "get_prompt") else _LAYERS.get(f"{kind.__module__}.{kind.__name__}")
    if way is None or not kind.__module__.startswith("peft.") or "forward" in vars(module):
        return None
    method, function, sites_of = _WAYS[way]
    sites: dict[str, Site] | None = sites_of(module, trained)
    if sites is None:
        return None

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call PEFT's method, tapped during a call of the model."""
        peft = getattr(kind, method)
        if getattr(self, "disable_adapters", None) is True or not torch.is_grad_enabled():
            return peft(self, *args, **kwargs)
        call = None if torch.compiler.is_compiling() else active(self)
        return peft(self, *args, **kwargs) if call is None else function(self, call, peft, *args, **kwargs)

    def lora(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call PEFT's forward, with one tap for both factors if they compute s B A x and nothing else."""
        pair = None if args or kwargs or torch.compiler.is_compiling() else _pair_of(self, x)
        call = None if pair is None else active(self)
        if pair is None or call is None:
            return getattr(kind, method)(self, x, *args, **kwargs)
        return _lora(self, call, pair, x)

    return subclass(kind, way, None, **{method: lora if way == "lora" else run}), sites


class _LoraTap(torch.autograd.Function):
    """y = y' + s B A x, which records x, A x and the gradients of A x and B A x."""

    @staticmethod
    def forward(
        ctx: Any,
        base: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        anchor: Tensor,
        hand: Hand,
        low_site: LinearSite,
        scaling: float,
    ) -> Tensor:
        low = LINEAR(x, a)
        ctx.hand, ctx.low_site, ctx.scaling = hand, low_site, scaling
        ctx.save_for_backward(x, low, a, b)
        return (base + LINEAR(low, b) * scaling).to(base.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, low, a, b = saved_by(ctx)
        grad_high = grad.to(low.dtype) * ctx.scaling
        grad_low = grad_high @ b
        grad_x = grad_low @ a if ctx.needs_input_grad[1] else None
        ctx.hand.receive(ctx.hand, grad_high, low)
        ctx.low_site.receive(ctx.hand, grad_low, x)
        return grad if ctx.needs_input_grad[0] else None, grad_x, None, None, None, None, None, None


_lora_tap = apply_of(_LoraTap)


class _Pair(NamedTuple):
    """A LoRA layer's factors, with their detached weights, and the dropout before them, if any."""

    low: Any
    high: Any
    a: Tensor
    b: Tensor
    dropout: Any
    scaling: float


def _pair_of(self: Any, x: Tensor) -> _Pair | None:
    """Return the factors of a layer whose output is W x + s B A x; None: PEFT computes more, or hooks run in it.

    This is checked in each call, since hooks, adapters and scales may change.
    """
    layers, names = self._modules, self.active_adapters  # `nn.Module.__getattr__` would be slow
    lows, highs = layers["lora_A"]._modules, layers["lora_B"]._modules
    name = names[0] if len(names) == 1 else None
    if name not in lows or not torch.is_grad_enabled() or self.disable_adapters or self.merged or _any_global_hook():
        return None
    if name in self.lora_variant or type(scaling := self.scaling[name]) not in (float, int):
        return None
    low, high, dropout = lows[name], highs[name], layers["lora_dropout"]._modules[name]
    if not (_is_plain(low) and _is_plain(high)):
        return None
    a, b = low._parameters["weight"].detach(), high._parameters["weight"].detach()
    if type(dropout) is nn.Identity and not is_hooked(dropout):
        dropout = None
    elif type(dropout) is nn.Identity:
        return None
    is_cast = getattr(self, "cast_input_dtype_enabled", True) or x.dtype == a.dtype
    return _Pair(low, high, a, b, dropout, scaling) if is_cast and a.dtype == b.dtype else None


def _is_plain(layer: Any) -> bool:
    """Return whether a layer computes only x W^T with its own tap."""
    if type(layer).forward is not TapLinear.forward or is_hooked(layer) or "weight" not in layer._parameters:
        return False
    return layer._parameters["bias"] is None and layer._tap_site.serves(layer._parameters["weight"], None)


def _lora(self: Any, call: Call, pair: _Pair, x: Tensor) -> Tensor:
    """Compute y = W x + s B A x with one tap for A and B, in the dtypes of PEFT and autocast."""
    site_a, site_b, a, b = pair.low._tap_site, pair.high._tap_site, pair.a, pair.b
    base, dtype = self._modules["base_layer"](x), a.dtype
    target = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else dtype
    # A cast to float32 and then to the autocast dtype changes nothing that the second cast would not.
    is_direct = pair.dropout is None and dtype == torch.float32 and x.dtype in (torch.float32, target)
    if x.dtype != dtype and not is_direct:
        x = x.to(dtype)  # not shared with other layers: a dropout may write to it
    if pair.dropout is not None:
        x = pair.dropout(x)
    if target != dtype and x.dtype in AUTOCAST:
        call.autocast, a, b = target, a.to(target), b.to(target)
        x = x if x.dtype == target else call.cast(x, target)
    elif x.dtype != dtype:
        x = x.to(dtype)
    call.count(site_a.weight, site_b.weight)
    if x.shape[0] != call.rows:
        call.note(x.shape, site_a.weight, site_b.weight)

    y: Tensor = _lora_tap(base, x, a, b, call.anchor, Hand(call, site_b.receive), site_a, pair.scaling)
    return call.poison(y)


@contextlib.contextmanager
def _holding(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Temporarily replace a module's parameter by a value."""
    module.__dict__[name] = value
    try:
        yield
    finally:
        del module.__dict__[name]


def _prompts(self: Any, call: Call, peft: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
    """Compute one prompt per row, where PEFT computes a single one and repeats it.

    The encoder's table looks up the prompt's tokens once per row (`TableSite`), so PEFT has nothing to repeat.
    """
    kind = str(getattr(self.active_peft_config.peft_type, "value", ""))
    if kind not in ("PROMPT_TUNING", "P_TUNING") or batch_size != call.rows_together:
        return peft(self, batch_size, *args, **kwargs)
    prompt = peft(self, 1, *args, **kwargs)
    return prompt if len(prompt) == batch_size else prompt.repeat(batch_size, 1, 1)


def _dora(self: Any, call: Call, peft: Any, x: Tensor, **kwargs: Any) -> Tensor:
    """Tap y = (m / n) u - W x, in which n is a constant and u = W x + s B A x: dy / dm = (y + W x) / m.

    It is NaN for m = 0, so that the layer must run row by row.
    """
    bias, site = getattr(kwargs["base_layer"], "bias", None), self._tap_sites["weight"]
    if kwargs.get("base_result") is None:  # with dropout, W x is that of the dropped input
        # Code that creates such a layer has loaded PEFT; this folder does not import it.
        dequantized = sys.modules["peft.utils.integrations"].dequantize_module_weight
        weight = dequantized(kwargs["base_layer"]).to(x.dtype)
        base = LINEAR(x, weight.T if self.fan_in_fan_out else weight)
        kwargs["base_result"] = base if bias is None else base + bias
    m = self._parameters["weight"].detach()
    with _holding(self, "weight", m):
        y = peft(self, x, **kwargs)
    with torch.no_grad():
        slope = (y + kwargs["base_result"] - (0 if bias is None else bias)) / m
    call.count(site.weight)
    return tap_output(
        call, y, lambda hand, grad, saved: site.receive(hand, kernels.widen(grad) * kernels.widen(saved[0])), slope
    )


def _ia3(self: Any, call: Call, peft: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Multiply the input's or output's features by one copy of the vector per row."""
    names = [name for name in self.active_adapters if name in self.ia3_l]
    if self.merged or len(names) != 1 or names[0] not in self._tap_sites:
        return peft(self, x, *args, **kwargs)
    vector, site = self.ia3_l[names[0]], self._tap_sites[names[0]]
    if self.is_feedforward:
        x = (x.to(vector.dtype) * site.read(call, vector.flatten(), x.shape)).to(x.dtype)
        return self.base_layer(x, *args, **kwargs)
    y = self.base_layer(x, *args, **kwargs)
    return (y * site.read(call, vector.flatten(), y.shape)).to(y.dtype)


def _vera(self: Any, call: Call, peft: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Give PEFT one copy of each vector per row, in place of the vectors."""
    with contextlib.ExitStack() as held:
        for place in _OF_VERA:
            vectors = dict(getattr(self, place).items())
            own = {name: site for name in vectors if (site := self._tap_sites.get(f"{place}.{name}")) is not None}
            copies = {name: site.read(call, vectors[name], x.shape) for name, site in own.items()}
            held.enter_context(_holding(self, place, vectors | copies))
        return peft(self, x, *args, **kwargs)


def _wrapper(self: Any, call: Call, peft: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a router with the matrix W + s B A, with the gradients of W and of the layers A and B."""
    own = [name for name in self.active_adapters if name in self.lora_A]
    delta = {name: self.get_delta_weight(name).detach() for name in own}
    with _holding(self, "get_delta_weight", delta.__getitem__), _LoraProduct(self, own):
        return peft(self, *args, **kwargs)


class _LoraProduct(TorchFunctionMode):
    """Gives products with a wrapped matrix, in any dtype, the gradients of its LoRA factors."""

    def __init__(self, wrapper: Any, adapters: list[str]) -> None:
        super().__init__()
        self._wrapper, self._adapters, self._casts = wrapper, adapters, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, one = kwargs or {}, self._wrapper
        y = func(*args, **kwargs)
        if one.parameter_name not in getattr(one.get_base_layer(), "parametrizations", {}):
            return y
        if func in _CASTS and self._is_sum(args[0]):
            self._casts.append(y)
        elif func is LINEAR:
            x, weight = (args[i] if i < len(args) else kwargs[name] for i, name in enumerate(("input", "weight")))
            for name in self._adapters if self._is_sum(weight) else ():
                low = one.lora_B[name](one.lora_A[name](x.detach().to(one.lora_A[name].weight.dtype)))
                y = _with_gradient_of(y, (low * one.scaling[name]).to(y.dtype))
        return y

    def _is_sum(self, value: Any) -> bool:
        """Return whether a value is W + s B A, which PEFT computes once per call."""
        return value is self._wrapper.get_param() or any(value is cast for cast in self._casts)


def _with_gradient_of(y: Tensor, part: Tensor) -> Tensor:
    return y + (part - part.detach())


def _tokens(self: Any, call: Call, peft: Any, x: Tensor, adapters: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Look up, or multiply by a tied head, in a table with some entries replaced by trained ones."""
    deltas = dict(self.trainable_tokens_delta.items())
    with _holding(self, "trainable_tokens_delta", {name: delta.detach() for name, delta in deltas.items()}):
        y: Tensor = peft(self, x, adapters, *args, **kwargs)
    for name in adapters if not self.merged else ():
        site, index_N = self._tap_sites.get(name), torch.tensor(self.token_indices[name], device=x.device)
        if isinstance(site, LinearSite):
            part = site.run(call, x.detach(), deltas[name], None)
            y = _with_gradient_of(y, y.new_zeros(y.shape).index_copy(-1, index_N, part.to(y.dtype)))
        elif isinstance(site, TableSite):
            is_it = x[..., None] == index_N
            if (padding := self.base_layer.padding_idx) is not None:
                is_it = is_it & (x != padding)[..., None]
            part = site.run(call, is_it.long().argmax(-1), deltas[name]) * is_it.any(-1)[..., None]
            scale = self._get_embed_scale()
            y = _with_gradient_of(y, (part if scale is None else part * scale).to(y.dtype))
    return y


def _sites_of_tokens(module: Any, trained: Any) -> dict[str, Site] | None:
    kind: Any = TableSite if isinstance(module.get_base_layer(), nn.Embedding) else LinearSite
    found = {n: kind(t, None) for n, p in module.trainable_tokens_delta.items() if (t := trained(p)) is not None}
    return found if found and not module.get_base_layer().weight.requires_grad else None


def _sites_of_wrapper(module: Any, trained: Any) -> dict[str, Site] | None:
    factors = [(f"{n}.{i}", p) for n in ("lora_A", "lora_B") for i, p in enumerate(getattr(module, n).parameters())]
    found: dict[str, Site] = {n: LinearSite(t, None) for n, p in factors if (t := trained(p)) is not None}
    return found if found and module.num_experts == 1 and not module.get_param().requires_grad else None


def _sites_of_lora(module: Any, trained: Any) -> dict[str, Site] | None:
    """Return no sites, since the factors have their own."""
    factors = (p for layers in (module.lora_A, module.lora_B) for p in layers.parameters())
    return {} if hasattr(module, "lora_variant") and any(trained(p) is not None for p in factors) else None


def _vectors(named: Any, trained: Any) -> dict[str, Site] | None:
    return {name: SpreadSite(target) for name, p in named if (target := trained(p)) is not None} or None


def _named_vectors(module: Any) -> Iterator[tuple[str, Any]]:
    return ((f"{place}.{name}", vector) for place in _OF_VERA for name, vector in getattr(module, place).items())


_LAYERS = {
    "peft.tuners.lora.layer.Linear": "lora",
    "peft.tuners.lora.dora.DoraLinearLayer": "dora",
    "peft.tuners.ia3.layer.Linear": "ia3",
    "peft.tuners.vera.layer.Linear": "vera",
    "peft.tuners.lora.layer.ParamWrapper": "wrapper",
    "peft.tuners.trainable_tokens.layer.TrainableTokensLayer": "tokens",
}
_WAYS: dict[str, tuple[str, Callable[..., Any], Callable[[Any, Any], dict[str, Site] | None]]] = {
    "prompts": ("get_prompt", _prompts, lambda module, trained: {} if hasattr(module, "prompt_encoder") else None),
    "lora": ("forward", _lora, _sites_of_lora),
    "dora": ("forward", _dora, lambda module, trained: _vectors(module._parameters.items(), trained)),
    "ia3": ("forward", _ia3, lambda module, trained: _vectors(module.ia3_l.items(), trained)),
    "vera": ("forward", _vera, lambda module, trained: _vectors(_named_vectors(module), trained)),
    "wrapper": ("forward", _wrapper, _sites_of_wrapper),
    "tokens": ("forward_adapters", _tokens, _sites_of_tokens),
}
