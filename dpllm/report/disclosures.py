"""Which logged figures depend on private rows, in the words of the report.

Place in the flow: `DPTrainer.log` asks for every dictionary that it is given. The list of harmless names is closed: a
name that is not in it counts as a figure that ε does not cover.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dpllm.privacy.private_folder import DIAGNOSTICS_FILE

TRAINING_LOSS = "training loss (mean of a logging interval)"
FINAL_LOSS = "training loss (mean of the run)"
EVALUATION_DURING = "evaluation during training"
EVALUATION_OUTSIDE = "evaluation on private rows, before or after training"
HELD_OUT = "evaluation on private rows"
"""Of a recipe's held-out records, before and after the training."""
PREDICTION = "predictions on private rows"
ATTACK = "an attack on private rows by `dpllm methods attack`"
"""Its figures, and texts of records that the model wrote, are in files that are not for release."""
RESOURCES = "running time, throughput or memory use of the training"
OTHER = "other figures that the program logged"
DIAGNOSTICS = f"counts of single steps, if there are any, are in {DIAGNOSTICS_FILE}"
"""Where a report says that counts of private rows are: whether there are any depends on the rows."""
LOG_FILE = "not_for_release/training_log.jsonl"
"""Where a run keeps its losses and metrics, relative to its folder."""
UTILITY_FILE = "not_for_release/utility.json"
"""Where a run keeps figures of its model that ε does not cover, relative to its folder."""
LOGGED = f"losses and metrics in {LOG_FILE} (not for release)"

DESTINATIONS = "logged figures went to"
"""Name of the fact in a ledger that lists where logged figures went."""
_SCREEN, _STATE = "the screen", "the Trainer's state"

GRADIENT_NORM = "noisy_grad_norm"
"""Name in the logs of the norm of the private gradient: after clipping and noise. It is covered by ε, as everything
that is computed from the private gradient is, and says little about the norms that the clip norm is compared with."""

_TENSORBOARD = "TensorBoard"

# Figures that no file holds that `dpllm.report.publishing` uploads, where nothing but `_LOCAL` received them.
# Predictions are not among them: the program that asked for them has them, and may write them anywhere.
_KEPT = frozenset(
    {TRAINING_LOSS, FINAL_LOSS, RESOURCES, LOGGED, EVALUATION_DURING, EVALUATION_OUTSIDE, HELD_OUT, ATTACK}
)
_LOCAL = frozenset({_SCREEN, _STATE, _TENSORBOARD})
_NOT_FOR_RELEASE = (
    (
        "not_for_release/",
        "losses, metrics, counts and figures on private rows, and secret keys: ε covers none of them",
    ),
    (
        "checkpoint-*/",
        "the weights of a step, which ε covers, and states of the training, of which ε does not cover each. Publish "
        "the final model instead",
    ),
    ("training.png", "a picture of the training losses"),
    (
        "optimizer.pt, scheduler.pt, rng_state*.pth, trainer_state.json, training_args.bin",
        "states and settings of the training, of which nobody checks each entry",
    ),
)
_EVENT_FILES = ("the folder of TensorBoard (`runs/`, unless another was set)", "losses and metrics of private rows")
_AUDIT_FILES = ("audit.json, attacks.json, canaries.json and their pictures", "scores of single private records")
_ANY_OTHER = (
    "every other file that `dpllm push` does not upload",
    "it uploads weights, configuration, tokenizer, card, report, plan and ledger only. Nobody has checked other files",
)
ON_PRIVATE_ROWS = "on_private_rows"
"""Name in the logs that marks an evaluation on private rows, in a run whose own evaluation rows are declared public."""
_COVERED = frozenset(
    {GRADIENT_NORM, ON_PRIVATE_ROWS, "grad_norm", "learning_rate", "epoch", "step", "epsilon", "total_flos"}
)
_AROUND_TRAINING = ("on_init_end", "on_train_begin", "on_train_end", "on_push_begin")
# Methods of the Trainer that are called only before the first step or after the last, or that read no loss.
_HARMLESS = (
    *("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_decay_parameter_names"),
    *("get_eval_dataloader", "get_test_dataloader", "create_model_card", "init_hf_repo", "push_to_hub", "train"),
)
_KNOWN_MODULES = ("dpllm", "transformers", "builtins", "typing", "abc")
_PRINTERS = ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback", "StepProgress")
_RESOURCES = ("_runtime", "_samples_per_second", "_steps_per_second", "_tokens_per_second", "_model_preparation_time")


_IN_PLAIN_WORDS = {
    TRAINING_LOSS: "how well the model fits the private texts, during the training",
    FINAL_LOSS: "how well the model fits the private texts, over the whole training",
    EVALUATION_DURING: "tests of the model on private texts, during the training",
    EVALUATION_OUTSIDE: "tests of the model on private texts, before or after the training",
    HELD_OUT: "tests of the model on private texts that were kept back from the training",
    PREDICTION: "answers of the model to private texts",
    ATTACK: "tests whether the model reveals private texts of its training",
}


@dataclass(frozen=True)
class Evaluating:
    """The evaluation in progress."""

    prefix: str
    """Of its names in the logs."""
    public: bool
    """Whether its rows were declared public."""


def not_covered(logs: Mapping[str, Any], evaluating: Evaluating | None, training: bool) -> dict[str, int]:
    """Return what of these figures ε does not cover: the report's words for it, and how often it was written.

    An evaluation counts once, whatever the number of its figures. Figures on rows that were declared public are
    covered, since the model that they are computed with is.

    Args:
        logs: names and values.
        evaluating: the evaluation that logs them; None for any other.
        training: whether `train` is running.

    >>> not_covered({"loss": 2.5, "noisy_grad_norm": 0.3, "learning_rate": 1e-3, "epsilon": 0.7}, None, True)
    {'training loss (mean of a logging interval)': 1}
    >>> not_covered({"test_loss": 2.5, "test_runtime": 3.0}, Evaluating("test", public=True), False)
    {}
    """
    counts: dict[str, int] = {}
    for name in logs:
        what = _kind(name, evaluating, training)
        if what is not None:
            counts[what] = counts.get(what, 0) + 1
    return {what: count if what == OTHER else 1 for what, count in counts.items()}


def in_plain_words(what: str) -> str:
    """Return the report's words for a result as a reader outside of the field understands them.

    >>> in_plain_words(PREDICTION), in_plain_words("a table")
    ('answers of the model to private texts', 'a table')
    """
    return _IN_PLAIN_WORDS.get(what, what)


def _kind(name: str, evaluating: Evaluating | None, training: bool) -> str | None:
    if name in _COVERED:
        return None
    if evaluating is not None and name.startswith(f"{evaluating.prefix}_"):
        if evaluating.public:
            return None
        return EVALUATION_DURING if training else EVALUATION_OUTSIDE
    if name == "loss":
        return TRAINING_LOSS
    if name == "train_loss":
        return FINAL_LOSS
    if name.endswith(_RESOURCES) or "_mem_" in name:
        return RESOURCES
    return OTHER


def receivers(callbacks: Iterable[Any]) -> str:
    """Return where logged figures go: the screen, the Trainer's state, and each callback that takes them.

    Transformers adds integrations by itself where ``report_to`` is "all"; they are named here whoever added them.

    Args:
        callbacks: of the Trainer.

    >>> receivers([])
    "the Trainer's state"
    """
    places = [_STATE]
    for callback in callbacks:
        kind = type(callback)
        if any("on_log" in vars(base) for base in kind.__mro__ if base.__name__ != "TrainerCallback"):
            places.append(_SCREEN if kind.__name__ in _PRINTERS else kind.__name__.removesuffix("Callback"))
    return ", ".join(sorted(set(places)))


def not_kept(written: Iterable[str], destinations: Iterable[str]) -> list[str]:
    """Return which of these results may be outside the run's machine.

    Losses and evaluations stay with the run where nothing but the screen, the Trainer's state, files of the run and
    TensorBoard's event files received them: none of these is uploaded (`dpllm.report.publishing`), and `kept_files`
    lists them. A tracker may show them to others. Where nobody noted the destinations, as in a training loop of one's
    own, nothing is known to stay.

    Args:
        written: results that ε does not cover, in the report's words.
        destinations: the values of the fact `DESTINATIONS`, as `receivers` gives them.

    >>> not_kept([TRAINING_LOSS, PREDICTION], ["the Trainer's state, the screen"])
    ['predictions on private rows']
    >>> not_kept([TRAINING_LOSS, EVALUATION_DURING], ["TensorBoard, the Trainer's state"])
    []
    >>> not_kept([TRAINING_LOSS], ["WandB, the Trainer's state"])
    ['training loss (mean of a logging interval)']
    >>> not_kept([TRAINING_LOSS], [])
    ['training loss (mean of a logging interval)']
    """
    places = _places(destinations)
    local = bool(places) and places <= _LOCAL
    return [what for what in written if not (local and what in _KEPT)]


def _places(destinations: Iterable[str]) -> set[str]:
    return {place for value in destinations for place in value.split(", ")}


def kept_files(destinations: Iterable[str], audited: bool) -> list[tuple[str, str]]:
    """Return the files of a run's folder that are not for release, each with the reason.

    They are the files that `dpllm.report.publishing` never uploads: this list is for people who copy a folder by hand.

    Args:
        destinations: as for `not_kept`.
        audited: whether an audit wrote its results into the folder.
    """
    return [
        *_NOT_FOR_RELEASE,
        *([_EVENT_FILES] if _TENSORBOARD in _places(destinations) else []),
        *([_AUDIT_FILES] if audited else []),
        _ANY_OTHER,
    ]


def kept_of_queries(audited: bool) -> list[tuple[str, str]]:
    """Return the files of a query run's folder that are not for release, each with the reason.

    Args:
        audited: whether an audit wrote its results into the folder.
    """
    return [
        ("not_for_release/", "figures and states that depend on private records: ε covers none of them"),
        *([_AUDIT_FILES] if audited else []),
        (
            "every other file that `dpllm push` does not upload",
            "it uploads the files that the ledger names, card, report, plan and ledger. Nothing is known of others",
        ),
    ]


def own_callbacks(callbacks: Iterable[Any]) -> list[str]:
    """Return the names of callbacks that neither transformers nor dpllm defines, and that run within training.

    What they do is not known here. One that runs only before the first step or after the last has no loss to follow.

    Args:
        callbacks: of the Trainer.

    >>> early = type("A", (), {"__module__": "mine", "on_train_begin": None})
    >>> each = type("B", (), {"__module__": "mine", "on_log": None})
    >>> own_callbacks([early(), each()])
    ['B']
    """
    kinds = (type(callback) for callback in callbacks)
    return sorted({kind.__qualname__ for kind in kinds if any(map(_runs_within, kind.__mro__))})


def own_methods(trainer: Any) -> list[str]:
    """Return the methods that a Trainer's class of the user's own overrides, or that were set on it, in words.

    What they do is not known here. Methods that run only before the first step or after the last are left out.

    Args:
        trainer: made from a class of dpllm.

    >>> base = type("Base", (), {"__module__": "dpllm.training", "log": print, "train": print})
    >>> own = type("Own", (base,), {"__module__": "mine", "log": print, "train": print, "more": print})
    >>> own_methods(base()), own_methods(own())
    ([], ['Own.log'])
    """
    kinds = type(trainer).__mro__
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _KNOWN_MODULES]  # before ours, or after
    values = [one for kind in kinds if kind not in own for one in vars(kind).items()]
    known = {name for name, value in values if (callable(value) or isinstance(value, property)) and name[:2] != "__"}
    # Schedules follow results on rows that are declared public; then another method may choose other rows.
    known -= {*_HARMLESS} - ({"get_eval_dataloader"} if getattr(trainer, "eval_is_public", False) else set())
    held = [(kind.__qualname__, set(vars(kind))) for kind in own]
    held.append((kinds[0].__qualname__, {name for name, value in vars(trainer).items() if callable(value)}))
    return sorted({f"{owner}.{name}" for owner, names in held for name in names & known})


def own_metrics(trainer: Any) -> list[str]:
    """Return the user's own functions for metrics that are called within training on rows that are not public.

    What they do is not known here.

    Args:
        trainer: with its arguments.
    """
    args = trainer.args
    during = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no" or args.eval_on_start
    if not during or getattr(trainer, "eval_is_public", False):
        return []
    given = (getattr(trainer, name, None) for name in ("compute_metrics", "preprocess_logits_for_metrics"))
    own = [one for one in given if one is not None and _module_of(one) not in _KNOWN_MODULES]
    return sorted({str(getattr(one, "__qualname__", type(one).__qualname__)) for one in own})


def _module_of(function: Any) -> str:
    return str(getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]


def _runs_within(kind: type) -> bool:
    known = kind.__module__.partition(".")[0] in ("transformers", "dpllm")
    return not known and any(name.startswith("on_") and name not in _AROUND_TRAINING for name in vars(kind))
