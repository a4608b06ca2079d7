"""Name the logged figures that depend on private rows, in the words of the report.

`DPTrainer.log` passes every dictionary that it logs. The list of harmless names is an allow-list: any other name counts
as a figure that ε does not cover.
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
"""For a recipe's held-out records, before and after the training."""
PREDICTION = "predictions on private rows"
ATTACK = "an attack on private rows by `dpllm methods attack`"
"""Its figures, and the records' texts that the model reproduced, are in files that must not be released."""
RESOURCES = "running time, throughput or memory use of the training"
OTHER = "other figures that the program logged"
DIAGNOSTICS = f"counts for single steps, which are in {DIAGNOSTICS_FILE} if there are any"
"""Where counts of private rows are. The text is the same in every report, since whether there are any is private."""
LOG_FILE = "not_for_release/training_log.jsonl"
"""File with a run's losses and metrics, relative to its folder."""
UTILITY_FILE = "not_for_release/utility.json"
"""File with the model's figures that ε does not cover, relative to the run's folder."""
LOGGED = f"losses and metrics in {LOG_FILE} (not for release)"

DESTINATIONS = "logged figures went to"
"""Name of the ledger's fact that lists where logged figures went."""
_SCREEN, _STATE = "the screen", "the Trainer's state"

GRADIENT_NORM = "noisy_grad_norm"
"""Log key of the private gradient's norm, after clipping and noise. ε covers it, like everything that is computed from
the private gradient. It says little about the unclipped norms, which determine a good clip norm."""

_TENSORBOARD = "TensorBoard"

# Figures that are in no file that `dpllm.report.publishing` uploads, if only `_LOCAL` destinations received them.
# Predictions are not among them: the calling program has them and may write them anywhere.
_KEPT = frozenset(
    {TRAINING_LOSS, FINAL_LOSS, RESOURCES, LOGGED, EVALUATION_DURING, EVALUATION_OUTSIDE, HELD_OUT, ATTACK}
)
_LOCAL = frozenset({_SCREEN, _STATE, _TENSORBOARD})
_NOT_FOR_RELEASE = (
    (
        "not_for_release/",
        "losses, metrics, counts and figures for private rows, and secret keys: ε covers none of them",
    ),
    (
        "checkpoint-*/",
        "the weights after a step, which ε covers, and training states, not all of which ε covers. Publish the final "
        "model instead",
    ),
    ("training.png", "a picture of the training losses"),
    (
        "optimizer.pt, scheduler.pt, rng_state*.pth, trainer_state.json, training_args.bin",
        "training states and settings, whose entries nobody has checked",
    ),
)
_EVENT_FILES = ("TensorBoard's folder (`runs/`, unless configured differently)", "losses and metrics of private rows")
_AUDIT_FILES = ("audit.json, attacks.json, canaries.json and their pictures", "scores of single private records")
_ANY_OTHER = (
    "every other file that `dpllm push` does not upload",
    "it uploads only weights, configuration, tokenizer, card, report, plan and ledger. Nobody has checked other files",
)
ON_PRIVATE_ROWS = "on_private_rows"
"""Log key that marks an evaluation on private rows, in a run whose own evaluation rows are declared public."""
_COVERED = frozenset(
    {GRADIENT_NORM, ON_PRIVATE_ROWS, "grad_norm", "learning_rate", "epoch", "step", "epsilon", "total_flos"}
)
_AROUND_TRAINING = ("on_init_end", "on_train_begin", "on_train_end", "on_push_begin")
# Methods of the Trainer that run only before the first step or after the last step, or that read no loss.
_HARMLESS = (
    *("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_decay_parameter_names"),
    *("get_eval_dataloader", "get_test_dataloader", "create_model_card", "init_hf_repo", "push_to_hub", "train"),
)
_KNOWN_MODULES = ("dpllm", "transformers", "builtins", "typing", "abc")
_PRINTERS = ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback", "StepProgress")
_RESOURCES = ("_runtime", "_samples_per_second", "_steps_per_second", "_tokens_per_second", "_model_preparation_time")


_IN_PLAIN_WORDS = {
    TRAINING_LOSS: "how well the model fits the private texts during the training",
    FINAL_LOSS: "how well the model fits the private texts over the whole training",
    EVALUATION_DURING: "tests of the model on private texts during the training",
    EVALUATION_OUTSIDE: "tests of the model on private texts before or after the training",
    HELD_OUT: "tests of the model on private texts that were held out from the training",
    PREDICTION: "answers of the model to private texts",
    ATTACK: "tests of whether the model reveals private texts it was trained on",
}


@dataclass(frozen=True)
class Evaluating:
    """The evaluation in progress."""

    prefix: str
    """Prefix of its log keys."""
    public: bool
    """Whether its rows were declared public."""


def not_covered(logs: Mapping[str, Any], evaluating: Evaluating | None, training: bool) -> dict[str, int]:
    """Return which of these figures ε does not cover: the report's words for each kind, and how often it was logged.

    An evaluation counts once, however many figures it logs. Figures for rows that were declared public are covered,
    since ε covers the model that computes them.

    Args:
        logs: log keys and values.
        evaluating: the evaluation that logs them; None if no evaluation is running.
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
    """Return the words for a result that a lay reader understands.

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
    """Return where logged figures go: the screen, the Trainer's state, and each callback that receives them.

    This includes the integrations that transformers adds automatically if ``report_to`` is "all".

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
    """Return which of these results may have left the run's machine.

    Losses and evaluations stay on the machine if only the screen, the Trainer's state, the run's files and
    TensorBoard's event files received them: none of these is uploaded (`dpllm.report.publishing`), and `kept_files`
    lists them. A tracker may show them to other people. If the destinations are unknown, as in a custom training loop,
    every result may have left the machine.

    Args:
        written: results that ε does not cover, in the report's words.
        destinations: the values of the fact `DESTINATIONS`, as `receivers` returns them.

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
    """Return the files of a run's folder that must not be released, each with the reason.

    `dpllm.report.publishing` never uploads them; the list is for people who copy a folder by hand.

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
    """Return the files of a query run's folder that must not be released, each with the reason."""
    return [
        ("not_for_release/", "figures and states that depend on private records: ε covers none of them"),
        *([_AUDIT_FILES] if audited else []),
        (
            "every other file that `dpllm push` does not upload",
            "it uploads only the files that the ledger names, card, report, plan and ledger. Nobody has checked others",
        ),
    ]


def own_callbacks(callbacks: Iterable[Any]) -> list[str]:
    """Return the names of the user's own callbacks that run during training.

    dpllm cannot know what they do. A callback that runs only before the first step or after the last is left out, since
    it sees no loss.

    >>> early = type("A", (), {"__module__": "mine", "on_train_begin": None})
    >>> each = type("B", (), {"__module__": "mine", "on_log": None})
    >>> own_callbacks([early(), each()])
    ['B']
    """
    kinds = (type(callback) for callback in callbacks)
    return sorted({kind.__qualname__ for kind in kinds if any(map(_runs_within, kind.__mro__))})


def own_methods(trainer: Any) -> list[str]:
    """Return the Trainer's methods that the user's class overrides or that were set on the instance.

    dpllm cannot know what they do. Methods that run only before the first step or after the last are left out.

    Args:
        trainer: an instance of a dpllm Trainer or of a subclass.

    >>> base = type("Base", (), {"__module__": "dpllm.training", "log": print, "train": print})
    >>> own = type("Own", (base,), {"__module__": "mine", "log": print, "train": print, "more": print})
    >>> own_methods(base()), own_methods(own())
    ([], ['Own.log'])
    """
    kinds = type(trainer).__mro__
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _KNOWN_MODULES]  # before or after ours
    values = [one for kind in kinds if kind not in own for one in vars(kind).items()]
    known = {name for name, value in values if (callable(value) or isinstance(value, property)) and name[:2] != "__"}
    # Schedules follow results on rows that are declared public; an overridden method may choose different rows.
    known -= {*_HARMLESS} - ({"get_eval_dataloader"} if getattr(trainer, "eval_is_public", False) else set())
    held = [(kind.__qualname__, set(vars(kind))) for kind in own]
    held.append((kinds[0].__qualname__, {name for name, value in vars(trainer).items() if callable(value)}))
    return sorted({f"{owner}.{name}" for owner, names in held for name in names & known})


def own_metrics(trainer: Any) -> list[str]:
    """Return the user's own metric functions that are called during training on rows that are not public.

    dpllm cannot know what they do.
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
