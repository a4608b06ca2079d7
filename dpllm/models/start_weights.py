"""Sample starting weights: compare them with the files from which a model was loaded, and until the first private step.

The constructor of a Trainer does this, `train` when it begins, and a run when it attaches a model. ε covers
private steps only. A model that was trained, merged or edited before differs from its files.

A sample has at most 64 entries of each tensor in a file, so a model of 7 billion parameters costs the pages of
20,000 entries. Until the first step it has one entry of each row, so that changes of a few embedding rows are noticed.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from dpllm.engines.checksums import pieces
from dpllm.models.start_files import folder_of, local_folders, weight_files

_FROM_FILE = 64  # entries of a tensor
_ROWS, _FLAT = 1 << 18, 1 << 16  # entries of a tensor with rows, and of a flat one
_COMPARED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_STORED = ("F64", "F32", "BF16", "F16")
_WRAPPERS = re.compile(r"\b(base_layer|original_module|_orig_mod|_checkpoint_wrapped_module|module)\.")
_KEEPS_BASE = ("gaussian", "eva", "orthogonal")  # named LoRA initialisations that do not change the base model
_RELATED = 0.5  # mean correlation with the files; for weights trained from them, or a part of them, it is near 1
_Read = Callable[[str], Tensor]


class WeightSample:
    """Entries of all parameters and saved buffers at one moment: one of each row, on this process.

    Dtype and device may change afterwards. Tensors that are later sharded over processes are not compared.

    Args:
        model: the model, possibly prepared by an engine.

    >>> model = nn.Linear(8, 3)
    >>> sample = WeightSample(model)
    >>> sample.changed(model.to(torch.bfloat16))
    []
    >>> _ = nn.init.zeros_(model.bias)
    >>> sample.changed(model)
    ['bias']
    """

    def __init__(self, model: nn.Module) -> None:
        """Read the entries."""
        self._shapes, self._entries = _sample(model)

    def changed(self, model: nn.Module) -> list[str]:
        """Return the names of the tensors whose values have changed; waits for the devices.

        Args:
            model: the model of the sample, or one that replaced it.
        """
        shapes, entries = _sample(model)
        same = [key for key, shape in shapes.items() if self._shapes.get(key) == shape]
        return sorted({key[0] for key in same if not _is_same(self._entries[key], entries[key])})


def edited_weights(model: Any) -> list[tuple[str, list[str]]]:
    """Return the parameters that differ from the files from which their model was loaded, with the model's name.

    Only files on this machine are read. Unmatched tensors are not compared: new heads and tokens, sharded or
    quantised tensors, parts that transformers merges when it loads them. A model without a name has no files. A model
    that was only made from a configuration has the name of its files, but weights that resemble none of them.

    Args:
        model: model with its adapters, which have their own files.
    """
    if not isinstance(model, nn.Module):
        return []
    configs = getattr(model, "peft_config", None)
    kinds = [getattr(one, "init_lora_weights", None) for one in configs.values()] if isinstance(configs, dict) else []
    has_base = not any(isinstance(kind, str) and kind.lower() not in _KEEPS_BASE for kind in kinds)
    found = []
    for name, part in loaded_parts(model):
        several = [_edited(part, folder, has_base) for folder in local_folders(name)]
        if names := min(several, key=len, default=[]):  # which revision was loaded is unknown
            found.append((name, names))
    return found


def new_heads(model: Any) -> list[str]:
    """Return the weights of heads and poolers that a model's files lack, so that each load initialises them anew.

    Args:
        model: model with its adapters. Without files on this machine, the result is empty.
    """
    found = []
    for name, part in loaded_parts(model):
        folder, inside = folder_of(name), f"{part.base_model_prefix}."
        with contextlib.ExitStack() as opened:
            heads = [
                names
                for names, _ in _whole_parameters(part, True)
                if not names[0].startswith(inside) or ".pooler." in names[0]
            ]
            places = _places(part, {one for names in heads for one in names}, folder, opened) if folder else {}
        found += [names[0] for names in heads if folder and not any(places.get(one) for one in names)]
    return found


def loaded_parts(model: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield the outermost transformers models in a module that have a name, each with it."""
    name = getattr(model.config, "_name_or_path", None) if isinstance(model, PreTrainedModel) else None
    if isinstance(model, PreTrainedModel) and isinstance(name, str) and name:
        yield name, model
        return
    for child in model.children():
        yield from loaded_parts(child)


def _edited(model: PreTrainedModel, folder: Path, has_base: bool) -> list[str]:
    """Return the names of the parameters whose values differ from the files of a folder."""
    parameters = _whole_parameters(model, has_base)
    embeddings = {id(getattr(one, "weight", None)) for one in _embeddings(model)}
    pairs: dict[str, tuple[Tensor, list[Tensor]]] = {}
    with contextlib.ExitStack() as opened:
        places = _places(model, {name for names, _ in parameters for name in names}, folder, opened)
        for names, parameter in parameters:
            stored = [read(key) for name in names for read, key in places[name]]
            stored = [one for one in stored if _fits(one, parameter, id(parameter) in embeddings)]
            if stored:
                entries = min(parameter.numel(), *(one.numel() for one in stored))
                index = _index(entries, min(entries, _FROM_FILE))
                pairs[names[0]] = _taken(parameter, index), [_taken(one, index) for one in stored]
    ours = _on_cpu({name: mine for name, (mine, _) in pairs.items()})
    for names, parameter in parameters:  # transformers may set the padding token's row to 0 when it loads a model
        if id(parameter) in embeddings and names[0] in pairs:
            mine, stored = ours[names[0]], pairs[names[0]][1]
            pairs[names[0]] = mine, [torch.where(mine == 0, mine.to(one.dtype), one) for one in stored]
    differ = [name for name, (_, stored) in pairs.items() if not any(_is_same(one, ours[name]) for one in stored)]
    marked = any(getattr(parameter, "_is_hf_initialized", False) for _, parameter in parameters)
    return (
        differ if differ and (marked or _is_related([(ours[n], stored[0]) for n, (_, stored) in pairs.items()])) else []
    )


def _whole_parameters(model: nn.Module, has_base: bool) -> list[tuple[list[str], nn.Parameter]]:
    """Return the parameters whose values can be compared, each with its names in files; tied ones have several."""
    named: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        sharded = isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") or parameter.is_meta
        if sharded or parameter.dtype not in _COMPARED or hasattr(parameter, "__tensor_flatten__"):
            continue
        if ".modules_to_save." in name or (".base_layer." in name and not has_base) or not parameter.numel():
            continue
        named.setdefault(id(parameter), ([], parameter))[0].append(_WRAPPERS.sub("", name))
    return list(named.values())


def _embeddings(model: PreTrainedModel) -> list[Any]:
    found = []
    for get in (model.get_input_embeddings, model.get_output_embeddings):
        with contextlib.suppress(NotImplementedError, AttributeError):
            found.append(get())
    return found


def _fits(stored: Tensor, parameter: Tensor, may_be_resized: bool) -> bool:
    same = stored.shape == parameter.shape
    return same or (may_be_resized and stored.dim() == 2 and stored.shape[1:] == parameter.shape[1:])


def _places(
    model: Any, names: set[str], folder: Path, opened: contextlib.ExitStack
) -> defaultdict[str, list[tuple[_Read, str]]]:
    """Return where the files of a folder have each parameter, by its name in the model: readers, and keys for them."""
    found: defaultdict[str, list[tuple[_Read, str]]] = defaultdict(list)
    # Copied, since a conversion records that it was used.
    conversions = copy.deepcopy(list(getattr(model, "_weight_conversions", None) or ()))
    conversions.sort(key=lambda one: hasattr(one, "operations"))  # names first, as in transformers
    for file in weight_files(folder):
        try:
            read, keys = _opened(file, opened)
        except Exception:  # any: damaged files, or formats that cannot be mapped into memory; nothing is compared
            continue
        for key in keys:
            name: str | None = key
            for conversion in conversions:
                name, source = conversion.rename_source_key(name)
                if source is not None and hasattr(conversion, "operations"):
                    name = None  # its values are merged or divided
                    break
            if name is None:
                continue
            prefix = f"{getattr(model, 'base_model_prefix', '')}."
            for one in (name, f"{prefix}{name}", name.removeprefix(prefix)):
                if one in names:
                    found[one].append((read, key))
                    break
    return found


def _opened(file: Path, opened: contextlib.ExitStack) -> tuple[_Read, list[str]]:
    """Map a file into memory; return a reader of its tensors and the keys of those in floating point."""
    if file.suffix == ".safetensors":
        reader = opened.enter_context(safe_open(file, framework="pt"))
        return reader.get_tensor, [k for k in list(reader.keys()) if reader.get_slice(k).get_dtype() in _STORED]
    loaded: Mapping[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return loaded.__getitem__, [k for k, t in loaded.items() if isinstance(t, Tensor) and t.dtype in _COMPARED]


def _is_same(before: Tensor, now: Tensor) -> bool:
    """Return whether values equal the earlier ones, which may have been cast, even to half precision and back."""
    casts = (before, before.to(torch.bfloat16), before.to(torch.float16))
    return any(bool(((one.to(now.dtype) == now) | (one.isnan() & now.isnan())).all()) for one in casts)


def _is_related(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Return whether weights resemble those of files; new ones of the same shape do not."""
    found = []
    for pair in pairs:
        centred = [one.double() - one.double().mean() for one in pair]
        norms = [float(one.norm()) for one in centred]
        if all(norms):
            found.append(float(centred[0] @ centred[1]) / (norms[0] * norms[1]))
    return bool(found) and sum(found) / len(found) >= _RELATED


def _sample(model: nn.Module) -> tuple[dict[tuple[str, int], torch.Size], dict[tuple[str, int], Tensor]]:
    """Return the shape of each piece on this process, and entries of it on the CPU."""
    buffers = (
        (f"{path}.{name}".removeprefix("."), buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    )
    shapes, entries = {}, {}
    for name, tensor in (*model.named_parameters(), *buffers):
        for number, piece in enumerate(pieces(tensor)):
            if piece.dtype in _COMPARED and piece.numel():
                rows = piece.numel() // piece.shape[-1] if piece.dim() > 1 else _FLAT
                count = min(piece.numel(), max(_FROM_FILE, min(rows, _ROWS)))
                shapes[name, number] = piece.shape
                entries[name, number] = _taken(piece, _index(piece.numel(), count))
    return shapes, _on_cpu(entries)


def _index(size: int, count: int) -> Tensor:
    """Return (count,) evenly spaced places in a flattened tensor; in a matrix they fall in changing columns."""
    numbers, step = torch.arange(count), size // count
    return numbers * step + numbers * 7919 % step


def _taken(tensor: Tensor, index: Tensor) -> Tensor:
    return torch.take(tensor.detach().as_subclass(Tensor), index.to(tensor.device))


def _on_cpu(tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """Return flat tensors on the CPU, with one copy from each device and dtype."""
    kinds: defaultdict[tuple[torch.device, torch.dtype], list[Any]] = defaultdict(list)
    for key, tensor in tensors.items():
        kinds[tensor.device, tensor.dtype].append(key)
    found: dict[Any, Tensor] = {}
    for keys in kinds.values():
        parts = torch.cat([tensors[key] for key in keys]).cpu().split([len(tensors[key]) for key in keys])
        found |= dict(zip(keys, parts, strict=True))
    return found
