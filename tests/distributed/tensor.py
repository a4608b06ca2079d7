"""The program in the processes of `test_tensor_parallel`: models that transformers' ``tp_plan`` divides.

Every process also computes the result of one process in float64, from the same weights, to compare with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

from dpllm import GhostClipper, PrivateRun, TrainingRows, per_sequence_loss
from dpllm.data.units import UnitIndex
from dpllm.engines.processes import Processes
from dpllm.ghost import NormMethod
from dpllm.mechanism.averages import average_of
from dpllm.training.averaging import Averaging
from dpllm.training.checks.independence import IndependenceCheck
from tests.conftest import tiny_llama_config
from tests.distributed.checks import caught
from tests.distributed.matrix import plan_of
from tests.reference.zoo import enable_checkpointing
from tests.training.test_trainer import small_trainer

UNITS, ROWS, VOCABULARY = 7, 10, 51
OWNERS = [0, 0, 0, 1, 2, 3, 4, 4, 5, 6]
LENGTHS = [5, 9, 4, 7, 3, 8, 6, 2, 9, 5]
LR, CLIP_NORM = 1e-3, 0.5
SIZES = {
    "vocab_size": VOCABULARY,  # odd: the processes have shards of other sizes
    "hidden_size": 16,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
LORA = LoraConfig(r=3, target_modules=TARGETS, lora_alpha=6)
CASES = ("qwen3", "llama-tied", "qwen3-lora")


def build(case: str) -> nn.Module:
    """An untrained model in float64 with weights of ordinary size, norms and biases included."""
    torch.manual_seed(0)
    model: Any
    if case.startswith("qwen3"):  # the gradients of its q_norm and k_norm are in parts
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))
    else:  # a bias after the sum over processes is whole; the tied table is used twice
        tied = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **tied))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double()


def divided(case: str, folder: Path, plan: Any = "auto", base: Callable[[], nn.Module] | None = None) -> Any:
    """The same model as transformers loads and divides it."""
    made = base() if base else build(case)
    if dist.get_rank() == 0:
        made.save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
    return adapted(case, type(made).from_pretrained(folder, dtype=torch.float64, distributed_config=config))


def adapted(case: str, model: Any, mended: bool = True) -> Any:
    """Add adapters whose two factors have weights, the same in a divided model and in a whole one."""
    if not case.endswith("lora"):
        return model
    model = get_peft_model(model, LORA)
    for module in model.modules() if mended else ():  # PEFT 0.21 notes the features of this process there
        if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor):
            module.in_features = module.weight.shape[1]
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(number)
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 5
            write(parameter, value)
            assert ("lora_A" in name) or ("lora_B" in name)
    return model


def write(parameter: Any, value: Tensor) -> None:
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            local, start = parameter.to_local(), dist.get_rank() * -(-value.shape[dim_of(parameter)] // 2)
            local.copy_(value.narrow(dim_of(parameter), start, local.shape[dim_of(parameter)]))
        else:
            parameter.copy_(value)


def dim_of(parameter: Any) -> int:
    """The dimension along which a parameter is divided; 0 if it is not."""
    (placement,) = parameter.placements
    return getattr(placement, "dim", 0)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters, put together."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def data(max_rows: int = 3, other: int = 0, labels: int = 0) -> TrainingRows:
    """Rows of text; ``other`` and ``labels`` are added to the last token of each, or of its labels."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, VOCABULARY - 2, (length,), generator=generator) for length in LENGTHS]

    def collate(some: list[Tensor]) -> dict[str, Tensor]:
        ids = torch.zeros(len(some), max(map(len, some)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(some):
            ids[place, : len(row)], mask[place, : len(row)] = row, 1
        targets = ids.masked_fill(mask == 0, -100)
        last = mask.sum(1, keepdim=True) - 1
        ids.scatter_add_(1, last, torch.full_like(last, other))
        targets.scatter_add_(1, last, torch.full_like(last, labels))
        return {"input_ids": ids, "attention_mask": mask, "labels": targets}

    return TrainingRows(
        units=UnitIndex.from_ids(OWNERS),
        lengths=np.array(LENGTHS),
        fetch=lambda numbers: [rows[int(number)] for number in numbers],
        collate=collate,
        max_rows=max_rows,
    )


def loss_of(model: Any, inputs: Any) -> Tensor:
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    return per_sequence_loss(model(**inputs).logits, labels)


def batch() -> tuple[dict[str, Tensor], Tensor]:
    rows = data()
    return dict(rows.collate(rows.fetch(np.arange(ROWS)))), torch.tensor(OWNERS)


def reference(model: nn.Module, clip_norm: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms (U,) and the clipped sum, by autograd of single units in float64."""
    inputs, unit_B = batch()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums, norms = {name: torch.zeros_like(p) for name, p in parameters.items()}, []
    for unit in range(UNITS):
        rows = unit_B == unit
        loss = loss_of(model, {name: value[rows] for name, value in inputs.items()}).sum()
        grads = torch.autograd.grad(loss, list(parameters.values()))
        norms.append(torch.cat([g.flatten() for g in grads]).norm())
        for total, grad in zip(sums.values(), grads, strict=True):
            total += grad * min(1.0, clip_norm / float(norms[-1]))
    return torch.stack(norms), sums


def released(before: dict[str, Tensor], after: dict[str, Tensor], scale: float) -> Tensor:
    return torch.cat([(before[name] - after[name]).flatten() for name in before]) / scale


def sums(root: Path) -> dict[str, tuple[float, float, float, str]]:
    """Of each case: errors of the norms and of the release, its norm over C, and the engine."""
    found = {}
    for case in CASES:
        if case != CASES[0]:
            without_comparison()
        alone = adapted(case, build(case))
        norms, expected = reference(alone, CLIP_NORM)
        model = divided(case, root / f"{case} model")
        clipper = GhostClipper(model, CLIP_NORM)
        inputs, unit_B = batch()
        error = (clipper.clip(loss_of(model, inputs), unit_B).norms / norms - 1).abs().max()
        clipper.remove()
        plan = plan_of(CLIP_NORM, 0.0, num_units=UNITS, num_steps=2, batch_size=UNITS, **USERS)
        run = PrivateRun.start(root / case, plan, data())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
        run.attach(model, optimizer)
        if case == "llama-tied":
            enable_checkpointing(model.train(), "non-reentrant")  # layers and their collectives run again
        name, before = run.engine_name, whole(model)
        done = run.step(run.choose(np.arange(UNITS)), loss_of)
        optimizer.step()
        optimizer.zero_grad()
        assert done.num_units == UNITS and done.num_nonfinite == 0
        moved = released(before, whole(model), LR / UNITS)
        wanted = torch.cat([value.flatten() for value in expected.values()])
        before = whole(model)
        run.step(run.choose(np.array([5])), loss_of)  # one unit, whose gradient is longer than C
        optimizer.step()
        optimizer.zero_grad()
        one = released(before, whole(model), LR / UNITS)
        run.check_before_saving()
        saved = root / f"{case} saved"
        model.save_pretrained(saved)
        run.finish()
        dist.barrier()
        if not case.endswith("lora"):
            again = type(alone).from_pretrained(saved, dtype=torch.float64)
            assert all(torch.equal(p, whole(model)[n]) for n, p in again.named_parameters()), case
        found[case] = (
            float(error),
            float((moved - wanted).norm() / wanted.norm()),
            float(one.norm() / CLIP_NORM),
            name,
        )
    return found


USERS: dict[str, Any] = {"unit": "user", "max_rows_per_unit": 3, "unit_column": "who"}


def without_comparison() -> None:
    """Leave the comparison of rows alone and in company out from here on, as the fixture ``rows_not_compared`` does."""
    IndependenceCheck.before_step = lambda *_, **__: None  # type: ignore[method-assign]


def noise(root: Path, steps: int = 3, noise_multiplier: float = 2.0) -> dict[str, Any]:
    """The releases of steps without units: of the divided parameters, of the others here, and of the whole model."""
    without_comparison()
    plan = plan_of(CLIP_NORM, noise_multiplier, num_units=UNITS, num_steps=steps, **USERS)
    model = divided("qwen3", root / "model")
    run = PrivateRun.start(root / "noisy", plan, data())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    run.attach(model, optimizer)
    here, everywhere = [], []
    for _ in range(steps):
        before, local = whole(model), [held(p).clone() for p in model.parameters()]
        run.step(next(run.draws(1, np.zeros(UNITS, dtype=bool))), loss_of)
        optimizer.step()
        optimizer.zero_grad()
        everywhere.append(released(before, whole(model), LR / UNITS).numpy() / plan.noise_stddev)
        common = [
            (was - held(p)).flatten()
            for was, p in zip(local, model.parameters(), strict=True)
            if not isinstance(p, DTensor)
        ]
        here.append(torch.cat(common).numpy())
    run.finish()
    mine = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    size = sum(held(p).numel() for n, p in model.named_parameters() if n in mine)
    return {"common": here, "released": everywhere, "divided": size, "epsilon": plan.epsilon}


def held(parameter: Any) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def refusals(root: Path) -> dict[str, tuple[str, str] | None]:
    """What a stranger does through public functions, and the error of this process."""
    without_comparison()
    here = Processes()
    model = divided("qwen3", root / "model")
    inputs, unit_B = batch()

    def attached(model: Any, name: str, rows: TrainingRows | None = None, **options: Any) -> PrivateRun:
        plan = plan_of(CLIP_NORM, 0.0, num_units=UNITS, num_steps=2, batch_size=UNITS, **USERS)
        run = PrivateRun.start(root / name, plan, rows or data())
        run.attach(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR), **options)
        return run

    def stepped(model: Any, name: str, rows: TrainingRows | None = None) -> None:
        run = attached(model, name, rows)
        try:
            run.step(run.choose(np.arange(UNITS)), loss_of)
        finally:
            run.detach()

    def clipped(model: Any, unit_B: Tensor, inputs: dict[str, Tensor]) -> None:
        clipper = GhostClipper(model, CLIP_NORM)
        try:
            clipper.clip(loss_of(model, inputs), unit_B)
        finally:
            clipper.remove()

    def summed(model: Any) -> None:
        GhostClipper(model, CLIP_NORM).backward(loss_of(model, inputs))

    def planned(styles: dict[str, str]) -> Any:
        return divided("qwen3", root / "model", plan=styles)

    def one_head() -> nn.Module:
        return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "num_key_value_heads": 1}, tie_word_embeddings=False)).double()

    def by_torch() -> nn.Module:
        plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)).double()
        mesh = init_device_mesh("cpu", (here.size,), mesh_dim_names=("tp",))
        return parallelize_module(plain, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})

    def edited() -> Any:
        other = divided("qwen3", root / "model")
        with torch.no_grad():
            other.model.norm.weight.mul_(1 + here.rank)
        return other

    def kept_whole() -> Any:
        targets = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["q_norm"])
        return get_peft_model(divided("qwen3", root / "model"), targets)

    def over_two_dimensions() -> Any:
        other = divided("qwen3", root / "model")
        mesh = init_device_mesh("cpu", (1, here.size), mesh_dim_names=("dp", "tp"))
        value = distribute_tensor(torch.zeros(16, 16, dtype=torch.float64), mesh, [Replicate(), Shard(0)])
        other.model.layers[0].register_parameter("more", nn.Parameter(value))
        return other

    def over_another_mesh() -> Any:
        other = build("qwen3")
        mesh = init_device_mesh("cpu", (1, here.size), mesh_dim_names=("dp", "tp"))
        value = distribute_tensor(other.lm_head.weight.detach(), mesh, [Replicate(), Shard(0)])
        other.lm_head.weight = nn.Parameter(value, requires_grad=False)
        return other

    def quantised() -> None:
        with patch("dpllm.engines.choose.is_packed", lambda parameter: parameter is model.lm_head.weight):
            attached(model, "r")

    def by_trainer() -> None:
        one_layer = LlamaForCausalLM(tiny_llama_config(num_hidden_layers=1))
        small_trainer(root / "trainer", divided("", root / "model 2", base=lambda: one_layer)).train()

    layer = "model.layers.*."
    forwards, shifted = dict(inputs), {**inputs, "input_ids": inputs["input_ids"].clone()}
    shifted["input_ids"][0, 0] += here.rank
    calls: dict[str, Callable[[], Any]] = {
        "a plan that leaves q_norm out": lambda: stepped(planned({layer + "self_attn.q_norm": "replicate"}), "a"),
        "a plan that adds a whole norm up": lambda: stepped(
            planned({layer + "input_layernorm": "replicated_with_grad_allreduce"}), "b"
        ),
        "an untested style": lambda: attached(planned({layer + "mlp.gate_proj": "packed_colwise"}), "c"),
        "other rows": lambda: stepped(model, "d", data(other=here.rank)),
        "other inputs": lambda: clipped(model, unit_B, shifted),
        "other labels": lambda: stepped(model, "e", data(labels=here.rank)),
        "other losses": lambda: clipped(model, unit_B, {**inputs, "labels": inputs["labels"].roll(here.rank, 1)}),
        "other units": lambda: clipped(model, unit_B.roll(here.rank), forwards),
        "sums in .grad": lambda: summed(model),
        "fewer heads than processes": lambda: attached(divided("", root / "one head", base=one_head), "f"),
        "wrapped": lambda: attached(wrapped(model), "g"),
        "by torch": lambda: attached(by_torch(), "h"),
        "an edit on one process": lambda: attached(edited(), "i"),
        "a copied module": lambda: attached(kept_whole(), "j"),
        "two dimensions": lambda: attached(over_two_dimensions(), "p"),
        "another mesh": lambda: attached(over_another_mesh(), "q"),
        "a quantised base": quantised,
        "an average": lambda: attached(model, "k", averaging=Averaging(average_of("ema"), 2)),
        "adapters as PEFT makes them": lambda: attached(
            adapted("lora", divided("qwen3", root / "model"), mended=False), "l"
        ),
        "dropout": lambda: stepped(randomly(divided("qwen3", root / "model")), "o"),
        "two backward passes": lambda: attached(model, "m", norm_method=NormMethod(backward_passes=2)),
        "automatic size": lambda: attached(model, "n", dataclasses.replace(data(), max_tokens="auto")),
        "the Trainer": by_trainer,  # last: its Accelerator stays, and refuses all that follows
    }
    return {name: caught(call) for name, call in calls.items()}


def randomly(model: Any) -> Any:
    for module in model.train().modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    return get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj"], lora_dropout=0.3, init_lora_weights=False))


def wrapped(model: nn.Module) -> nn.Module:
    """In DistributedDataParallel, whose own first exchange fails on some of these models."""
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = model
    return wrapper
