"""Count how often the host waits for the device in each microbatch of a private step, without a device.

    python -m tests.host_waits                       # the table
    python -m tests.host_waits --where               # and the lines that wait
    python -m tests.host_waits --cases full LoRA

Private steps run on a stand-in for a GPU: tensors that hold their values on the CPU and report
another device, in a dispatch mode that sees each operation. Steps of two and of five microbatches are compared, so that
work done once per step does not count. A wait is

* a value that the host reads (``item``, ``bool``, ``tolist``, ``cpu``), or a shape that follows from values
  (``nonzero``, a boolean index, ``repeat_interleave`` without ``output_size``);
* a copy to the device that is not ``non_blocking``, an index that lies on the CPU among them.

It is dpllm's if the innermost Python frame outside of PyTorch lies in the package. Waits of the model and of the loss
function occur without privacy, too. Combining tensors of two devices is an error here, as on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import dpllm
from dpllm import GhostClipper, NormMethod, PrivacyConfig, make_plan, packed_sequence_loss, per_sequence_loss
from dpllm.data.labels import BOUNDARIES
from dpllm.data.rows import PackedCollator
from dpllm.data.units import UnitIndex
from dpllm.engines import SingleProcess
from dpllm.mechanism.generators import NoiseSource
from dpllm.models.inputs import attention_by_row
from dpllm.training.microbatches import Microbatch, microbatches
from dpllm.training.step import private_step
from tests.memory_ledger import MemoryLedger

DEVICE = torch.device("lazy", 0)  # autograd runs its nodes in the calling thread, as it does for the CPU
PACKAGE = str(Path(dpllm.__file__).parent)
FEW, MANY = 2, 5  # microbatches
ROWS, TOKENS, VOCABULARY = 4, 12, 61
_READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "bincount",
)
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
_COPIES = ("_to_copy", "copy_")


class OnDevice(Tensor):
    """A tensor of the stand-in device; its values are in ``inner``, on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        """Wrap a tensor."""
        like = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = Tensor._make_wrapper_subclass(cls, inner.shape, device=DEVICE, **like)
        made.inner = inner
        return made

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        """Return the values, which PyTorch does not for a subclass."""
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        """Show shape and dtype; values would be read."""
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation outside of `Waits`."""
        return _run(func, args, kwargs or {})


class Waits(TorchDispatchMode):
    """The stand-in device, while the block lasts.

    Attributes:
        of_dpllm: waits of dpllm, by the line that waits.
        of_others: waits of everything else.
    """

    def __init__(self) -> None:
        """Begin without a wait."""
        super().__init__()
        self.of_dpllm: Counter[str] = Counter()
        self.of_others: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation, and count it if the host would wait."""
        kwargs = kwargs or {}
        if (reason := _wait(func, args, kwargs)) is not None:
            path, line, name = _innermost()
            counter = self.of_dpllm if path.startswith(PACKAGE) else self.of_others
            counter[f"{Path(path).parent.name}/{Path(path).name}:{line} {name}, {reason}"] += 1
        return _run(func, args, kwargs)


def _wait(func: Any, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Return why the host waits for an operation; None if it does not."""
    name = func._overloadpacket.__name__
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    on_device = [one for one in given if isinstance(one, OnDevice)]
    to = kwargs.get("device")
    if name in _COPIES:
        source, target = (args[1], args[0].device) if name == "copy_" else (args[0], to or args[0].device)
        non_blocking = kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
        if source.device == target or source.numel() == 0:
            return None
        if isinstance(source, OnDevice):
            return "a copy to the host"
        return None if non_blocking else "a blocking copy to the device"
    if not on_device:
        return None
    if name in _READS:
        return name
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return name
    if name in _INDEXED:
        indices = [one for one in args[1] if one is not None]
        if any(one.dtype in (torch.bool, torch.uint8) and isinstance(one, OnDevice) for one in indices):
            fills = name != "index" and args[2].numel() == 1  # PyTorch fills by the mask then
            return None if fills else "a boolean index"
        if any(not isinstance(one, OnDevice) for one in indices):
            return "an index on the CPU"
        return None
    if any(one.ndim and not isinstance(one, OnDevice) for one in given):
        raise RuntimeError(f"{func} got tensors of {DEVICE} and of the CPU")
    return None


def _innermost() -> tuple[str, int, str]:
    """Return file, line and function of the innermost frame outside of PyTorch and of this file."""
    here, of_torch = str(Path(__file__).resolve()), str(Path(torch.__file__).parent)
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        passes_on = path.endswith("ghost/uses.py")  # the watch of functions runs operations of the model
        if path != here and not path.startswith((of_torch, "<")) and not passes_on:
            return path, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "", 0, ""


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values; results are on the device if an argument or ``device`` is."""
    wrappers: dict[int, OnDevice] = {}

    def opened(one: OnDevice) -> Tensor:
        wrappers[id(one.inner)] = one
        return one.inner

    inside, options = tree_map_only(OnDevice, opened, (args, kwargs))
    to = kwargs.get("device")
    on_device = bool(wrappers) if to is None else torch.device(to).type == DEVICE.type
    if to is not None:
        options = {**options, "device": torch.device("cpu")}
    if options.get("pin_memory"):
        options = {**options, "pin_memory": False}
    result = func(*inside, **options)
    if not on_device:
        return result
    return tree_map_only(Tensor, lambda one: wrappers[id(one)] if id(one) in wrappers else OnDevice(one), result)


@contextmanager
def stand_in() -> Iterator[None]:
    """Let PyTorch know the stand-in device where it asks by name: it has no autocast, and random numbers of the CPU."""
    dtype, enabled, autocast = torch.get_autocast_dtype, torch.is_autocast_enabled, torch.autocast
    tensor = torch.tensor
    of_device = SimpleNamespace(device_count=lambda: 1, get_rng_state=lambda _: None, set_rng_state=lambda *_: None)
    known = {
        "get_autocast_dtype": lambda kind: torch.bfloat16 if kind == DEVICE.type else dtype(kind),
        "is_autocast_enabled": lambda *kind: kind != (DEVICE.type,) and enabled(*kind),
        "tensor": lambda *args, device=None, **kwargs: (
            tensor(*args, device=device, **kwargs) if device != DEVICE else tensor(*args, **kwargs).to(device)
        ),
        "autocast": lambda kind, *args, **kwargs: (
            nullcontext() if kind == DEVICE.type else autocast(kind, *args, **kwargs)
        ),
        DEVICE.type: of_device,
    }
    with mock.patch.multiple(torch, **known, create=True):
        yield


def moved(module: nn.Module) -> nn.Module:
    """Move a model to the stand-in device, in place."""
    memo: dict[int, nn.Parameter] = {}
    for one in module.modules():
        for name, parameter in one._parameters.items():
            if parameter is not None:
                new = nn.Parameter(OnDevice(parameter.detach()), requires_grad=parameter.requires_grad)
                one._parameters[name] = memo.setdefault(id(parameter), new)
        for name, buffer in one._buffers.items():
            one._buffers[name] = None if buffer is None else OnDevice(buffer)
    return module


# ------------------------------------------------------------------------ cases


@dataclass(frozen=True)
class Case:
    """One kind of private training.

    Attributes:
        lora: LoRA in place of full fine-tuning.
        rows_per_unit: rows of each unit.
        padding: whether a row is added that belongs to no unit.
        packed: whether rows are laid end to end.
        norm_method: how norms are computed.
        dtype: of the model.
        clipping: its kind.
    """

    lora: bool = False
    rows_per_unit: int = 1
    padding: bool = False
    packed: bool = False
    norm_method: NormMethod = field(default_factory=NormMethod)
    dtype: torch.dtype = torch.float32
    clipping: str = "flat"


CASES = {
    "full": Case(),
    "full, bfloat16": Case(dtype=torch.bfloat16),
    "LoRA": Case(lora=True),
    "several rows a unit": Case(rows_per_unit=2),
    "several rows a unit, LoRA": Case(rows_per_unit=2, lora=True),
    "a padding row": Case(padding=True),
    "packed rows": Case(packed=True),
    "a unit in two microbatches": Case(rows_per_unit=7),
    "per-layer clipping": Case(clipping="per-layer"),
    "quantile clipping": Case(clipping="quantile"),
    "two passes": Case(norm_method=NormMethod(backward_passes=2)),
}


def build(case: Case) -> nn.Module:
    """A Llama of two layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, use_cache=False, attn_implementation="eager")
    model: Any = LlamaForCausalLM(config).to(case.dtype)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    return model.train()


def batch_of(case: Case, count: int) -> list[Microbatch]:
    """Microbatches of random tokens, of several lengths."""
    rng = np.random.default_rng(0)
    per_microbatch = ROWS // case.rows_per_unit or 1
    units = UnitIndex.from_ids(np.repeat(np.arange(count * per_microbatch), case.rows_per_unit))
    lengths = TOKENS - np.arange(units.num_rows) % 3
    ids = [rng.integers(3, VOCABULARY, length).tolist() for length in lengths]

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
        if case.packed:
            return PackedCollator()(rows)
        padded = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
        mask = (padded > 0).long()
        return {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(padded == 0, -100)}

    def fetch(numbers: np.ndarray) -> list[dict[str, list[int]]]:
        return [{"input_ids": ids[int(number)]} for number in numbers]

    batch = list(microbatches(fetch, collate, units, lengths, np.arange(units.num_units), ROWS, packed=case.packed))
    assert len(batch) == count * (-(-case.rows_per_unit // ROWS))
    if case.padding:
        last = torch.tensor([ROWS - 1])
        batch = [replace(one, unit_index=one.unit_index.index_fill(0, last, -1), num_units=ROWS - 1) for one in batch]
    return batch


def loss_of(model: nn.Module, packed: bool, device: torch.device = DEVICE) -> Callable[[Any], Tensor]:
    """One loss for each row, as a loop of one's own computes it."""

    def losses(inputs: Any) -> Tensor:
        inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return packed_sequence_loss(logits, labels, inputs[BOUNDARIES]) if packed else per_sequence_loss(logits, labels)

    return losses


def attention(model: nn.Module, case: Case) -> AbstractContextManager[None]:
    """Return the context in which the model processes packed rows separately."""
    return attention_by_row(model) if case.packed else nullcontext()


def step_waits(case: Case, *counts: int) -> list[Waits]:
    """Return the waits of steps of these numbers of microbatches, after a step that takes the first checks."""
    model = moved(build(case))
    privacy = PrivacyConfig(noise_multiplier=0.0, clip_norm=0.3, expected_batch_size=8, clipping=case.clipping)
    plan = make_plan(privacy, 32, 1 + len(counts))
    with Waits():
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        engine, clipper = SingleProcess(optimizer), GhostClipper(model, None, case.norm_method, plan.mechanism.clipping)
        noise = plan.mechanism.noise.stream(NoiseSource(), plan.num_steps)
    found = []
    with stand_in(), attention(model, case):
        for count in (MANY, *counts):
            batch = batch_of(case, count)
            with Waits() as waits:
                private_step(clipper, batch, loss_of(model, case.packed), plan, engine, MemoryLedger(), noise)
                optimizer.step()  # the guard compares the first update
                optimizer.zero_grad()
            found.append(waits)
    clipper.remove()
    engine.guard.remove()
    return found[1:]


def per_microbatch(case: Case) -> tuple[Counter[str], Counter[str]]:
    """Return the waits of dpllm and of others in one more microbatch, by line; of `MANY` - `FEW` microbatches."""
    few, many = step_waits(case, FEW, MANY)
    return many.of_dpllm - few.of_dpllm, many.of_others - few.of_others


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="the rows of the table")
    parser.add_argument("--where", action="store_true", help="print the lines that wait")
    options = parser.parse_args(arguments)
    print("| case | waits of dpllm, per microbatch | of model and loss |", "|---|---:|---:|", sep="\n")
    for name in options.cases:
        ours, others = per_microbatch(CASES[name])
        print(f"| {name} | {ours.total() / (MANY - FEW):g} | {others.total() / (MANY - FEW):g} |", flush=True)
        if options.where:
            for line, count in (*ours.most_common(), *others.most_common()):
                print(f"    {count / (MANY - FEW):g}  {line}")


if __name__ == "__main__":
    main()
