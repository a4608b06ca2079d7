"""The size of a model's trained weights, read from its files piece by piece: the model is never loaded as a whole.

Place in the flow: `dpllm plan suggest`, whose learning rate is proportional to it. A rehearsal measures the loaded
model instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dpllm.config import ConfigError, ModelConfig
from dpllm.models.load import skeleton

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ENTRIES = 2**24  # read together
_WRAPPED = (("base_model.model.", ""), (".base_layer", ""), (".modules_to_save.default", ""))
_USUAL_SPREAD = 0.02


@dataclass(frozen=True)
class WeightSize:
    """The root mean square of a model's trained weights.

    Attributes:
        rms: over all entries of the trained parameters that are not zero at the start.
        entries: their number.
        words: "of ...", where they were read.
    """

    rms: float
    entries: int
    words: str


def size_of_parameters(parameters: Iterable[nn.Parameter], words: str) -> WeightSize:
    """Return the size of loaded parameters; frozen ones and those that are zero everywhere are left out.

    Args:
        parameters: each once.
        words: where they are from.
    """
    return _size(((_square_sum([p.detach()]), p.numel()) for p in parameters if p.requires_grad), words)


@overload
def size_of_model(model: ModelConfig, most: None = None) -> WeightSize: ...
@overload
def size_of_model(model: ModelConfig, most: int) -> WeightSize | None: ...
def size_of_model(model: ModelConfig, most: int | None = None) -> WeightSize | None:
    """Return the size of the trained weights of a recipe's model, from its .safetensors files.

    New weights have no file. For a model made from ``model.config``, and for the factors of a new adapter, the spread
    of their initialisation is taken. A parameter that is zero at the start, such as one factor of LoRA, or that the
    files lack, such as a new head, is left out.

    Args:
        model: the recipe's section.
        most: the most trained parameters to read from files, for a caller that does not wait; None: any number.

    Returns:
        The size; None if there are more parameters than ``most``.

    Raises:
        ConfigError: the model has no such files here, they are damaged, or they hold no trained parameter.
    """
    if model.config is None and model.adapter is None:
        _files(str(model.name))  # before the skeleton, which would be fetched from the Hub
    prepared = skeleton(model)
    trained = {name: p for name, p in prepared.named_parameters() if p.requires_grad}
    adapters = {name: p for name, p in trained.items() if ".lora_" in name}
    sums = list(_of_adapters(adapters, model))
    words = f"of the {_new(adapters)} new adapter weights that are not zero, by their initialisation" if sums else ""
    rest = {name: p for name, p in trained.items() if name not in adapters}
    if most is not None and sum(p.numel() for p in rest.values()) > most:
        return None
    files = _files(str(model.name)) if rest and model.config is None else None
    if rest and files is None:
        spread = float(getattr(prepared.config, "initializer_range", None) or _USUAL_SPREAD)
        sums += [(_first_value(name, p, spread) ** 2 * p.numel(), p.numel()) for name, p in rest.items()]
        words = f"of new weights, by their initialisation with a spread of {spread:g}"
    elif files is not None:
        try:
            found = list(_of_files(files, rest, str(getattr(prepared, "base_model_prefix", ""))))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise ConfigError(f"the weights of {model.name} cannot be read ({error}): restore its files") from error
        if not found and not sums:
            raise ConfigError(
                f"the files of {model.name} hold none of the trained parameters, such as {next(iter(rest))}: check "
                "model.name and model.freeze, or rehearse on public text, which loads the model"
            )
        sums += found
        of_files = f"of {sum(count for _, count in found):,} trained weights in {model.name}"
        words = f"{of_files}, and {words}" if words else of_files
    return _size(sums, words)


def _size(sums: Iterable[tuple[float, int]], words: str) -> WeightSize:
    kept = [(square, count) for square, count in sums if square > 0]
    entries = sum(count for _, count in kept)
    if not kept or not all(math.isfinite(square) for square, _ in kept):
        raise ConfigError(
            "the trained weights are all zero, or not finite, so a learning rate has no scale: check the model's files"
        )
    return WeightSize(math.sqrt(sum(square for square, _ in kept) / entries), entries, words)


def _square_sum(pieces: Iterable[Tensor]) -> float:
    return sum(float(piece.double().square().sum()) for piece in pieces)


def _files(name: str) -> dict[str, Path]:
    """Return tensor name -> file, or "" -> the only file."""
    folder = Path(name).expanduser()
    places = [folder / file for file in (_ONE_FILE, _INDEX)]
    if not folder.is_dir():
        cached = [try_to_load_from_cache(name, file) for file in (_ONE_FILE, _INDEX)]
        places = [Path(place) for place in cached if isinstance(place, str)]
    for place in places:
        if place.name == _ONE_FILE and place.is_file():
            return {"": place}
        if place.name == _INDEX and place.is_file():
            try:
                weights: Mapping[str, str] = json.loads(place.read_text(encoding="utf-8"))["weight_map"]
                return {key: place.parent / file for key, file in weights.items()}
            except (ValueError, KeyError, AttributeError) as error:
                raise ConfigError(f"{place} is damaged ({error!r}): copy the model again") from error
    raise ConfigError(
        f"the model {name} has no {_ONE_FILE} here, so the size of its weights is unknown and nothing is downloaded: "
        "set model.name to a folder with .safetensors files, or rehearse on public text, which loads the model"
    )


def _of_files(
    files: Mapping[str, Path], trained: Mapping[str, nn.Parameter], prefix: str
) -> Iterator[tuple[float, int]]:
    """Yield the sum of squares and the number of entries of each trained parameter that the files hold."""
    by_file: dict[Path, list[str]] = {}
    if "" in files:
        with safe_open(files[""], "pt") as file:
            files = dict.fromkeys(file.keys(), files[""])
    for name in trained:
        key = _key(name, files, prefix)
        if key is not None:
            by_file.setdefault(files[key], []).append(key)
    for path, keys in by_file.items():
        with safe_open(path, "pt") as file:
            for key in keys:
                yield _square_sum(_pieces(file.get_slice(key))), math.prod(file.get_slice(key).get_shape())


def _key(name: str, files: Mapping[str, Any], prefix: str) -> str | None:
    for part, other in _WRAPPED:
        name = name.replace(part, other)
    names = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
    return next((key for key in names if key in files), None)


def _pieces(whole: Any) -> Iterator[Tensor]:
    shape = whole.get_shape()
    if not shape:
        yield whole[:]
        return
    rows = max(1, _ENTRIES // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield whole[start : start + rows]


def _of_adapters(adapters: Mapping[str, nn.Parameter], model: ModelConfig) -> Iterator[tuple[float, int]]:
    """Yield those of the first factors, since the second ones are zero: peft, `LoraLayer.reset_lora_parameters`."""
    kind = (model.adapter or {}).get("init_lora_weights", True)
    if adapters and kind not in (True, "gaussian"):
        raise ConfigError(
            f"the size of adapters with init_lora_weights={kind!r} is not known before they are made: rehearse on "
            "public text, which makes them, or leave init_lora_weights out"
        )
    for name, p in adapters.items():
        if "lora_A" in name:  # uniform within 1/√inputs, or normal with deviation 1/rank
            square = 1 / p.shape[0] ** 2 if kind == "gaussian" else 1 / (3 * p.shape[1])
            yield square * p.numel(), p.numel()
        elif "lora_embedding_B" in name:  # normal, deviation 1
            yield float(p.numel()), p.numel()


def _new(adapters: Mapping[str, nn.Parameter]) -> str:
    count = sum(p.numel() for name, p in adapters.items() if "lora_A" in name or "lora_embedding_B" in name)
    return f"{count:,}"


def _first_value(name: str, parameter: nn.Parameter, spread: float) -> float:
    """Return the root mean square of a new parameter: matrices have the spread, scales are 1, and shifts 0."""
    if parameter.ndim > 1:
        return spread
    return 0.0 if name.endswith("bias") else 1.0
