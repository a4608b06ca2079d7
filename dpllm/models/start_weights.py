"""Compare starting weights with the files from which a model was loaded, and identify these files by hash.

The constructor of a Trainer does this, `train` when it begins, and a run when it attaches a model. ε covers
private steps only. A model that was trained, merged or edited before differs from its files.

A sample has at most 64 entries of each tensor in a file, so a model of 7 billion parameters costs the pages of
20,000 entries. Until the first step it has one entry of each row, so that changes of a few embedding rows are noticed.

`dpllm train` writes the hash into the ledger when a run begins; a resume, `dpllm merge` and `dpllm generate`, which add
an adapter to these weights again, compare it, so that changed weights are noticed. Every byte is read: about a second
for a gigabyte on one thread, and files are read in parallel. The model was loaded just before, so they usually come
from memory.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from dpllm.config import ConfigError
from dpllm.engines.checksums import pieces
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger

START_FILES = "files of the starting weights"
"""Name of the ledger's fact."""
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_MAX_THREADS = 8
_OF_TRAINING = (
    *("trainer_state.json", "training_args.bin", "trainer_log.jsonl", "train_results.json", "all_results.json"),
    *("optimizer.pt", "optimizer.bin", "optimizer_*", "*_optim_states.pt", "scheduler.pt", "scheduler.bin"),
    *("rng_state*.pth", "random_states_*.pkl", "global_step*", "zero_to_fp32.py", "pytorch_model_fsdp*"),
    *("recipe_state.pt", "epoch=*.ckpt", "last.ckpt", "lightning_logs", "hparams.yaml", "wandb/*run-*"),
    *("events.out.tfevents*", "runs/*/events.out.tfevents*"),
)
"""Files that training leaves next to weights: transformers and its examples, accelerate, DeepSpeed, Lightning."""
_OF_CHECKPOINTS = ("*/trainer_state.json", "*/optimizer.pt", "*/optimizer.bin", "*/global_step*")
_CHECKPOINT = re.compile(r"(checkpoint|global_step|epoch)[-_]?\d+")  # the name of a folder
_CARD = re.compile(r"^\s*-\s*generated_from_trainer\s*$", re.MULTILINE)  # a tag in the Trainer's model card


def start_files(name: str) -> str | None:
    """Return number, bytes and hash of the files of a model's weights; None if they are not on this machine.

    Args:
        name: a folder, or a name on the Hub, which is looked up in the cache.

    Raises:
        ConfigError: a file cannot be read.
    """
    folder = folder_of(name)
    files = [] if folder is None else weight_files(folder)
    if not files:
        return None
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        hashes = list(pool.map(_hash, files))
    listed = "".join(f"{file.name} {one}\n" for file, one in zip(files, hashes, strict=True))
    size = sum(file.stat().st_size for file in files)
    number = "1 file" if len(files) == 1 else f"{len(files)} files"
    return f"{number}, {size:,} bytes, SHA-256 {hashlib.sha256(listed.encode()).hexdigest()}"


def folder_of(name: str) -> Path | None:
    """Return the folder of a model on this machine: its own, or that of the newest revision in the cache of the Hub."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    cached = _in_the_cache(name)
    return None if cached is None else Path(cached).parent


def local_folders(name: str) -> list[Path]:
    """Return the folders of a model on this machine: its own, or those of all revisions in the cache of the Hub."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return [folder]
    return sorted(Path(constants.HF_HUB_CACHE).glob(f"models--{name.replace('/', '--')}/snapshots/*"))


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights: of the first kind that exists, which transformers loads."""
    kinds = [sorted(folder.glob(pattern)) for pattern in _WEIGHTS]
    return next((found for found in kinds if found), [])


def trace_of_training(folder: Path) -> str | None:
    """Return a file or folder that a training left with the weights, in checkpoints below or next to their folder."""
    found = [path for pattern in (*_OF_TRAINING, *_OF_CHECKPOINTS) for path in sorted(folder.glob(pattern))]
    if found:
        return found[0].relative_to(folder).as_posix()
    card = folder / "README.md"
    if card.is_file() and _CARD.search(card.read_text(encoding="utf-8", errors="replace")):
        return "README.md with the tag generated_from_trainer"
    place = folder.resolve()
    if _CHECKPOINT.fullmatch(place.name):
        return f"the folder name {place.name}"
    beside = [] if place.parent == Path.cwd() else sorted(place.parent.glob(_OF_CHECKPOINTS[0]))
    older = (path for path in beside if path.stat().st_mtime <= place.stat().st_mtime)  # the model was saved last
    return next((f"a {path.parent.name} next to it" for path in older if _CHECKPOINT.fullmatch(path.parent.name)), None)


def refuse_other_start(ledger: Path, name: str) -> None:
    """Check that a continued run has the starting weights with which it began.

    Args:
        ledger: ledger of the run.
        name: name of the weights, as for `start_files`.

    Raises:
        ConfigError: their files differ from those that the ledger names.
    """
    noted = read_ledger(ledger).notes.facts.get(START_FILES)
    now = start_files(name) if noted else None
    if noted and now is not None and now != noted[0]:
        raise ConfigError(
            f"the files of the starting weights {name} have changed since the run in {ledger.parent} began (then "
            f"{noted[0]}, now {now}). Its adapter belongs to the earlier weights, and the guarantee does not cover "
            "others: restore them"
        )


def refuse_other_base(folder: Path) -> None:
    """Check that the adapter in a folder is added to the starting weights on which it was trained.

    Weights that the run itself trained on public text are named by its ledger, and are checked with its other files.

    Raises:
        ConfigError: see `refuse_other_start`.
        ValueError: the adapter's configuration cannot be read.
    """
    configuration, ledger = folder / "adapter_config.json", folder / LEDGER_FILE
    if not configuration.is_file() or read_ledger(ledger).notes.public_start is not None:
        return
    base = json.loads(configuration.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if base:
        refuse_other_start(ledger, str(base))


def _in_the_cache(name: str) -> str | None:
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a Hub name, but a folder that no longer exists
        return None
    return cached if isinstance(cached, str) else None


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): copy the model again") from error


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
        """Return the names of the tensors whose values have changed; waits for the devices."""
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
