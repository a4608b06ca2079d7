"""The methods that throughput.py measures: training without privacy, this package, and libraries of others.

Each is a `Step` on a model of its own. A step is forward, backward and, for the DP methods, norms and clipped sum; no
noise, no optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import io
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpllm.data.labels import IGNORE
from dpllm.engines.base import SingleProcess
from dpllm.ghost import GhostClipper, NormMethod
from dpllm.mechanism.clipping import FlatClipping, PerLayerClipping
from dpllm.mechanism.parts import Clipping
from dpllm.models.losses import per_sequence_loss
from dpllm.models.tasks import default_row_loss
from dpllm.training.row_losses import HeadLosses, RowLosses

CLIP_NORM = 1.0
PLAIN, OURS, TWICE, LAYERS = "non-private", "dpllm", "dpllm-two-passes", "dpllm-per-layer"
COMPILED, OURS_COMPILED = "non-private-compiled", "dpllm-compiled"
OPACUS, FASTDP = "opacus", "fastdp"
PEERS = {OPACUS: "opacus", FASTDP: "fastDP"}  # libraries of others, and the packages that they are in


class Step:
    """One method on a model of its own: forward, backward, gradients left in ``.grad``."""

    def __init__(self, model: nn.Module) -> None:
        """Take the model over."""
        self.model = model
        self.norms: Tensor | None = None

    def run(self, ids_BT: Tensor) -> None:
        """One step without privacy."""
        per_sequence_loss(self.model(input_ids=ids_BT).logits, ids_BT).mean().backward()

    def forget(self) -> None:
        """Free the gradients."""
        for p in self.model.parameters():
            p.grad = None


class GhostStep(Step):
    """This package: norms and clipped sum from one backward pass, and gradients as the engine of one process leaves."""

    def __init__(
        self, model: nn.Module, norm_method: NormMethod | None = None, clipping: Clipping | None = None
    ) -> None:
        """Attach the hooks."""
        super().__init__(model)
        self.clipper = GhostClipper(model, None, norm_method, clipping or FlatClipping(CLIP_NORM))
        self.engine = SingleProcess(torch.optim.SGD(self.clipper.parameters.values(), lr=0.0))
        self.engine.guard.done = True  # its check of the first step is not measured
        head = HeadLosses()
        head.clipper = self.clipper
        self.losses = RowLosses(default_row_loss(model), packed=False, head=head)

    def prepare(self, ids_BT: Tensor) -> None:
        """Run the first step, in which taps and head are compared with the model as it is; this is not measured."""
        self.run(ids_BT)
        self.forget()

    def run(self, ids_BT: Tensor) -> None:
        """One DP step, noise left out."""
        losses_B = self.losses(self.model, {"input_ids": ids_BT, "labels": ids_BT})
        scale = 1 / ids_BT.shape[0]

        add_to = self.clipper.add_clipped_sum_
        self.norms = self.clipper.clip(losses_B, finish=lambda p: self.engine.early.finish(p, add_to, scale)).norms
        self.engine.collect(self.clipper.parameters, add_to, last=True, scale=scale)


class OpacusStep(Step):
    """Opacus' ghost clipping, used as its documentation shows: a wrapped criterion whose backward runs two passes."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap the model, the optimizer (which never steps) and the criterion."""
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True, loss_reduction="mean", strict=False
        )
        super().__init__(wrapped)
        trainable = [p for p in wrapped.parameters() if p.requires_grad]
        optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(trainable, lr=0.0),
            noise_multiplier=0.0,
            max_grad_norm=CLIP_NORM,
            expected_batch_size=1,
            loss_reduction="mean",
        )
        criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)
        self.criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion, "mean")

    def run(self, ids_BT: Tensor) -> None:
        """One step up to the clipped sum."""
        logits_BTV = self.model(input_ids=ids_BT).logits[:, :-1].float()
        targets = ids_BT[:, 1:].flatten()
        self.criterion(logits_BTV.flatten(0, 1), targets, shape=logits_BTV.shape).backward()
        self.norms = self.model.per_sample_gradient_norms


class FastDPStep(Step):
    """fastDP's book-keeping (MixOpt): hooks that leave the clipped sum in ``private_grad`` during one backward pass.

    It does not support RMSNorm and leaves its weights untrained, without an error, so on such a model it does less.
    """

    def __init__(self, model: nn.Module) -> None:
        """Attach the hooks, with its way of leaving unclipped gradients out where all weights are trained."""
        import fastDP

        super().__init__(model)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        first = [name for name in names if "embed_tokens" in name]
        with contextlib.redirect_stdout(io.StringIO()):
            fastDP.PrivacyEngine(
                model,
                batch_size=1,
                sample_size=1000,
                epochs=1,
                noise_multiplier=0.0,
                max_grad_norm=CLIP_NORM,
                clipping_fn="Abadi",
                clipping_mode="MixOpt",
                origin_params=first or None,
            )

    def run(self, ids_BT: Tensor) -> None:
        """One step up to the clipped sum."""
        super().run(ids_BT)
        if not any(hasattr(p, "private_grad") for p in self.model.parameters()):
            raise RuntimeError("fastDP left no clipped sum.")

    def forget(self) -> None:
        """Free the gradients, its own among them."""
        super().forget()
        for p in self.model.parameters():
            if hasattr(p, "private_grad"):
                del p.private_grad


def own(model: nn.Module, name: str = OURS, fused: bool | None = None) -> Step:
    """Return a step of this package.

    Args:
        model: the model.
        name: one of `OWN`. `TWICE` has a second backward pass for the sum and keeps one layer's factors at a time;
            `LAYERS` clips per layer and forms a layer's sum in the backward pass.
        fused: False: the PyTorch forms instead of the Triton kernels.
    """
    clipping = PerLayerClipping(CLIP_NORM) if name == LAYERS else FlatClipping(CLIP_NORM)
    return GhostStep(model, NormMethod(fused=fused, backward_passes=2 if name == TWICE else "auto"), clipping)


def compile_blocks(model: nn.Module, backend: str = "inductor", dynamic: bool | None = False) -> nn.Module:
    """Compile the forward of each class of blocks once, in place, and return the model.

    Blocks are the children of the outermost lists of modules. One graph serves all blocks of a class.

    Args:
        model: a transformer.
        backend: of ``torch.compile``.
        dynamic: as for ``torch.compile``; None: a dimension becomes symbolic when it changes.
    """
    compiled: dict[type, Callable[..., Tensor]] = {}
    for block in blocks_of(model):
        kind = type(block)
        if kind not in compiled:
            compiled[kind] = torch.compile(kind.forward, backend=backend, dynamic=dynamic)
        block.forward = types.MethodType(compiled[kind], block)
    return model


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the children of the outermost lists of modules, in order."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [block for child in module.children() for block in blocks_of(child)]


OWN = (OURS, TWICE, LAYERS)
METHODS: dict[str, Callable[[nn.Module], Step]] = {
    PLAIN: Step,
    **{name: functools.partial(own, name=name) for name in OWN},
    OPACUS: OpacusStep,
    FASTDP: FastDPStep,
}
