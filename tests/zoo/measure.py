"""Clips one class at toy size, and compares with a float64 loop of one row at a time.

The model is in float64 and in training mode, without dropout. Each row of the loop is alone and without padding, so the
comparison also finds rows that depend on each other or on padding.

Shape suffixes: B rows, P trainable entries.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import peft
import torch
from torch import Tensor, nn

from dpllm import GhostClipper, PerUnitClipper, PrivateRun
from dpllm.ghost import GhostError
from dpllm.training.checks.independence import IndependenceError
from tests.benchmarks.material import program
from tests.memory_ledger import MemoryLedger
from tests.small_model import rows_by_number

from .tasks import TASKS, Batch, collate, losses, rows_of
from .toy import NUM_LABELS, toy_config

independence = program("independence")
LARGEST = 3_000_000
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
MODES = ("full", "lora")
NOT_ADAPTED = ("router", "o_a_proj", "classifier", "pre_classifier", "score", "qa_outputs")
"""Layers that LoRA leaves out: linear layers that return a tuple or work on groups, and heads, which are trained."""
MAMBA_MODELS, MAMBA_LAYERS = (
    ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"),
    ["out_proj", "conv1d"],
)  # that PEFT refuses


@dataclass(frozen=True)
class Result:
    """The result of one method of clipping.

    Attributes:
        kind: "exact", "refused", "wrong" or "crash".
        reason: why it is not exact.
        error: the largest relative error of norms and sum.
        rung: of `RUNGS`, the highest that a parameter needs; "" for a method that has none.
    """

    kind: str
    reason: str = ""
    error: float = 0.0
    rung: str = ""


@dataclass(frozen=True)
class Outcome:
    """The results for one class in one mode.

    Attributes:
        task: key of `TASKS`.
        name: of the class.
        mode: "full" or "lora".
        results: of each method; empty for a class that is not built.
        not_built: the reason, "" for a class that is built.
        unused: number of parameters that have no part in the loss, which were frozen.
        seconds: of the processor, building included.
    """

    task: str
    name: str
    mode: str
    results: Mapping[str, Result] = field(default_factory=dict)
    not_built: str = ""
    unused: int = 0
    seconds: float = 0.0


RUNGS = ("taps", "functions", "row by row")
"""All parameters are tapped; some are, where a module hands them to a function; some modules run one row at a time."""


class NotBuilt(Exception):
    """The class cannot be built or called at toy size."""


class NotCallable(NotBuilt):
    """The class was built and cannot be called with rows of text."""


def build(task: str, name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the model of a class, in training mode, no parameter at a special initial value.

    Raises:
        NotBuilt: with the reason.
    """
    try:
        kind = TASKS[task].model_class(name)
        more: dict[str, Any] = {"num_labels": NUM_LABELS} if task.endswith("classification") else {}
        config = toy_config(kind.config_class, **more)
        text = config.get_text_config()
        if task == "causal_lm" and getattr(text, "is_decoder", None) is False:
            text.is_decoder = True
        if not isinstance(getattr(text, "pad_token_id", None), int):
            text.pad_token_id = 0
        config.pad_token_id = text.pad_token_id
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = text.pad_token_id
        with torch.device("meta"):
            size = sum(p.numel() for p in kind._from_config(config).parameters())
        if size > LARGEST:
            raise NotBuilt(f"{size} parameters at toy size")
        torch.manual_seed(0)
        # "grouped_mm", the default, has no float64.
        model = kind._from_config(config, experts_implementation="eager")
    except NotBuilt:
        raise
    except Exception as error:  # the class's own code, with sizes that it may not allow
        raise NotBuilt(_words(error)) from error
    model = model.to(dtype).train()
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype))
    return model


def with_lora(make: Callable[[], nn.Module], task: str) -> nn.Module:
    """Return the model with LoRA on all linear layers and experts, but not on routers, no factor at 0.

    For some mixtures of experts, PEFT's "all-linear" includes the router's weight. It is then left out by name.

    Raises:
        NotBuilt: PEFT refuses.
    """
    model, left_out = make(), list(NOT_ADAPTED)
    if getattr(model.config, "model_type", "") in MAMBA_MODELS:
        left_out += MAMBA_LAYERS
    try:
        config = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=left_out, task_type=TASKS[task].peft)
        adapted = peft.get_peft_model(model, config)
        experts = sorted(name for name in config.target_parameters or () if "gate." not in name)
        if len(experts) < len(config.target_parameters or ()):
            modules = sorted(config.target_modules or ())
            config = peft.LoraConfig(r=2, target_modules=modules, target_parameters=experts, task_type=TASKS[task].peft)
            model = make()
            adapted = peft.get_peft_model(model, config)
    except Exception as error:  # PEFT and the class's own code
        raise NotBuilt(f"PEFT: {_words(error)}") from error
    generator, dtype = torch.Generator().manual_seed(0), model.dtype
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.to(dtype)
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype))
    return adapted


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, each once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def reference(model: nn.Module, task: str, rows: list[Batch]) -> tuple[Tensor, set[str]]:
    """Return the gradient of each row alone, (B, P), and the names of parameters that have no part in any loss.

    Raises:
        NotCallable: the class cannot be called with these rows, or a loss or gradient is not finite.
    """
    model = copy.deepcopy(model)
    found, unused = [], set(trainable(model))
    for row in rows:
        model.zero_grad(set_to_none=True)
        try:
            losses(model, task, row).sum().backward()
        except Exception as error:  # the class's own code
            raise NotCallable(f"cannot be called: {_words(error)}") from error
        unused -= {name for name, p in trainable(model).items() if p.grad is not None}
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model).values()])
    kept = [number for number, name in enumerate(trainable(model)) if name not in unused]
    rows_BP = torch.stack([torch.cat([row[n].flatten() for n in kept]).double() for row in found])
    if not bool(torch.isfinite(rows_BP).all()):
        raise NotCallable("a gradient of one row is not finite")
    return rows_BP, unused


class Clipped(NamedTuple):
    """Norms and factors (B,) in float64, and the rung of the ladder; the sum is in ``.grad``."""

    norms: Tensor
    factors: Tensor
    rung: str = ""


def ghost(model: nn.Module, task: str, rows: list[Batch], pad: int, clip_norm: float) -> Clipped:
    """Clip all rows of one padded batch in one backward pass."""
    clipper = GhostClipper(model, clip_norm)
    try:
        result = clipper.backward(losses(model, task, collate(rows, pad)))
        rung = rung_of(model, clipper)
    finally:
        clipper.remove()
    return Clipped(result.norms.double(), result.factors.double(), rung)


def rung_of(model: nn.Module, clipper: GhostClipper) -> str:
    """Return the highest rung that a parameter of the model needs; see `dpllm.ghost.attach`."""
    if clipper.row_by_row:
        return "row by row"
    wrapped = any({"_tap_functions", "_tap_forward"} & vars(module).keys() for module in model.modules())
    return "functions" if wrapped else "taps"


def per_unit(model: nn.Module, task: str, rows: list[Batch], pad: int, clip_norm: float) -> Clipped:
    """Clip one row after another."""
    clipper = PerUnitClipper(model, clip_norm)
    try:
        results = [clipper.backward(losses(model, task, collate([row], pad))) for row in rows]
    finally:
        clipper.remove()
    norms, factors = [one.norms for one in results], [one.factors for one in results]
    return Clipped(torch.cat(norms).double(), torch.cat(factors).double())


METHODS: dict[str, Callable[[nn.Module, str, list[Batch], int, float], tuple]] = {
    "ghost": ghost,
    "per_unit": per_unit,
}


def measure(task: str, name: str, mode: str) -> Outcome:
    """Build a class, clip three rows by each method, and compare.

    In float64; in float32 if the class cannot compute in float64.
    """
    start = time.process_time()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            try:
                results, unused = _measured(task, name, mode, torch.float64)
            except NotCallable:
                results, unused = _measured(task, name, mode, torch.float32)
        except NotBuilt as why:
            return Outcome(task, name, mode, not_built=str(why), seconds=time.process_time() - start)
    return Outcome(task, name, mode, results, unused=unused, seconds=time.process_time() - start)


def _measured(task: str, name: str, mode: str, dtype: torch.dtype) -> tuple[dict[str, Result], int]:
    """Return the results, and the number of unused parameters."""
    model = with_lora(lambda: build(task, name, dtype), task) if mode == "lora" else build(task, name, dtype)
    rows = rows_of(task, model)
    rows_BP, unused = reference(model, task, rows)
    for parameter_name in unused:
        model.get_parameter(parameter_name).requires_grad_(False)
    return {method: _result(method, model, task, rows, rows_BP) for method in METHODS}, len(unused)


def _result(method: str, model: nn.Module, task: str, rows: list[Batch], rows_BP: Tensor) -> Result:
    """Compare one method with the gradients of single rows, some of which are clipped and some not."""
    norms = rows_BP.norm(dim=1)
    pad = int(model.config.get_text_config().pad_token_id)  # type: ignore[union-attr,operator,arg-type]
    model.zero_grad(set_to_none=True)
    try:
        found = Clipped(*METHODS[method](model, task, rows, pad, float(norms.median()) * (1 + 1e-9)))
    except GhostError as error:
        return Result("refused", first_sentence(str(error)))
    except Exception as error:  # of torch or of the class, in a pass that ran before without a clipper
        return Result("crash", _words(error))
    total = torch.cat([p.grad.flatten().double() for p in trainable(model).values()])  # type: ignore[union-attr]
    expected = found.factors @ rows_BP
    worst = max(float(((found.norms - norms) / norms).abs().max()), float((total - expected).norm() / expected.norm()))
    if worst <= TOLERANCE[model.dtype]:
        return Result("exact", error=worst, rung=found.rung)
    refusal = ""
    if method == "ghost":
        refusal = refusal_by_run(model, task, rows, pad)
        if not refusal and (refusal := refusal_by_run(larger(model), task, rows, pad)):
            refusal = FOUND_WITH_LARGER_WEIGHTS
    return Result("refused" if refusal else "wrong", refusal, worst)


FOUND_WITH_LARGER_WEIGHTS = "the loss of a row depends on other rows, which a run finds only with larger weights"


def larger(model: nn.Module) -> nn.Module:
    """Return a copy with larger weights, so that a dependence of rows on each other is larger too."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise.to(parameter.dtype))
    return model


def refusal_by_run(model: nn.Module, task: str, rows: list[Batch], pad: int) -> str:
    """Return the reason for which a run refuses the model before its first step, "" if it does not.

    A run compares the rows of its first steps alone and in company.
    """
    examples = [{name: value[0] for name, value in row.items()} for row in rows]
    model.zero_grad()
    lengths = [len(example["input_ids"]) for example in examples]
    given = rows_by_number(rows, lambda taken: collate(taken, pad), lengths, max_rows=len(rows))
    run = PrivateRun(independence.plan_of(len(rows), len(rows)), given, MemoryLedger())
    run.attach(model, torch.optim.SGD(trainable(model).values(), lr=0.0))
    try:
        run._check_rows(run._attached, lambda net, batch: losses(net, task, batch), None)
    except IndependenceError as error:
        return first_sentence(str(error))
    finally:
        run.detach()
    return ""


def first_sentence(message: str) -> str:
    """Return the first sentence of an error, with numbers of layers left out."""
    sentence = re.split(r"(?<=[a-z0-9)\]}])\. |: see | \(dropout off", message, maxsplit=1)[0].rstrip(".")
    return re.sub(r"(?<=[A-Za-z_])(\.\d+)+", ".N", sentence.removeprefix("base_model.model."))[:300]


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
