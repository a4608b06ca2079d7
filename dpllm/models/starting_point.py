"""Check for dependence on private rows without noise: at the start of a run, and in the schedules that steer it.

ε covers the noisy gradients. It does not cover an adapter that was initialised from activations of the private rows,
starting weights of an earlier private run on the same data, or a schedule that follows exact losses of private rows.
Each is refused here, unless the user declares that it is independent of the private data. `dpllm.data.shared_records`
refuses public text that contains private records.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from dpllm.config import RECIPE_FILE, ConfigError
from dpllm.config.recipe import PRETRAINED_FOLDER
from dpllm.engines.guard import innermost
from dpllm.models.quantization import calibration_points
from dpllm.models.run_weights import earlier_run, runs_below, runs_that_trained
from dpllm.models.start_weights import edited_weights, folder_of, loaded_parts, trace_of_training
from dpllm.privacy.ledger import LEDGER_FILE, LedgerError, read_ledger
from dpllm.privacy.run_folder import RunName, run_in
from dpllm.report.model_card import CARD_FILE

DATA_DRIVEN_INIT = ("eva", "corda", "lora_ga")
"""LoRA initialisations computed from training data. PiSSA, OLoRA and LoftQ compute theirs from the weights only."""

_NOTHING = {
    "LORA": {"lora_B": 0, "lora_embedding_A": 0},
    "ADALORA": {"lora_E": 0},
    "IA3": {"ia3_l": 1},
    "VERA": {"vera_lambda_b": 0},
    "OFT": {"oft_R": 0, "oft_embedding_R": 0},
    "BOFT": {"boft_R": 0},
    "LOHA": {"hada_w2_b": 0},
    "LOKR": {"lokr_w1": 0, "lokr_w1_a": 0},
}
"""Parts of PEFT's layers, and the value of all their entries in a new adapter, which does not change the model."""
_COPIES = {
    "modules_to_save": "original_module",
    "ln_tuning_layers": "base_layer",
    "trainable_tokens_delta": "trainable_tokens_original",
}
"""Parts of PEFT's layers that a new adapter copies, with their sources."""
_FOLLOWING = ("reduce_lr_on_plateau", "greedy")  # names of schedules that receive evaluation results
_GUARANTEE = re.compile(r"^\W*differential_privacy\b", re.MULTILINE)  # the key of a card's guarantee
_DETACHED = "between detach() and attach()"
_EARLIER = "in an earlier train() of this trainer"
_DECLARE = (
    "If the weights are independent of these records (public data, or a private run on data without any of these "
    "units), declare start_is_independent=True (in a recipe model.start_is_independent: true); the report states it"
)


def refuse_steering(
    args: TrainingArguments, callbacks: Iterable[TrainerCallback], scheduler: Any, eval_is_public: bool
) -> None:
    """Check that no schedule and no choice of a checkpoint follows evaluation on private rows.

    Args:
        args: arguments of the training.
        callbacks: all callbacks of the Trainer.
        scheduler: scheduler of the learning rate, if it was passed as an object.
        eval_is_public: whether the evaluation rows are declared public; then nothing is refused.

    Raises:
        ConfigError: an option or a callback that reads evaluation results, by name.
    """
    if eval_is_public:
        return
    found = []
    if _word(args.lr_scheduler_type) in _FOLLOWING:
        found.append(f"train.lr_scheduler_type={_word(args.lr_scheduler_type)}")
    if _word(args.save_strategy) == "best":
        found.append("train.save_strategy=best")
    if args.metric_for_best_model is not None and not args.load_best_model_at_end:  # which is refused for all rows
        found.append(f"train.metric_for_best_model={args.metric_for_best_model}")
    if takes_metrics(scheduler):
        found.append(f"a {type(getattr(scheduler, 'scheduler', scheduler)).__name__} scheduler")
    found += [type(callback).__name__ for callback in callbacks if isinstance(callback, EarlyStoppingCallback)]
    if found:
        raise ConfigError(
            f"{found[0]} follows exact evaluation results, and on private rows epsilon would not cover its decisions. "
            "Leave it out, or evaluate on public rows and declare eval_is_public=True (in a recipe "
            "data.eval.public: true)"
        )


def check_start(
    model: Any,
    own_folder: str | Path | None,
    start_is_independent: bool,
    optimizer: Any = None,
    changed: Sequence[str] = (),
) -> list[str]:
    """Check that the starting weights are independent of the private rows, as far as can be detected.

    Args:
        model: model with its adapters.
        own_folder: folder of the run itself, whose ledger counts all earlier steps.
        start_is_independent: the declaration that the weights are independent of these rows.
        optimizer: optimizer of a run without steps, so it must have no state; None: not checked.
        changed: parameters that changed after the run detached the model, to which it now attaches again.

    Returns:
        Open points for the report, one line each: the declared dependences; frozen weights that may be calibrated with
        text; a folder with traces of ordinary training, unless it is declared independent; and, if the optimizer is
        checked, adapters that were trained before.

    Raises:
        ConfigError: an adapter initialised from data, weights from a folder with the ledger of a private run, or an
            optimizer that already has moments, without a declaration.
    """
    run = None if own_folder is None else run_in(own_folder)
    folders = _foreign_folders(model, run)
    found = [*_data_driven_adapters(model), *_earlier_runs(model, folders, run), *_moments(optimizer)]
    points = [*_settled(found, start_is_independent), *refuse_changed_start(changed, _DETACHED, start_is_independent)]
    points += [] if start_is_independent else _plain_training(model, folders)
    points += [*calibration_points(model), *_own_code(model)]
    return points if optimizer is None else points + _trained_adapters(model)


def refuse_changed_start(changed: Sequence[str], when: str, start_is_independent: bool) -> list[str]:
    """Check that nothing but private steps has written to weights since a given moment, or that it is declared.

    Args:
        changed: names of the written tensors.
        when: the period, for the message.
        start_is_independent: the declaration that the change is independent of these rows.

    Returns:
        Open points for the report: the declared change.

    Raises:
        ConfigError: a tensor changed, without a declaration.
    """
    return _settled(
        [f"{_several(changed)} changed {when}, outside of any private step of this run"] if changed else [],
        start_is_independent,
    )


def edited_start(model: Any, start_is_independent: bool) -> list[str]:
    """Return open points for weights that differ from the files from which they were loaded, unless declared.

    Args:
        model: model before its first private step, with its adapters (see `edited_weights` in start_weights).
        start_is_independent: the declaration that the weights are independent of the private rows.
    """
    return [
        f"{_several(names)} of the starting weights differ from the files of {_without_place(name)}, from which the "
        "model was loaded: it was trained, merged or edited before this run, which ε does not cover. Confirm that "
        "none of these records was involved. For the next run, load the model again, or declare "
        "start_is_independent=True (in a recipe model.start_is_independent: true)."
        for name, names in ([] if start_is_independent else edited_weights(model))
    ]


def refuse_private_start(name: str | None, start_is_independent: bool) -> list[str]:
    """Check that a stored model is independent of private records, for settings that must not depend on them.

    Returns:
        Open points for a report: traces of ordinary training with the weights, unless declared.

    Raises:
        ConfigError: the folder is that of a private run, or of another training by a recipe, without a declaration.
    """
    folder = None if name is None else Path(name).expanduser()
    found = _signs_of_private_records(folder) if folder is not None and folder.is_dir() else []
    if found and not start_is_independent:
        raise ConfigError(
            f"{found[0]}, so settings computed from them may depend on private records. {_remedy(found[0])}. {_DECLARE}"
        )
    return [] if name is None or found or start_is_independent else _training_points([name])


def takes_metrics(scheduler: Any) -> bool:
    """Return whether each step of a scheduler takes a metric, as ReduceLROnPlateau's does.

    Args:
        scheduler: the scheduler, with or without accelerate's wrapper, or None.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)
    try:
        return "metrics" in inspect.signature(scheduler.step).parameters
    except (AttributeError, TypeError, ValueError):
        return False


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def _data_driven_adapters(model: Any) -> list[str]:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return []
    found = []
    for name, config in configs.items():
        kind = getattr(config, "init_lora_weights", None)
        if isinstance(kind, str) and kind.lower() in DATA_DRIVEN_INIT:
            found.append(f"The adapter {name!r} has init_lora_weights={kind!r}, which starts from statistics of data")
        if getattr(config, "cpt_token_ids", None):
            found.append(f"The adapter {name!r} (CPT) starts from the tokens of examples")
    return found


def _settled(found: Sequence[str], start_is_independent: bool) -> list[str]:
    """Return findings as declared open points, or refuse the first of them."""
    if found and not start_is_independent:
        declare = "" if _EARLIER in found[0] else f". {_DECLARE}"
        raise ConfigError(f"{found[0]}, which the epsilon of this run does not cover. {_remedy(found[0])}{declare}")
    return [f"Declared independent of these records; confirm before release: {what}" for what in found]


def _several(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} other parameter(s)" if len(names) > 1 else "")


def _without_place(name: str) -> str:
    """Return a folder's own name: reports are published, and must not reveal local paths."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


def _foreign_folders(model: Any, run: RunName | None) -> list[Path]:
    """Return the local folders from which a model comes, without those of the run itself."""
    own, found = None if run is None else run.folder, []
    for folder in dict.fromkeys(_folders_of(model)):
        place = _run_around(folder) or folder.resolve()
        if place != own and not (own is not None and own in place.parents and _of_one_run(place, own)):
            found.append(folder)
    return found


def _earlier_runs(model: Any, folders: Sequence[Path], run: RunName | None) -> list[str]:
    return [sign for folder in folders for sign in _signs_of_private_records(folder)] + _trained_before(model, run)


def _plain_training(model: Any, folders: Sequence[Path]) -> list[str]:
    """Return open points for traces of ordinary training with the weights of a model."""
    names = [name for name in _names_of(model) if not Path(name).expanduser().is_dir()]
    return _training_points([*map(str, folders), *names])


def _training_points(names: Iterable[str]) -> list[str]:
    points = []
    for name in dict.fromkeys(names):
        folder = folder_of(name)
        if folder is None or PRETRAINED_FOLDER in (place := folder.resolve()).parts or place.name == PRETRAINED_FOLDER:
            continue
        if (trace := trace_of_training(folder)) is not None:
            points.append(
                f"The starting weights come from {_without_place(name)}, with {trace}, a sign of an earlier training. "
                "On which data? Confirm that none of these records was among them; public checkpoints from the Hub "
                "contain such files, too. For the next run, declare start_is_independent=True (in a recipe "
                "model.start_is_independent: true)."
            )
    return points


def _run_around(folder: Path) -> Path | None:
    """Return the nearest enclosing folder with a ledger; None for the public weights that a run wrote.

    Not everything that a run releases has its own ledger: the student of a vote, a copied checkpoint.
    """
    place = folder.resolve()
    for above in (place, *place.parents):
        if (above / LEDGER_FILE).is_file():
            return above
        if above.name == PRETRAINED_FOLDER:
            break
    return None


def _of_one_run(folder: Path, own: Path) -> bool:
    """Return whether the ledger in a folder below a run's folder belongs to this run, as a checkpoint's does."""
    with contextlib.suppress(LedgerError):
        return read_ledger(folder / LEDGER_FILE).runs[0]["run"] == read_ledger(own / LEDGER_FILE).runs[0]["run"]
    return False


def _trained_before(model: Any, own: RunName | None) -> list[str]:
    if not isinstance(model, torch.nn.Module):
        return []
    folders = runs_that_trained(model, own)
    found = [f"The weights were trained earlier in this process by the private run of {folder}" for folder in folders]
    if not folders and (left := earlier_run(model, own)) is not None:
        found.append(f"The weights are a copy of those that the private run of {left} trained in this process")
    return found + [
        f"The weights were changed in this process after the private run of {folder} had trained others on top of "
        "them (for instance, an adapter was merged into them)"
        for folder in runs_below(model, own)
        if folder not in folders
    ]


def _trained_adapters(model: Any) -> list[str]:
    """Return open points for adapters that are not new; PEFT does not record where they were loaded from.

    A new adapter of most kinds does not change the model. An adapter that does was trained: on public data, or by an
    earlier private run. Initialisations that change the model immediately (PiSSA, OLoRA, LoftQ) are skipped.
    """
    configs = getattr(model, "peft_config", None)
    points = []
    for name, config in configs.items() if isinstance(configs, dict) else ():
        by_default = getattr(config, "init_lora_weights", True) in (True, "gaussian")
        by_default &= getattr(config, "init_weights", True) is True and getattr(config, "init_ia3_weights", True)
        new = _NOTHING.get(_word(getattr(config, "peft_type", "")), {}) if by_default else {}
        trained = [
            kind
            for kind, empty in new.items()
            if any(bool((_own_part(p) != empty).any()) for _, part in _parts(model, kind, name) for p in part)
        ]
        trained += [
            kind
            for kind, source in _COPIES.items()
            if any(_differ(part, _parameters(_of(module, source, name))) for module, part in _parts(model, kind, name))
        ]
        points += [
            f"The adapter {name!r} was trained before this run: its {kind} differs from a new adapter's. If it was "
            "trained on these records, or by a private run on them, epsilon does not cover that. Confirm that "
            "it was not, or start with a new adapter."
            for kind in trained
        ]
    return points


def _parts(model: Any, kind: str, adapter: str) -> Iterator[tuple[torch.nn.Module, list[torch.Tensor]]]:
    """Yield the modules with a part of an adapter, and its parameters there."""
    for module in model.modules():
        held = getattr(module, kind, None)
        if held is not None and adapter in held:
            yield module, _parameters(held[adapter])


def _of(module: torch.nn.Module, source: str, adapter: str) -> Any:
    held = getattr(module, source, None)
    return held[adapter] if isinstance(held, Mapping | BufferDict) else held


def _differ(copies: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> bool:
    """Return whether copies differ from their sources; those with a different shape are not compared."""
    pairs = [(_own_part(copy), _own_part(source)) for copy, source in zip(copies, sources, strict=False)]
    return any(
        bool((copy != source.to(copy.device, copy.dtype)).any())
        for copy, source in pairs
        if copy.shape == source.shape and source.is_floating_point() and not source.is_meta
    )


def _parameters(part: Any) -> list[torch.Tensor]:
    return list(part.parameters()) if isinstance(part, torch.nn.Module) else [part]


def _own_part(parameter: Any) -> torch.Tensor:
    """Return the values of a parameter that this process holds."""
    held = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3 keeps its part there
    return (held.to_local() if isinstance(held, DTensor) else held).detach()


def _own_code(model: Any) -> list[str]:
    """Return the open point of a model with code from its folder, which nobody else has reviewed."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    names = {type(module).__name__ for module in modules if type(module).__module__.startswith("transformers_modules.")}
    if not names:
        return []
    return [
        f"The model runs code from its own folder ({', '.join(sorted(names))}), which ε trusts as it trusts yours. "
        "Confirm that somebody has read it: it must not couple rows, and it must not write private text anywhere."
    ]


def _moments(optimizer: Any) -> list[str]:
    """Report an optimizer that has taken steps before: its moments change the weights in the first steps.

    A tensor with one constant value does not count: Adagrad starts from such sums.
    """
    state = getattr(innermost(optimizer), "state", None)
    if not isinstance(state, Mapping):
        return []
    tensors = (value for kept in state.values() if isinstance(kept, Mapping) for value in kept.values())
    if any(isinstance(t, torch.Tensor) and t.numel() > 1 and bool((t != t.reshape(-1)[0]).any()) for t in tensors):
        return ["The optimizer holds moments of updates from before this run"]
    return []


def _signs_of_private_records(folder: Path) -> list[str]:
    """Return signs of private records in weights: the folder of a private run, a copy of its model, plain training."""
    if (run := _run_around(folder)) is not None:
        try:
            steps = f"{read_ledger(run / LEDGER_FILE).num_steps} steps"
        except LedgerError:
            steps = "a ledger that cannot be read"
        inside = "" if run == folder.resolve() else f"in {run}, "
        return [f"The weights come from {folder}, {inside}a private run ({steps} in its {LEDGER_FILE})"]
    if (folder / RECIPE_FILE).is_file():
        return [
            f"The weights come from {folder}, which was fine-tuned with the recipe in its {RECIPE_FILE} and has no "
            "ledger"
        ]
    card = folder / CARD_FILE
    # Searched for in the text, so that it is also found in a card with damaged metadata.
    if card.is_file() and _GUARANTEE.search(card.read_text(encoding="utf-8", errors="replace")):
        return [f"The weights come from {folder}, a private run according to its {CARD_FILE} without a ledger"]
    return []


def _names_of(model: Any) -> Iterator[str]:
    """Yield the folders and Hub names from which model and adapters come."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = [getattr(getattr(inner, "config", None), "_name_or_path", None)]
    names += [name for name, _ in loaded_parts(inner)] if isinstance(inner, torch.nn.Module) else []
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, dict):
        names += [getattr(config, "base_model_name_or_path", None) for config in configs.values()]
    yield from (name for name in names if isinstance(name, str) and name)


def _folders_of(model: Any) -> Iterator[Path]:
    """Yield the local folders among them."""
    yield from (folder for name in _names_of(model) if (folder := Path(name).expanduser()).is_dir())


def _remedy(what: str) -> str:
    if what.startswith("The optimizer"):
        return "Make a new optimizer for this run"
    if _DETACHED in what:
        return "Attach the run to the weights as it left them"
    if _EARLIER in what:
        return "Make another trainer, with the model loaded again and another output folder, or resume this run"
    if "outside of any private step" in what:
        return "Remove the code that writes to it, such as on_train_begin of a callback"
    if what.startswith("The weights"):
        return "Start from the weights that the earlier run started from"
    return "Initialise the adapter from weights only (True, 'gaussian', 'pissa', 'olora')"
