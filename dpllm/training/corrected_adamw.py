"""AdamW whose second moment excludes the known noise: AdamBC, or the second moment of the first moment.

A private run uses this optimizer if its arguments have ``optim_args: second_moment=low_passed`` or
``second_moment=corrected``. It receives only the private gradients and the public variance of their noise, so it is
post-processing: ε does not depend on it.

AdamW divides by the root of an average of g², which in private training is mostly noise. The variance of that noise is
public. With the private gradient g_t,

    m_t = β1 m_t-1 + (1 - β1) g_t,    v_t = β2 v_t-1 + (1 - β2) x_t²,    m and v begin at 0
    s_t = max(v_t / (1 - β2^t) - Φ_t, f Φ_t)
    θ_t+1 = (1 - lr λ) θ_t - lr ρ u_t / (sqrt(s_t) + eps)

where Φ_t is the same average of the variances of the noise in x_t. An entry whose signal is smaller than its noise is
divided by the noise, a public number, instead of a noisy estimate.

corrected    AdamBC (Tang, Shpilevskiy, Lécuyer, arXiv:2312.14334): x = g, u_t = m_t / (1 - β1^t), f = 0.1
low_passed   x = m, u = m, f = 1. m is a low-pass filter of the gradients (such filters: Zhang et al.,
             arXiv:2408.13460): where noise is correlated over the steps, later steps have canceled most of it in m.
             The first updates are not enlarged by 1 / (1 - β1^t), so later steps cancel their noise.

ρ makes an entry without a signal move as far as with AdamW, so that learning rates keep their meaning: sqrt(f) times
the public ratio of the noise in x to the noise in g.

All operations are entry by entry, so an engine may divide the parameters in any way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from dpllm.config import ConfigError
from dpllm.config.train_values import SECOND_MOMENT, SECOND_MOMENTS, second_moment_of
from dpllm.config.values import choice
from dpllm.engines.guard import innermost
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.mechanism.strategies import KnownNoise
from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.privacy.ledger_reader import noted_before
from dpllm.privacy.plan import PrivacyPlan

SECOND_MOMENT_FACT = "second moment of the optimizer"
"""Name of the fact in ledger and report."""
_FLOORS = {"low_passed": 1.0, "corrected": 0.1}
_WORDS = {"low_passed": "that of the first moment, less", "corrected": "its own, less"}
_MOMENTS = ("exp_avg", "exp_avg_sq")  # the names that DeepSpeed's conversion of checkpoints expects, like "step"


class CorrectedAdamW(Optimizer):
    """AdamW with a second moment that excludes the known noise; see the module.

    Attributes:
        wide_moments: moments are float32 even for 16-bit parameters.

    The run passes it the number of each private step (`tell`). Before the first one, a call of ``step`` only creates
    the state into which checkpoints are loaded. Moments are float32 (float64 for float64 parameters).

    Each group holds the progress of the known noise, which a checkpoint saves:

    * ``taken``: steps, including those before a resume.
    * ``noise``: variance of the noise in x after the last step.
    * ``earlier_noise``: its part from before the last resume. A resume begins with fresh noise, which is independent
      of it.
    * ``expected``: the average of ``noise`` that begins at 0.

    Args:
        params: the parameters to train.
        noise: the known noise of the run's gradients.
        second_moment: "low_passed" or "corrected".
        lr: learning rate.
        betas: decays β1 and β2.
        eps: added to the root of the second moment.
        weight_decay: λ.

    Raises:
        ConfigError: a number is out of range.
    """

    wide_moments = True

    def __init__(
        self,
        params: Iterable[Any],
        noise: KnownNoise,
        second_moment: str = "low_passed",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """Begin without steps."""
        if not isinstance(noise, KnownNoise):
            raise ConfigError(f"noise is {noise!r}: pass KnownNoise.of(plan.mechanism, plan.num_steps)")
        choice(SECOND_MOMENT, second_moment, SECOND_MOMENTS)
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas must be at least 0 and below 1, got {betas}")
        if min(lr, eps, weight_decay) < 0:
            raise ConfigError(f"lr, eps and weight_decay must be at least 0, got {lr}, {eps} and {weight_decay}")
        progress = {SECOND_MOMENT: second_moment, "taken": 0, "noise": 0.0, "earlier_noise": 0.0, "expected": 0.0}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **progress})
        self._noise, self._second_moment = noise, second_moment
        self._seen: dict[float, tuple[list[float], float]] = {}  # by β1: variances in x, and ρ
        self._told: int | None = None
        self._betas: dict[int, tuple[float, float]] = {}  # of the last step, by the id of the group
        self._due: set[int] = set()  # ids of groups that have not begun the step; ZeRO shows one group at a time

    def tell(self, step: int) -> None:
        """Begin a private step.

        Args:
            step: number of the step since the start or resume, from 0.
        """
        self._told, self._due = step, {id(group) for group in self.param_groups}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; an engine may call it once for each part of a group.

        Raises:
            ConfigError: no run has passed it a step number, and a gradient is not 0: it would be dropped.
        """
        del closure
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in held:
                self._make_state(parameter)
            if self._told is None:
                _refuse_untold(held)
            if self._told is None or not held:
                continue
            if id(group) in self._due:
                self._due.remove(id(group))
                self._begin(group, self._told)
            for parameter in held:
                self._update(parameter, group)

    def _make_state(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            for name in _MOMENTS:
                state[name] = torch.zeros_like(
                    parameter, dtype=accumulation_dtype(parameter.dtype), memory_format=torch.preserve_format
                )
            state["step"] = torch.tensor(0.0)  # equals ``taken``; DeepSpeed's conversion needs it

    @property
    def noise(self) -> KnownNoise:
        """The noise that is subtracted. It cannot be replaced, so no loop can choose it by a loss."""
        return self._noise

    @property
    def second_moment(self) -> str:
        """One of `SECOND_MOMENTS`. It cannot be replaced either."""
        return self._second_moment

    @property
    def _is_low_passed(self) -> bool:
        return self.second_moment == "low_passed"

    def _noise_seen(self, decay: float) -> tuple[list[float], float]:
        """Return the (T,) variances of the noise in x, and ρ."""
        if decay not in self._seen:
            seen, share = self.noise, 1.0
            if self._is_low_passed:
                seen, share = self.noise.averaged(decay), self.noise.averaged_share(decay)
            self._seen[decay] = seen.variances().tolist(), share * math.sqrt(_FLOORS[self.second_moment])
        return self._seen[decay]

    def _begin(self, group: dict[str, Any], step: int) -> None:
        """Count a step of a group, and the noise in it."""
        first, second = group["betas"]
        if step > 0 and self._betas.setdefault(id(group), (first, second)) != (first, second):
            raise ConfigError(
                f"The betas of CorrectedAdamW changed during the run, from {self._betas[id(group)]} to "
                f"{first, second}, so the moments would contain a different noise variance than the known one. Keep "
                "them (OneCycleLR and "
                "CyclicLR: cycle_momentum=False)"
            )
        self._betas[id(group)] = first, second
        variances, _ = self._noise_seen(first)
        kept = group["noise"] if step == 0 else group["earlier_noise"]
        group["taken"] += 1
        group["earlier_noise"] = first**2 * kept if self._is_low_passed else 0.0
        group["noise"] = variances[step] + group["earlier_noise"]
        group["expected"] = second * group["expected"] + (1 - second) * group["noise"]

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        weights, gradient = _local(parameter), _local(parameter.grad)
        mean, square = (_local(self.state[parameter][name]) for name in _MOMENTS)
        gradient = gradient.to(mean.dtype)
        mean.lerp_(gradient, 1 - first)
        seen = mean if self._is_low_passed else gradient
        square.mul_(second).addcmul_(seen, seen, value=1 - second)
        self.state[parameter]["step"].fill_(group["taken"])
        scale = 1 - second ** group["taken"]
        expected = group["expected"] / scale
        least = _FLOORS[self.second_moment] * expected
        size = (square / scale).sub_(expected).clamp_(min=least).sqrt_().add_(group["eps"])
        _, share = self._noise_seen(first)
        share = share if self._is_low_passed else share / (1 - first ** group["taken"])
        update = torch.div(mean, size, out=size).mul_(-group["lr"] * share)
        weights.mul_(1 - group["lr"] * group["weight_decay"]).add_(update)

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from a checkpoint's state, with moments of the same precision.

        Raises:
            ConfigError: the state belongs to a different optimizer.
        """
        groups = state_dict["param_groups"]
        if any(group.get(SECOND_MOMENT) != self.second_moment for group in groups):
            raise ConfigError(
                f"The state does not belong to a CorrectedAdamW with {SECOND_MOMENT}={self.second_moment}. Resume with "
                "the train.optim_args, or the optimizer, of the first start"
            )
        super().load_state_dict(state_dict)  # it rounds moments to the dtype of the parameters
        names = [name for group in groups for name in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for name, parameter in zip(names, parameters, strict=True):
            saved = state_dict["state"].get(name, {})
            for moment in _MOMENTS:
                if moment in saved and saved[moment].dtype != self.state[parameter][moment].dtype:
                    self.state[parameter][moment] = saved[moment].to(
                        parameter.device, accumulation_dtype(parameter.dtype), copy=True
                    )


def _local(value: Any) -> Tensor:
    """Return the entries that this process holds, sharing their memory."""
    found: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return found


def asked_second_moment(args: TrainingArguments) -> str | None:
    """Return the second moment that arguments ask for (`dpllm.config.train_values.second_moment_of`)."""
    return second_moment_of(str(getattr(args.optim, "value", args.optim)), args.optim_args)


def words_of(optimizer: Any) -> str | None:
    """Return the description of a `CorrectedAdamW`, for report and card; None: it is another optimizer, or none."""
    inner = innermost(optimizer)
    return _words(inner.second_moment) if isinstance(inner, CorrectedAdamW) else None


def words_for(args: TrainingArguments, optimizer: Any) -> str | None:
    """Return `words_of` for a run, by its arguments or by the caller's own optimizer (None: none)."""
    asked = asked_second_moment(args)
    return words_of(optimizer) if asked is None else _words(asked)


def _words(second_moment: str) -> str:
    return (
        f"{_WORDS[second_moment]} the known variance of the noise in it ({SECOND_MOMENT}={second_moment}); it uses the "
        "private gradients and public numbers only"
    )


def refuse_unusable(args: TrainingArguments, own_optimizer: bool) -> None:
    """Refuse arguments that ask for `CorrectedAdamW` where another optimizer would replace it.

    Args:
        args: arguments of the private training.
        own_optimizer: whether the caller passes an optimizer.

    Raises:
        ConfigError: the caller passes an optimizer, or the DeepSpeed configuration leads to another one.
    """
    if asked_second_moment(args) is None:
        return
    config = {} if args.deepspeed_plugin is None else args.deepspeed_plugin.deepspeed_config
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    is_offloaded = offload.get("device", "none") != "none"
    for is_so, fault, remedy in (
        (own_optimizer, "an optimizer was passed too", "remove it from `optimizers`"),
        ("optimizer" in config, "the DeepSpeed configuration has an optimizer too", "remove it there"),
        (
            is_offloaded and config.get("zero_force_ds_cpu_optimizer", True),
            "the DeepSpeed configuration offloads the optimizer and asks for DeepSpeed's own AdamW",
            "set zero_force_ds_cpu_optimizer to false there",
        ),
        (
            is_offloaded and offload.get("ratio", 1.0) != 1,
            "DeepSpeed updates the parameters that it does not offload with PyTorch's AdamW",
            "leave zero_optimization.offload_optimizer.ratio out",
        ),
    ):
        if is_so:
            raise ConfigError(f"train.optim_args={args.optim_args} cannot be used, because {fault}: {remedy}")


def optimizer_for(args: TrainingArguments, plan: PrivacyPlan) -> tuple[type[Optimizer], dict[str, Any]] | None:
    """Return class and options of the optimizer for ``Trainer``; None: the one that ``args.optim`` names.

    Args:
        args: arguments of the private training.
        plan: plan of the run.
    """
    asked = asked_second_moment(args)
    if asked is None:
        return None
    _, options = Trainer.get_optimizer_cls_and_kwargs(args)
    noise = KnownNoise.of(plan.mechanism, plan.num_steps)
    own = {"noise": noise, SECOND_MOMENT: asked}
    return CorrectedAdamW, {**own, **{name: options[name] for name in ("lr", "betas", "eps")}}


def require_asked(args: TrainingArguments, optimizer: Any) -> None:
    """Check that a Trainer has made the `CorrectedAdamW` that its arguments ask for.

    Args:
        args: arguments of the private training.
        optimizer: the optimizer, prepared for its engine.

    Raises:
        ConfigError: the Trainer has made a different optimizer.
    """
    inner = innermost(optimizer)
    if asked_second_moment(args) is not None and not isinstance(inner, CorrectedAdamW):
        raise ConfigError(
            f"train.optim_args={args.optim_args} asks for CorrectedAdamW, but the run's optimizer is "
            f"{type(inner).__name__}. Do not override create_optimizer, or leave the option out"
        )


def teller(optimizer: Any, plan: PrivacyPlan) -> Callable[[int], None] | None:
    """Return the function that passes the number of each step to a `CorrectedAdamW`; None: it is another optimizer.

    Args:
        optimizer: the optimizer, prepared for its engine.
        plan: plan of the run.

    Raises:
        ConfigError: it was made for different noise, or is part of another optimizer.
    """
    inner = innermost(optimizer)
    if not isinstance(inner, CorrectedAdamW):
        if _is_part(inner):
            raise _joined()
        return None
    if inner.noise != KnownNoise.of(plan.mechanism, plan.num_steps):
        raise ConfigError(
            "CorrectedAdamW was made for different noise than the plan's. Make it with "
            "noise=KnownNoise.of(plan.mechanism, plan.num_steps)"
        )
    return inner.tell


def _is_part(optimizer: Any) -> bool:
    """Return whether an optimizer that joins others contains a `CorrectedAdamW`, also in a list or a dictionary."""
    found = list(getattr(optimizer, "__dict__", {}).values())
    found += [one for several in found if isinstance(several, list | tuple) for one in several]
    found += [one for several in found if isinstance(several, dict) for one in several.values()]
    return any(isinstance(innermost(one), CorrectedAdamW) for one in found)


def _refuse_untold(parameters: Iterable[nn.Parameter]) -> None:
    """Raise `ConfigError` for a nonzero gradient; libraries step over zeros before they load a checkpoint."""
    if any(bool(_local(parameter.grad).any()) for parameter in parameters):
        raise _joined()


def _joined() -> ConfigError:
    return ConfigError(
        "CorrectedAdamW did not receive the number of the private step, so it cannot know the noise in the gradient: "
        "it is part of another optimizer, or is used outside of a private run. Attach it to the run directly, with "
        "several parameter groups where they need different learning rates"
    )


def refuse_other_second_moment(folder: Path, now: str | None) -> None:
    """Check that a continued run has the second moment of its start, which the state continues; for one process.

    Args:
        folder: folder of the run.
        now: `words_of` the optimizer of this start.

    Raises:
        ConfigError: the ledger names a different second moment.
    """
    begun, before = noted_before(folder / LEDGER_FILE, SECOND_MOMENT_FACT)
    if begun and before != now:
        raise ConfigError(
            f"The run in {folder} has {_named(before)}, and this start {_named(now)}. Resume with the "
            "train.optim_args, or the optimizer, of the first start"
        )


def _named(words: Any) -> str:
    return f"a second moment that is {words}" if words else "the second moment of its optimizer as it is"
