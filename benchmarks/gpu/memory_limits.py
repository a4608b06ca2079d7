"""Checks of step 7 at the limit of a GPU's memory: recovery from a real shortage, and the budget found by trial."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from targets import WIDTHS
from torch import Tensor, nn

from dpllm import GhostClipper, PrivacyConfig, make_plan, per_sequence_loss
from dpllm.data.units import UnitIndex
from dpllm.engines import SingleProcess
from dpllm.mechanism.generators import NoiseSource
from dpllm.training.microbatches import Microbatch, StepBatch, microbatches
from dpllm.training.out_of_memory import MARGIN, Memory, memory_of, needed_later, rows_that_fit
from dpllm.training.out_of_memory import free_memory as give_back
from dpllm.training.step import private_step
from gpu.record import Figures
from gpu.setting import Setting, free_memory
from tests.memory_ledger import MemoryLedger
from tests.reference.oracle import relative_error
from tests.scarce import Gate, more_than


def llama(setting: Setting, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A Llama with random weights on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 8000}
    if setting.toy:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    torch.manual_seed(1)
    with setting.device:
        model = LlamaForCausalLM(LlamaConfig(**sizes | heads | changes, use_cache=False))
    return model.train().to(dtype=dtype)


class Rows:
    """Rows of random tokens, of lengths up to the greatest, and how they are cut and collated."""

    def __init__(self, count: int, tokens: int, vocabulary: int) -> None:
        """Draw them, from a fixed seed."""
        generator = torch.Generator().manual_seed(3)
        self.ids = [torch.randint(3, vocabulary, (tokens - n % 5,), generator=generator) for n in range(count)]

    def cut(self, max_rows: int) -> StepBatch:
        """A step in which all take part, one row a unit."""
        return microbatches(
            lambda numbers: [self.ids[int(number)] for number in numbers],
            self.collate,
            UnitIndex.one_row_per_unit(len(self.ids)),
            np.array([len(ids) for ids in self.ids]),
            np.arange(len(self.ids)),
            max_rows,
        )

    @staticmethod
    def collate(rows: list[Tensor]) -> Mapping[str, Tensor]:
        """Padded with token 0, which no row has."""
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def loss_of(model: nn.Module, device: torch.device) -> Any:
    """One loss per row of a microbatch, moved to the device."""

    def loss(inputs: Mapping[str, Tensor]) -> Tensor:
        inputs = {name: value.to(device) for name, value in inputs.items()}
        labels = inputs.pop("labels")
        return per_sequence_loss(model(**inputs).logits, labels)

    return loss


def stepped(model: Any, rows: Rows, max_rows: int, setting: Setting) -> tuple[Tensor, Any, int]:
    """Take one private step without noise; return its gradient on the CPU, its events, and its peak of memory."""
    num_rows = len(rows.ids)
    privacy = PrivacyConfig(noise_multiplier=0.0, clip_norm=0.3, expected_batch_size=num_rows // 4)
    plan = make_plan(privacy, num_rows, 3)
    engine, clipper = SingleProcess(torch.optim.SGD(model.parameters(), lr=0.1)), GhostClipper(model, plan.clip_norm)
    noise = plan.mechanism.noise.stream(NoiseSource(), plan.num_steps)
    free_memory()
    try:
        done = private_step(
            clipper, rows.cut(max_rows), loss_of(model, setting.device), plan, engine, MemoryLedger(), noise
        )
    finally:
        clipper.remove()
        engine.guard.remove()
    peak = torch.cuda.max_memory_allocated() if setting.device.type == "cuda" else 0
    gradient = torch.cat([p.grad.flatten().double().cpu() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return gradient, done, peak


@contextlib.contextmanager
def scarce(model: Any, allowed: int, max_tokens: int, setting: Setting) -> Iterator[None]:
    """Less memory while the block lasts: of the GPU's allocator, or by a gate behind the last block."""
    if setting.device.type == "cuda":
        give_back()
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        last = model.model.layers[-1]
        mlp, last.mlp = last.mlp, nn.Sequential(last.mlp, Gate(more_than(max_tokens)))
        try:
            yield
        finally:
            last.mlp = mlp


def memory_runs_out(figures: Figures, setting: Setting) -> None:
    """Check that a microbatch that does not fit is split in half, and that the step's gradient is unchanged."""
    count, tokens = (12, 16) if setting.toy else (64, 256)
    model = llama(setting)
    rows = Rows(count, tokens, model.config.vocab_size)
    whole, done, peak = stepped(model, rows, count, setting)
    figures.require(done.num_divided == 0, "memory ran out before it was made scarce")
    _, _, quarter = stepped(model, rows, count // 4, setting)
    allowed = (peak + quarter) // 2
    with scarce(model, allowed, count * tokens // 2, setting):
        divided, done, _ = stepped(model, rows, count, setting)
    figures |= {"peak_bytes": peak, "allowed_bytes": allowed, "units": done.num_units}
    figures.check("times that memory ran out", done.num_divided, at_least=1)
    figures.require(done.num_units == count, f"{done.num_units} of {count} units took part")
    figures.check("gradient against that of memory enough", relative_error(divided, whole), at_most=1e-5)
    after, done, _ = stepped(model, rows, count, setting)
    figures.require(done.num_divided == 0, "memory stays scarce afterwards")
    figures.check("gradient afterwards", relative_error(after, whole), at_most=1e-5)


class LiveMemory:
    """CPU memory of PyTorch's tensors, with an invented capacity."""

    def __init__(self, capacity: int, live: Any) -> None:
        """Take the counter of live tensors."""
        self.capacity, self._live = capacity, live

    def reset_peak(self) -> None:
        """See `dpllm.training.out_of_memory.Memory`."""
        self._live.peak = self._live.current

    def peak(self) -> int:
        """See `dpllm.training.out_of_memory.Memory`."""
        return self._live.peak


def automatic_budget(figures: Figures, setting: Setting) -> None:
    """Check that the rows found by trial fill the memory, and that a step of this many rows runs."""
    from throughput import LiveBytes

    tokens, most = (16, 60) if setting.toy else (512, 4096)
    sizes = {} if setting.toy else {**WIDTHS["1B"], "vocab_size": 32_000, "num_attention_heads": 32}
    model = llama(setting, torch.float32 if setting.toy else torch.bfloat16, **sizes)
    for p in model.model.layers[:-2].parameters():  # sums and activations grow, not weights
        p.requires_grad_(False)
    clipper = GhostClipper(model, 0.3)
    parameters = list(clipper.parameters.values())
    memory: Memory | None = memory_of(setting.device, needed_later(parameters, None))
    live = LiveBytes()
    for p in model.parameters():
        live.watch(p)
    if memory is None:
        memory = LiveMemory(live.current + 500_000, live)

    vocabulary = model.config.vocab_size

    def made(count: int) -> Microbatch:
        (only,) = Rows(count, tokens, vocabulary).cut(count)
        return only

    try:
        with live if setting.toy else contextlib.nullcontext():
            rows = rows_that_fit(clipper, loss_of(model, setting.device), made, memory, most)
            memory.reset_peak()
            clipper.clip(loss_of(model, setting.device)(made(rows).inputs))
            peak = memory.peak()
            clipper.forget()
    finally:
        clipper.remove()
    figures |= {"capacity_bytes": memory.capacity, "margin": MARGIN, "tokens": rows * tokens}
    figures.check("rows", rows, at_least=2, at_most=most)
    figures.check("peak over capacity", peak / memory.capacity, at_least=0.0 if rows == most else 0.75, at_most=1.02)
    del model, clipper, parameters
    free_memory()
