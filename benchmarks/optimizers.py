"""Optimizers that papers recommend for private training, as experiments of `utility.py`; dpllm does not offer them.

All of them receive only the private gradients, so ε does not depend on them (post-processing). They use a public fact:
the variance of the noise in each step, which the plan states.

AdamBC      subtracts the variance of the noise from Adam's second moment (Tang et al., arXiv:2312.14334)
low-passed  takes the second moment of the first moment, in which noise has partly averaged out, as a mean over each
            row, and subtracts the variance of the noise that is left
DiSK        averages gradients that are taken ahead of the weights: a simplified Kalman filter (Zhang et al.,
            arXiv:2410.03883), in its form with one gradient per step
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from dpllm.mechanism.strategies import inverse
from dpllm.privacy.plan import PrivacyPlan


@dataclass(frozen=True)
class KnownNoise:
    """The noise in an entry of the private gradients: of step t, Σ_s response[t - s] z_s with z_s ~ N(0, 1).

    Attributes:
        response: (T,) how the noise drawn in one step enters this step's gradient and the following ones.
    """

    response: tuple[float, ...]

    @classmethod
    def of(cls, plan: PrivacyPlan) -> KnownNoise:
        """Return the noise of a plan's gradients, which are divided by the expected batch size."""
        column = inverse(plan.mechanism.noise.column(plan.num_steps), plan.num_steps)
        return cls(tuple((column * plan.noise_stddev / plan.expected_batch_size).tolist()))

    def variances(self) -> NDArray[np.float64]:
        """Return the (T,) variance in each step's gradient."""
        return np.cumsum(np.square(self.response))

    def averaged(self, decay: float) -> KnownNoise:
        """Return the noise in m_t = decay · m_t-1 + (1 - decay) · g_t, which begins at 0."""
        weights = (1 - decay) * decay ** np.arange(len(self.response))
        return KnownNoise(tuple(np.convolve(weights, self.response)[: len(self.response)].tolist()))


def running_means(values: NDArray[np.float64], decay: float) -> NDArray[np.float64]:
    """Return the (T,) exponential averages of T values, divided by 1 - decay^(t + 1) as Adam's are.

    >>> running_means(np.array([1.0, 3.0]), 0.5).round(4).tolist()
    [1.0, 2.3333]
    """
    means, mean = np.empty(len(values)), 0.0
    for step, value in enumerate(values):
        mean = decay * mean + (1 - decay) * float(value)
        means[step] = mean / (1 - decay ** (step + 1))
    return means


class NoiseCorrectedAdam(Optimizer):
    """Adam without the part of its second moment that is noise, and without weight decay.

    With the private gradient g_t, the first moment m_t and the second moment v_t, both of which begin at 0:

        of="gradient":  v_t averages g_t²,  u_t = m_t / (1 - β1^t)
        of="momentum":  v_t averages m_t²,  u_t = m_t
        θ_t+1 = θ_t - lr · u_t / sqrt(max(v_t / (1 - β2^t) - Φ_t, floor · Φ_t))

    Φ_t is the same average of the variances of the noise in g_t or m_t.

    Args:
        params: what to train.
        lr: learning rate.
        noise: noise of the gradients.
        betas: decays β1 and β2.
        of: the second moment of the gradients (AdamBC) or of the first moment ("low-passed").
        by_row: use the mean of v_t over each row of a matrix, or over a vector.
        floor: least result of the subtraction, as a share of Φ_t.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        noise: KnownNoise,
        betas: tuple[float, float] = (0.9, 0.999),
        of: Literal["gradient", "momentum"] = "gradient",
        by_row: bool = False,
        floor: float = 0.1,
    ) -> None:
        """Compute Φ of all steps."""
        super().__init__(params, {"lr": lr, "betas": betas})
        seen = noise if of == "gradient" else noise.averaged(betas[0])
        self._expected = running_means(seen.variances(), betas[1])
        self._of, self._by_row, self._floor = of, by_row, floor
        self._steps = 0
        self.at_floor: float | None = None
        """The share of second moments that were at the floor in the last step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Raises:
            ValueError: the run is longer than its noise is known.
        """
        del closure
        if self._steps == len(self._expected):
            raise ValueError(f"the noise is known for {self._steps} steps, and this is one more")
        expected = float(self._expected[self._steps])
        self._steps += 1
        low = total = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    direction, excess = self._direction(parameter, group["betas"], expected)
                    low += int((excess <= self._floor * expected).sum())
                    total += excess.numel()
                    parameter.add_(direction, alpha=-group["lr"])
        self.at_floor = low / total if total else None

    def _direction(self, parameter: Any, betas: tuple[float, float], expected: float) -> tuple[Tensor, Tensor]:
        """Return u_t / sqrt(…), and v_t without noise before the floor is applied."""
        state = self.state[parameter]
        if not state:
            state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        first, second = state["first"], state["second"]
        first.lerp_(parameter.grad, 1 - betas[0])
        seen = parameter.grad if self._of == "gradient" else first
        second.mul_(betas[1]).addcmul_(seen, seen, value=1 - betas[1])
        mean = second
        if self._by_row:
            mean = second.mean(dim=tuple(range(1, second.dim())) or 0, keepdim=True)
        excess = mean / (1 - betas[1] ** self._steps) - expected
        scale = 1 - betas[0] ** self._steps if self._of == "gradient" else 1.0
        return first / scale / excess.clamp(min=self._floor * expected).sqrt(), excess


class DiSK(Optimizer):
    """Adam on gradients that a simplified Kalman filter has averaged, without weight decay.

    The gradient g_t is taken at θ_t + γ (θ_t - θ_t-1) with γ = (1 - κ) / κ, where the two gradients of the general form
    become one. Then

        f_t = (1 - κ) f_t-1 + κ g_t,  f_0 = 0,

    and Adam takes f_t for its gradient. Between two steps the parameters hold the point of the next gradient. After the
    last step they hold θ_T.

    Args:
        params: what to train.
        lr: learning rate.
        num_steps: T.
        kappa: κ, above 0 and at most 1; with 1 it is Adam.
        betas: Adam's decays β1 and β2.
        eps: Adam's ε, added to the root of the second moment.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        num_steps: int,
        kappa: float = 0.7,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """Begin without earlier gradients."""
        super().__init__(params, {"lr": lr, "betas": betas})
        self._kappa, self._eps = kappa, eps
        self._num_steps, self._steps = num_steps, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient, and move them ahead."""
        del closure
        self._steps += 1
        ahead = 0.0 if self._steps == self._num_steps else (1 - self._kappa) / self._kappa
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    at, moved = self._move(parameter, group)
                    parameter.copy_(at).add_(moved, alpha=ahead)

    def _move(self, parameter: Any, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return θ_t+1 and θ_t+1 - θ_t."""
        state = self.state[parameter]
        if not state:
            state["at"] = parameter.clone()
            for name in ("filtered", "first", "second"):
                state[name] = torch.zeros_like(parameter)
        slow, slower = group["betas"]
        filtered = state["filtered"].lerp_(parameter.grad, self._kappa)
        first = state["first"].lerp_(filtered, 1 - slow)
        second = state["second"].mul_(slower).addcmul_(filtered, filtered, value=1 - slower)
        scale = (second / (1 - slower**self._steps)).sqrt_().add_(self._eps)
        moved = (first / (1 - slow**self._steps)).div_(scale).mul_(-group["lr"])
        return state["at"].add_(moved), moved


EXPERIMENTS: Sequence[str] = ("AdamBC", "low-passed", "DiSK")


def experiment(name: str, params: Iterable[nn.Parameter], lr: float, plan: PrivacyPlan) -> Optimizer:
    """Return one of `EXPERIMENTS` for the gradients of a plan.

    Args:
        name: of the experiment.
        params: what to train.
        lr: learning rate before its schedule.
        plan: of the run.
    """
    if name == "DiSK":
        return DiSK(params, lr, plan.num_steps)
    noise = KnownNoise.of(plan)
    if name == "AdamBC":
        return NoiseCorrectedAdam(params, lr, noise)
    if name == "low-passed":
        return NoiseCorrectedAdam(params, lr, noise, of="momentum", by_row=True, floor=1.0)
    raise ValueError(f"no experiment has the name {name!r}: take one of {', '.join(EXPERIMENTS)}")
