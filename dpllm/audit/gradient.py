"""White-box gradient canaries: measure the releases of an installed stack's private steps, and judge them.

This module drives `dpllm.training.run` like a training loop, and turns what it observes into scores and a verdict. The
attacker is that of differential privacy, who knows everything, including every gradient that reaches the optimizer,
except which canaries took part (Nasr, Song, Thakurta, Papernot, Carlini, arXiv:2101.04535; tight in arXiv:2302.07956).

A *block* is T consecutive steps. For each block every canary is included by its own fair coin. A canary that is not
included contributes nothing, as zero-out adjacency requires; apart from this, the run's own units are drawn. The
model does not change, so each canary's gradient is known: it is computed once, by plain autograd, one unit at a time. A
release is stored as projections, each on the part of one canary's gradient that is orthogonal to all others.

Blocks share only the code that is audited. By parallel composition, the coins of all blocks are therefore those of one
run with R·m canaries (arXiv:2305.08846) of the claim for T steps. With one canary taken from each block, the blocks are
R independent runs, which shows more.

If a step depends on earlier ones (noise that is correlated over steps, a changing clip threshold), each block is a
separate run, from its start (`Restarts`). The attacker also sees how the threshold changes.

If an average of the weights is released, it is also read from the model, at the end of each block. For this the weights
are updated by plain SGD, with a learning rate so small that the model hardly changes. An average of the private
iterates is a function of the releases, so the claim covers every statistic of both.

Shape suffixes: R blocks, T steps of a block, M canaries, N units, P trainable entries of the model.

**Attacks.** Each attack gives every canary a score without using its coin; the higher the score, the likelier the
canary was present:

* *total*: its projection, summed over the block's steps. This is the best attack on a Gaussian sum.
* *others*: minus the projection on the base units' gradient. It shows that a unit changes the contribution of others (a
  loss averaged over the batch), or that an extra term enters when few units are present.
* *repeated noise*: the distance between its projections in the two most similar releases of the block. If both carry
  the same noise, the difference shows without noise that the canary took part in one of them.
* *known order*: its projection in the one step that it would be in if units were ordered by number, or by a stock
  sampler with its default seed (`torch.utils.data.DistributedSampler`: seed 0). It is used when a block is one pass
  over the units.

Noise that is correlated over steps is decorrelated first: with the plan's strategy M, M times the releases of a start
has independent noise. An attack then weights the steps by the columns of M, in which a unit shows. Further attacks are:

* *one group*: the largest such sum over the steps of one group of units (in a fixed order: of those a pass apart);
* *others earlier*, *others later*: in which group the base units are. It shows that a unit changes the group of others;
* *threshold up*, *threshold down*: how far a clip threshold changed;
* *average*: the projection of the released average. It shows weights without noise among those that were averaged;
* *average, earlier noise known*: the same, without the part of all steps before each iterate, which the releases show.
  It shows iterates that lack only the noise of their own step.

The noise itself is also tested, on directions to which no unit contributes. There, a standard deviation that is a tenth
too small shows at once, while a lower bound on ε shows it only when half of the noise is missing. Blocks of several
steps also show noise that is too small in one direction over the steps, such as noise that is used twice.

The verdict holds with the requested confidence for any number of attacks: the error is divided over them. A lower bound
above the claimed ε refutes the claim. A bound below it proves nothing: for example, a few canaries cannot distinguish
an unknown order from Poisson sampling.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import linalg
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.audit.bounds import CONFIDENCE, AuditError, NoiseTest, one_run_bounds, power, trial_bounds
from dpllm.audit.result import (
    RATES,
    AttackResult,
    AuditedCanaries,
    AuditResult,
    allowed_rates,
    auroc,
    shown_rates,
    tpr_at,
    tpr_confidence,
)
from dpllm.data.transfer import send
from dpllm.engines import model_inside
from dpllm.engines.guard import innermost
from dpllm.engines.processes import Processes
from dpllm.mechanism.averages import Average, weights_of
from dpllm.mechanism.sampling import secret_rng
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.averaging import Averaging
from dpllm.training.rows import LossOf, TrainingRows
from dpllm.training.run import PrivateRun


def updates_by_itself(model: Any) -> bool:
    """Return whether the engine updates the parameters within the private step, as DeepSpeed does."""
    return hasattr(model, "zero_optimization_stage")


def whole_parameters(model: Any, inner: nn.Module) -> Tensor:
    """Return the trainable parameters as stored by the optimizer (DeepSpeed: its float32 masters), end to end.

    Args:
        model: the return value of ``accelerator.prepare``.
        inner: the module inside (`dpllm.engines.model_inside`).

    Returns:
        (P,) float32, or float64 for a float64 model; a copy.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> whole_parameters(model, model).shape
    torch.Size([2])
    """
    if updates_by_itself(model):
        from deepspeed.utils import safe_get_full_fp32_param

        return _laid_out(inner, safe_get_full_fp32_param)
    return _laid_out(inner, lambda parameter: parameter)


def whole_gradient(inner: nn.Module) -> Tensor:
    """Return ``.grad`` of the trainable parameters for the optimizer, end to end; 0 for a parameter without one.

    Returns:
        (P,) float32, or float64 for a float64 model; a copy.
    """
    return _laid_out(inner, lambda parameter: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _laid_out(inner: nn.Module, read: Callable[[Any], Any]) -> Tensor:
    pieces = []
    for parameter in inner.parameters():
        if parameter.requires_grad:
            value = read(parameter).detach()
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            pieces.append(whole.flatten().to(torch.float64 if whole.dtype == torch.float64 else torch.float32))
    return torch.cat(pieces)


_PUBLIC_SEED = 0  # seed of the noise directions, which must be the same on every process
LEAST_VISIBLE = 0.05
"""Share of a gradient that must be orthogonal to the others: a smaller one would hardly show in a release."""
_MOVEMENT = 1e-5  # change of a parameter entry per step, if a release or an average is read from the parameters
Release = Callable[[NDArray[np.bool_]], Sequence[Tensor]]
"""Maps the present units (N,) to the releases of a block's T steps, (P,) each; the same on every process."""


@dataclass(frozen=True)
class Design:
    """The units of an audit. They are numbered: base units, then canaries, then units that are never present.

    Raises:
        AuditError: the numbers do not describe an audit.
    """

    num_base: int
    """Number of units that are always present, from unit 0 on."""
    num_canaries: int
    """M, the number of units after them, each present by a fair coin in each block."""
    num_blocks: int
    """R."""
    steps_per_block: int = 1
    """T."""
    own_runs: bool = False
    """Whether each block is a separate run."""
    steps_per_start: int | None = None
    """The number of steps after which a block's run is resumed; None: never."""
    average: Average | None = None
    """The average of the weights that is released and read; None: no average."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, least in (("num_base", 1), ("num_canaries", 1), ("num_blocks", 1), ("steps_per_block", 1)):
            if getattr(self, name) < least:
                raise AuditError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.steps_per_start is not None and (self.steps_per_start < 1 or not self.own_runs):
            raise AuditError(
                f"steps_per_start is {self.steps_per_start}; it must be at least 1, with own_runs=True, since only a "
                "separate run can be resumed"
            )
        if self.average is not None and not (self.own_runs and len(self.starts) == 1):
            raise AuditError(
                "An average belongs to one run and is read at its end. Set own_runs=True, without steps_per_start"
            )

    @property
    def starts(self) -> list[int]:
        """The steps of each start of a block's run; one entry if the block is not resumed."""
        most = self.steps_per_start or self.steps_per_block
        return [min(most, self.steps_per_block - first) for first in range(0, self.steps_per_block, most)]

    def check(self, plan: PrivacyPlan) -> None:
        """Check that a plan is suitable for this audit.

        Raises:
            AuditError: the plan has too few units or steps, or its ε is not a claim.
        """
        needed = self.steps_per_block * (1 if self.own_runs else self.num_blocks)
        if plan.num_steps < needed:
            raise AuditError(
                f"{self.num_blocks} blocks of {self.steps_per_block} steps need {needed} steps, but the plan has "
                f"{plan.num_steps}. Create the audit's plan with num_steps={needed}"
            )
        if plan.population < self.num_base + self.num_canaries:
            raise AuditError(
                f"There are {self.num_base} base units and {self.num_canaries} canaries, but the plan is for "
                f"{plan.population} units. Use fewer canaries, or more units"
            )
        if plan.sampling != "unit":
            raise AuditError('Canaries are whole units, but the plan draws single rows. Audit with sampling="unit"')
        if plan.noise_multiplier == 0:
            raise AuditError("The plan has no noise, so it claims nothing that could be refuted. Set noise_multiplier")
        if plan.seeded:
            raise AuditError("The plan has a fixed seed, so its noise is public. Audit without privacy.seed")

    @property
    def canaries(self) -> NDArray[np.int64]:
        """The unit numbers of the canaries."""
        return np.arange(self.num_base, self.num_base + self.num_canaries)


@dataclass(frozen=True, eq=False)
class Basis:
    """The directions on which releases are projected; made by `Basis.of`.

    Attributes:
        canary_MP: unit vectors; the part of each canary's gradient that is orthogonal to all other gradients.
        base_P: unit vector; the part of the base units' summed gradient that is orthogonal to the canaries'.
        visible_M: the share of a canary's clipped gradient that its vector shows, at most 1.
        noise_DP: unit vectors that are orthogonal to every unit's gradient and to each other: they show only the noise.
    """

    canary_MP: Tensor
    base_P: Tensor
    visible_M: NDArray[np.float64]
    noise_DP: Tensor

    @classmethod
    def of(cls, gradient_KP: Tensor, num_base: int, num_noise: int = 0) -> Basis:
        """Create the directions from the units' gradients.

        Args:
            gradient_KP: the gradients of `unit_gradients`, base units first.
            num_base: number of base units among them.
            num_noise: number of directions that show only the noise; fewer if the space has too few dimensions.

        Raises:
            AuditError: a gradient is zero or not finite, or nearly a combination of the others.

        >>> basis = Basis.of(torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 1.0, 1.0]]), num_base=1)
        >>> basis.canary_MP[1].round(decimals=3).abs().tolist(), round(float(basis.visible_M[1]), 3)
        ([0.0, 0.0, 1.0], 0.707)
        """
        norm_K = gradient_KP.norm(dim=1)
        usable_K = torch.isfinite(norm_K) & (norm_K > 0)
        if not bool(usable_K.all()):
            raise AuditError(
                f"The gradient of unit {int((~usable_K).nonzero()[0, 0])} is zero or not finite. Use different rows "
                "for it"
            )
        unit_KP = gradient_KP / norm_K[:, None]
        gram_KK = (unit_KP @ unit_KP.T).double()
        total_K = torch.zeros(len(unit_KP), dtype=torch.float64, device=gram_KK.device)
        total_K[:num_base] = norm_K[:num_base]
        canary_MK = torch.eye(len(unit_KP), dtype=torch.float64, device=gram_KK.device)[num_base:]
        own_MK = torch.stack([_own_part(vector_K, gram_KK, vector_K == 0) for vector_K in canary_MK])
        is_canary_K = torch.arange(len(unit_KP), device=gram_KK.device) >= num_base
        base_K = _own_part(total_K / _length(total_K, gram_KK), gram_KK, is_canary_K)
        visible_M = torch.stack([_length(own_K, gram_KK) for own_K in own_MK])
        if float(visible_M.min()) < LEAST_VISIBLE:
            raise AuditError(
                f"The gradient of canary {int(visible_M.argmin())} is nearly a combination of the other units' (only a "
                f"share of {float(visible_M.min()):.2g} is orthogonal to them). Use fewer canaries, or different rows"
            )
        canary_MP = (own_MK / visible_M[:, None]).to(unit_KP.dtype) @ unit_KP
        base_P = (base_K / _length(base_K, gram_KK)).to(unit_KP.dtype) @ unit_KP
        noise_DP = _noise_directions(unit_KP, gram_KK, num_noise)
        return cls(canary_MP, base_P, visible_M.cpu().numpy(), noise_DP)


def _noise_directions(unit_KP: Tensor, gram_KK: Tensor, num: int) -> Tensor:
    """Return directions that are orthogonal to all gradients, the same on every process."""
    count, width = unit_KP.shape
    generator = torch.Generator().manual_seed(_PUBLIC_SEED)
    inverse = torch.linalg.pinv(gram_KK, hermitian=True, rtol=1e-5)
    found: list[Tensor] = []
    for _ in range(max(0, min(num, width - count))):
        one_P = torch.randn(width, generator=generator).to(unit_KP)
        for _ in range(2):  # twice, because rounding leaves a remainder the first time
            one_P = one_P - (inverse @ (unit_KP @ one_P).double()).to(one_P) @ unit_KP
            for other_P in found:
                one_P = one_P - (one_P @ other_P) * other_P
        found.append(one_P / one_P.norm())
    return torch.stack(found) if found else unit_KP[:0]


def _own_part(vector_K: Tensor, gram_KK: Tensor, others_K: Tensor) -> Tensor:
    """Return a combination of unit vectors minus its projection on the span of some of them; both as weights."""
    others = others_K.nonzero()[:, 0]
    inverse = torch.linalg.pinv(gram_KK[others][:, others], hermitian=True, rtol=1e-5)
    own_K = vector_K.clone()
    own_K[others] -= inverse @ (gram_KK[others] @ vector_K)
    return own_K


def _length(vector_K: Tensor, gram_KK: Tensor) -> Tensor:
    """Return the norm of a combination of vectors with these inner products."""
    return (vector_K @ gram_KK @ vector_K).clamp_min(0).sqrt()


@dataclass(frozen=True, eq=False)
class Observations:
    """The observations of an attacker, and the coins.

    Attributes:
        included_RM: whether a canary was present in a block.
        canary_RTM: projections of the releases on the canaries' vectors.
        base_RT: projections on the base units' vector.
        alike_R2: the two steps of a block whose whole releases are most similar, chosen without the coins; both 0 if a
            block has one step.
        noise_RTD: projections on the directions that show only the noise; None: there are none.
        moved_RT: the logarithm by which each step changed the clip threshold; None: it does not change.
        average_RM: projections of the released average on the canaries' vectors, scaled like a sum of releases; None:
            no average is released.
    """

    included_RM: NDArray[np.bool_]
    canary_RTM: NDArray[np.float64]
    base_RT: NDArray[np.float64]
    alike_R2: NDArray[np.int64]
    noise_RTD: NDArray[np.float64] | None = None
    moved_RT: NDArray[np.float64] | None = None
    average_RM: NDArray[np.float64] | None = None


def unit_gradients(model: nn.Module, rows: TrainingRows, loss_of: LossOf, unit_ids: Sequence[int]) -> Tensor:
    """Return each unit's gradient, by plain autograd on one row at a time, in float64 on a copy of the model.

    dpllm's own clipping is not used, so that an error in it cannot hide itself.

    Args:
        model: not yet prepared for an engine, on one device, and the same on every process.
        rows: the units' rows.
        loss_of: the loss function for `PrivateRun.step`.
        unit_ids: K units.

    Returns:
        (K, P) float32, in the order of the trainable parameters.

    Raises:
        AuditError: the rows are packed, so that single rows cannot be run.
    """
    if rows.packed:
        raise AuditError("Packed rows cannot be run one by one. Audit with microbatch.pack=false")
    alone = copy.deepcopy(model).double().eval()
    parameters = [p for p in alone.parameters() if p.requires_grad]
    found = []
    for unit in unit_ids:
        numbers, _ = rows.units.rows_of(np.array([unit]))
        collated = [_wide(rows.collate(rows.fetch(np.array([n])))) for n in numbers]
        losses = [loss_of(alone, send(inputs, parameters[0].device)) for inputs in collated]
        grads = torch.autograd.grad(torch.cat(losses).sum(), parameters, allow_unused=True)
        pieces = [p.new_zeros(p.shape) if g is None else g for p, g in zip(parameters, grads, strict=True)]
        found.append(torch.cat([piece.flatten().float() for piece in pieces]))
    return torch.stack(found)


def _wide(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


class Steps:
    """The steps of one attached run, as its optimizer receives them.

    On most engines a release is the gradient in ``.grad`` after the optimizer has run with a learning rate of 0.
    DeepSpeed keeps no such gradient after its step. There, a release is computed from the change of its float32 master
    weights under plain SGD, at a learning rate so small that the model hardly changes (`learning_rate`).

    Args:
        run: a run that is attached to the model.
        model: the model as prepared for its engine; dropout is switched off.
        optimizer: the optimizer as prepared for its engine. Its learning rates are overwritten.
        loss_of: the loss function for `PrivateRun.step`.
        num_steps: T.
        moves: whether the weights are updated on every engine, so that their average can be read.

    Attributes:
        moved: the logarithm by which each step of the last block changed the clip threshold; empty: it does not change.

    Raises:
        AuditError: the weights are updated, but the optimizer is not plain SGD.
    """

    def __init__(
        self, run: PrivateRun, model: Any, optimizer: Any, loss_of: LossOf, num_steps: int, moves: bool = False
    ) -> None:
        """Set the learning rates."""
        self._run, self._optimizer, self._loss_of, self._num_steps = run, optimizer, loss_of, num_steps
        self._model, self._inner = model, model_inside(model)
        self._inner.eval()
        self._by_itself = updates_by_itself(model)
        self._batch = run.plan.expected_batch_size
        self._adapts = run.plan.mechanism.first_threshold is not None
        self.moved: list[float] = []
        self._lr = learning_rate(run.plan) if self._by_itself or moves else 0.0
        base = innermost(optimizer)
        if self._lr:
            _check_plain_sgd(base)
        for group in base.param_groups:
            group["lr"] = self._lr

    def __call__(self, present_N: NDArray[np.bool_]) -> list[Tensor]:
        """Take the steps of one block."""
        self.moved = []
        return [self.step(drawn) for drawn in self._run.draws(self._num_steps, present_N)]

    def step(self, unit_ids: NDArray[np.int64]) -> Tensor:
        """Take one step over these units; return the noisy sum (P,) that it releases."""
        threshold = self._run.ledger.threshold if self._adapts else None
        released = self._release(unit_ids)
        if threshold is not None and self._run.ledger.threshold is not None:
            self.moved.append(math.log(self._run.ledger.threshold / threshold))
        return released

    def _release(self, unit_ids: NDArray[np.int64]) -> Tensor:
        if self._by_itself:
            before = whole_parameters(self._model, self._inner)
            self._run.step(unit_ids, self._loss_of)
            return (before - whole_parameters(self._model, self._inner)) * (self._batch / self._lr)
        self._run.step(unit_ids, self._loss_of)
        self._optimizer.step()
        released = whole_gradient(self._inner) * self._batch
        self._optimizer.zero_grad()
        return released


class Restarts:
    """Blocks that are separate runs: each is started in its own folder, and may be interrupted and resumed.

    All steps of a block are charged to one ledger, and the attacker sees all releases, including those before an
    interruption.

    Args:
        folder: the runs' folder.
        plan: the plan of one block, so that ``plan.num_steps`` is T.
        rows: the rows of the runs.
        model: the model as for `Steps`, but not attached.
        optimizer: the optimizer as for `Steps`.
        loss_of: the loss function as for `Steps`.
        starts: the steps of each start, T together: `Design.starts`.
        average: `Design.average`.
        gradients: as for `PrivateRun.attach`.

    Attributes:
        moved: as in `Steps`.
        averaged: (P,) the change of the average of the last block's weights, in units of a sum of releases. None: no
            average is released.

    Raises:
        AuditError: the average cannot be read: under DeepSpeed, or from 16-bit weights.
    """

    def __init__(
        self,
        folder: Path,
        plan: PrivacyPlan,
        rows: TrainingRows,
        model: Any,
        optimizer: Any,
        loss_of: LossOf,
        starts: Sequence[int],
        average: Average | None = None,
        gradients: str = "ghost",
    ) -> None:
        """Store the parts of the runs."""
        if average is not None:
            _require_readable_average(model)
        self._folder, self._plan, self._rows, self._starts = folder, plan, rows, starts
        self._model, self._optimizer, self._loss_of = model, optimizer, loss_of
        self._blocks, self._average, self._gradients = 0, average, gradients
        self.moved: list[float] = []
        self.averaged: Tensor | None = None

    def __call__(self, present_N: NDArray[np.bool_]) -> list[Tensor]:
        """Take the steps of one block, resuming before each start except the first."""
        folder, released = self._folder / f"block {self._blocks}", []
        self._blocks += 1
        self.moved = []
        for number, num_steps in enumerate(self._starts):
            begin = PrivateRun.resume if number else PrivateRun.start
            run = begin(folder, self._plan, self._rows)
            averaging = None if self._average is None else Averaging(self._average, self._plan.num_steps)
            # The releases that the attacker sees include the effect of earlier blocks on the weights.
            run.attach(
                self._model,
                self._optimizer,
                start_is_independent=True,
                averaging=averaging,
                gradients=self._gradients,
                loss_of=self._loss_of,
            )
            steps = Steps(run, self._model, self._optimizer, self._loss_of, num_steps, moves=averaging is not None)
            before = None if averaging is None else self._weights()
            released += steps(present_N)
            self.moved += steps.moved
            if averaging is not None and before is not None:
                with averaging.shown():
                    self.averaged = (before - self._weights()) * (
                        self._plan.expected_batch_size / learning_rate(self._plan)
                    )
            run.detach()
            run.ledger.close()
        return released

    def _weights(self) -> Tensor:
        return whole_parameters(self._model, model_inside(self._model)).double()


def learning_rate(plan: PrivacyPlan) -> float:
    """Return the learning rate with which a step's noise changes the weights by about 1e-5."""
    return _MOVEMENT * plan.expected_batch_size / plan.noise_stddev


def _require_readable_average(model: Any) -> None:
    """Check that changes of the weights can be read from the model.

    Raises:
        AuditError: they cannot.
    """
    if updates_by_itself(model):
        raise AuditError(
            "Under DeepSpeed the audit cannot read the released average of the weights. Audit the average on a "
            "different engine, and the steps on this one with train.average=null"
        )
    short = next((p.dtype for p in model.parameters() if p.requires_grad and p.dtype.itemsize < 4), None)
    if short is not None:
        raise AuditError(
            f"The trained weights are {short}, which loses the small changes of an audit, and so the released average. "
            "Load the model in float32 (model.dtype=float32), or audit only the steps, with train.average=null"
        )


def observe(
    release: Release,
    basis: Basis,
    design: Design,
    population: int,
    processes: Processes | None = None,
    on_block: Callable[[], None] = lambda: None,
) -> Observations:
    """Run all blocks and return the projections of their releases. Call it on all processes together.

    Args:
        release: `Steps`, or `Restarts`.
        basis: the basis of `unit_gradients`.
        design: the units of the audit.
        population: N, the number of units.
        processes: processes of the run; None: those of torch.distributed.
        on_block: called after each block, for showing progress.

    Returns:
        The observations, the same on every process.

    Raises:
        AuditError: a block released a wrong number of vectors, or vectors with a different size than the basis.
    """
    processes = Processes() if processes is None else processes
    included_RM = processes.from_main(
        lambda: secret_rng().integers(0, 2, (design.num_blocks, design.num_canaries)).astype(bool)
    )
    canary_RTM, base_RT, alike_R2, noise_RTD, moved_RT, average_RM = [], [], [], [], [], []
    for included_M in included_RM:
        present_N = np.zeros(population, dtype=bool)
        present_N[: design.num_base] = True
        present_N[design.canaries] = included_M
        released = list(release(present_N))
        if len(released) != design.steps_per_block or released[0].shape != basis.base_P.shape:
            raise AuditError(
                f"A block released {len(released)} vectors of {released[0].numel() if released else 0} entries, but "
                f"{design.steps_per_block} of {basis.base_P.numel()} are expected: the trained model is not the one "
                "whose gradients were computed"
            )
        wide_TP = torch.stack([vector.to(basis.base_P) for vector in released])
        canary_RTM.append((wide_TP @ basis.canary_MP.T).cpu().numpy())
        base_RT.append((wide_TP @ basis.base_P).cpu().numpy())
        alike_R2.append(_most_alike(wide_TP))
        noise_RTD.append((wide_TP @ basis.noise_DP.T).cpu().numpy())
        moved_RT.append(getattr(release, "moved", []))
        if (averaged := getattr(release, "averaged", None)) is not None:
            average_RM.append((averaged.to(basis.base_P) @ basis.canary_MP.T).cpu().numpy())
        on_block()
    alike = np.array(alike_R2, dtype=np.int64)
    noise = np.stack(noise_RTD) if len(basis.noise_DP) else None
    moved = np.array(moved_RT, dtype=np.float64)
    return Observations(
        included_RM,
        np.stack(canary_RTM),
        np.stack(base_RT),
        alike,
        noise,
        moved if moved.size else None,
        np.stack(average_RM) if average_RM else None,
    )


def _most_alike(wide_TP: Tensor) -> tuple[int, int]:
    """Return the two steps whose releases are nearest to each other."""
    if len(wide_TP) < 2:
        return 0, 0
    distance_TT = torch.cdist(wide_TP, wide_TP, compute_mode="donot_use_mm_for_euclid_dist")
    distance_TT.fill_diagonal_(torch.inf)
    first, second = divmod(int(distance_TT.argmin()), len(wide_TP))
    return first, second


def _check_plain_sgd(optimizer: torch.optim.Optimizer) -> None:
    """Check that the release can be computed from the change of the parameters.

    Raises:
        AuditError: the optimizer is not plain SGD.
    """
    options = ("momentum", "weight_decay", "nesterov", "maximize", "dampening")
    plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group.get(name) for group in optimizer.param_groups for name in options
    )
    if not plain:
        raise AuditError(
            f"A release or an average is computed from the parameters' change, but {type(optimizer).__name__} with its "
            "settings changes them by more than the gradient. Audit with torch.optim.SGD without momentum"
        )


def judge_releases(
    seen: Observations, plan: PrivacyPlan, design: Design, setup: str, confidence: float = CONFIDENCE
) -> AuditResult:
    """Run all attacks on the observations.

    The claim is ε of the steps of one block, by the plan's accountant, under zero-out.

    Guarantee: if every block follows the plan, the verdict is FAIL with a probability of at most 1 - ``confidence``.

    Args:
        seen: the observations of `observe`.
        plan: the plan of the run.
        design: the design of the audit.
        setup: a readable description of the audited stack.
        confidence: confidence of the verdict.

    Raises:
        AuditError: there are too few blocks to show anything.
    """
    history = [(plan.event, num_steps) for num_steps in design.starts]
    tried = scores_of(seen, plan, design)
    coins = seen.included_RM.ravel()
    several = design.num_canaries > 1
    bounded = len(tried) * (2 if several else 1)
    tests = bounded + (seen.noise_RTD is not None)  # the test of the noise also gets a share of the error
    others = int((~coins).sum())
    rates = shown_rates(RATES, others)
    level = tpr_confidence(confidence, len(tried), len(rates))
    blocks_R = np.arange(design.num_blocks)
    one_each = blocks_R, blocks_R % design.num_canaries
    attacks = []
    for name, score_RM in tried.items():
        scores = score_RM.ravel()
        bounds = trial_bounds(score_RM[one_each], seen.included_RM[one_each], plan.delta, confidence, history, tests)
        if several:
            bounds = bounds + one_run_bounds(scores, coins, plan.delta, confidence, history, tests)
        tpr = {rate: tpr_at(scores, coins, rate, level) for rate in rates}
        attacks.append(AttackResult(name=name, auroc=auroc(scores, coins), tpr=tpr, bounds=tuple(bounds)))
    return AuditResult(
        claimed_epsilon=epsilon(history, plan.delta),
        delta=plan.delta,
        unit=plan.unit,
        adjacency="zero-out",
        canaries=AuditedCanaries(kind="units whose gradient is known", num=len(coins), num_included=int(coins.sum())),
        confidence=confidence,
        attacks=tuple(attacks),
        tpr_bounds=allowed_rates(history, rates, others, level),
        power=power(
            history,
            plan.delta,
            in_one_run=len(coins) if several else 0,
            in_trials=design.num_blocks,
            confidence=confidence,
            tests=tests,
        ),
        noise=None
        if seen.noise_RTD is None
        else NoiseTest.of(white(seen.noise_RTD, plan, design), plan.noise_stddev, (1 - confidence) / tests),
        details={
            "audited": setup,
            "blocks": f"{design.num_blocks:,} of {design.steps_per_block} step(s), {design.num_canaries} canaries each",
            "each step": f"{_drawn(plan)}, σ = {plan.noise_multiplier:g}, C = {plan.clip_norm:g}",
            **({} if design.average is None else {"released": design.average.words(design.steps_per_block)}),
        },
    )


def _drawn(plan: PrivacyPlan) -> str:
    if not plan.mechanism.noise.is_sampled:
        return f"b/N = {plan.sampling_rate:g} (units in a fixed order, not sampled)"
    return f"q = {plan.sampling_rate:g}"


def scores_of(seen: Observations, plan: PrivacyPlan, design: Design) -> dict[str, NDArray[np.float64]]:
    """Return (R, M) scores of every attack that applies to this number of steps.

    Raises:
        AuditError: the observations do not match the design.
    """
    expected = (design.num_blocks, design.steps_per_block, design.num_canaries)
    if seen.canary_RTM.shape != expected:
        raise AuditError(f"The observations have shape {seen.canary_RTM.shape}, but the design needs {expected}")
    canary_RTM = seen.canary_RTM
    strategy_TT = strategy(plan, design)
    gram_TT = strategy_TT.T @ strategy_TT
    shown_RTM, base_RT = (np.einsum("tv,rv...->rt...", gram_TT, x) for x in (canary_RTM, seen.base_RT))
    found = {"total": shown_RTM.sum(1), "others": _of_all(-base_RT.sum(1), design)}
    groups = plan.mechanism.noise.separation(plan.mechanism.draw)
    if groups > 1:
        group_RGM, base_RG = (_by_group(x, groups, design) for x in (shown_RTM, base_RT))
        found["one group"] = group_RGM.max(1)
        later_R = base_RG[:, 1:].mean(1) - base_RG[:, 0]
        found |= {"others later": _of_all(later_R, design), "others earlier": _of_all(-later_R, design)}
    if seen.moved_RT is not None:
        up_R = (seen.moved_RT @ gram_TT).sum(1)
        found |= {"threshold up": _of_all(up_R, design), "threshold down": _of_all(-up_R, design)}
    found |= _of_average(seen, design)
    if design.steps_per_block > 1:
        blocks_R = np.arange(design.num_blocks)
        first_RM, second_RM = (canary_RTM[blocks_R, seen.alike_R2[:, which]] for which in (0, 1))
        found["repeated noise"] = np.abs(first_RM - second_RM)
        if groups == 1 and design.steps_per_block == math.ceil(plan.population / plan.expected_batch_size):
            for name, order_N in known_orders(plan.population).items():
                place_N = np.argsort(order_N) // plan.expected_batch_size
                found[f"known order ({name})"] = np.stack(
                    [canary_RTM[:, place_N[unit], number] for number, unit in enumerate(design.canaries)], axis=1
                )
    return found


def strategy(plan: PrivacyPlan, design: Design) -> NDArray[np.float64]:
    """Return M of a block's steps, (T, T): a separate one for each start."""
    found_TT = np.zeros((design.steps_per_block, design.steps_per_block))
    first = 0
    for num_steps in design.starts:
        column = np.zeros(num_steps)
        given = plan.mechanism.noise.column(plan.num_steps)[:num_steps]
        column[: len(given)] = given
        one = slice(first, first + num_steps)
        found_TT[one, one] = linalg.toeplitz(column, np.zeros(num_steps))
        first += num_steps
    return found_TT


def white(noise_RTD: NDArray[np.float64], plan: PrivacyPlan, design: Design) -> NDArray[np.float64]:
    """Return M times the noise of each block: independent over steps, with standard deviation σC."""
    return np.einsum("ts,rsd->rtd", strategy(plan, design), noise_RTD)


def _of_all(score_R: NDArray[np.float64], design: Design) -> NDArray[np.float64]:
    """Return a block's score for each of its canaries."""
    return np.repeat(score_R[:, None], design.num_canaries, axis=1)


def _of_average(seen: Observations, design: Design) -> dict[str, NDArray[np.float64]]:
    """Return the scores of the released average, which is Σ_t a_t Σ_(s<=t) release_s if it averages the iterates."""
    if seen.average_RM is None or design.average is None:
        return {}
    own_T = weights_of(design.average, design.steps_per_block)
    earlier_T = np.cumsum(own_T[::-1])[::-1] - own_T
    earlier_RM = np.einsum("t,rtm->rm", earlier_T, seen.canary_RTM)
    found = {"average": seen.average_RM}
    return found | ({"average, earlier noise known": seen.average_RM - earlier_RM} if earlier_T.any() else {})


def _by_group(shown_RT: NDArray[np.float64], num_groups: int, design: Design) -> NDArray[np.float64]:
    """Return the sums over the steps of each group; the steps of each start cycle through the groups."""
    groups = [number % num_groups for num_steps in design.starts for number in range(num_steps)]
    return np.stack([shown_RT[:, np.array(groups) == group].sum(1) for group in range(num_groups)], axis=1)


def known_orders(num_units: int) -> dict[str, NDArray[np.int64]]:
    """Return the public orders in which units may come: order[i] is the unit at position i.

    >>> known_orders(4)["by number"].tolist()
    [0, 1, 2, 3]
    """
    stock = torch.randperm(num_units, generator=torch.Generator().manual_seed(0)).numpy()
    return {"by number": np.arange(num_units), "DistributedSampler's": stock}
