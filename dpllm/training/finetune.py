"""Run a recipe: from its records to the model and its report.

`recipes/finetune.py` is this program for `accelerate launch`; every process of a run calls it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import psutil
import torch
import torch.distributed
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from dpllm import registry
from dpllm.config import (
    PRETRAINED_FOLDER,
    RECIPE_FILE,
    ConfigError,
    ModelConfig,
    PrivacyConfig,
    Recipe,
    save_recipe,
)
from dpllm.config.files import sync_files
from dpllm.config.launched import check_numbers, note_exit_code, process_number
from dpllm.config.mistakes import print_any_character, tell, words_of
from dpllm.config.shipped import shipped_root
from dpllm.data.columns import columns_of
from dpllm.data.local_files import find_files
from dpllm.data.private_tempdir import remove_private_folder
from dpllm.data.records import reading_remarks
from dpllm.data.rows import (
    RowCollator,
    load_records,
    load_train_and_eval,
    num_labels_of,
    tokenize_records,
    unit_index_of,
)
from dpllm.data.shared_records import (
    refuse_private_parts,
    refuse_shared_held_out,
    refuse_shared_records,
    shared_records_point,
)
from dpllm.engines.board import OtherProcessError, is_first_to_say
from dpllm.engines.processes import Processes
from dpllm.models.load import load_base_model, load_tokenizer, prepare_model
from dpllm.models.model_argument import name_classes
from dpllm.models.start_weights import START_FILES, refuse_other_start, start_files
from dpllm.privacy.budget import require_room
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PrivacyPlan
from dpllm.privacy.run_folder import is_used, lost_steps
from dpllm.report.disclosures import HELD_OUT
from dpllm.report.figures import plot_training
from dpllm.report.release_notes import ReleaseNotes, keep_utility
from dpllm.training import trl_trainers
from dpllm.training.arguments import find_deepspeed_config, plan_for, training_arguments
from dpllm.training.evaluation import HeldOut, HeldOutRows, Measurement, figure_words
from dpllm.training.ledger_notes import OWN_TOKENIZER, PrivateSources
from dpllm.training.preflight import PLAIN, check_recipe
from dpllm.training.proposals import complete_recipe
from dpllm.training.resume import RunCompletedError, begin_in, completed, cut_short, steps_words, to_go_on
from dpllm.training.screen import Phases
from dpllm.training.signals import StopRequest, end_with_the_launcher, exit_code
from dpllm.training.trainer import DPTrainer, WhenAttached
from dpllm.training.trl_trainers import HeldOutPairs

USAGE = """Fine-tune a language model privately: one program for every recipe.

    dpllm train quickstart
    dpllm train gpt2_e2e_lora privacy.epsilon=3 train.seed=1
    accelerate launch recipes/finetune.py --config recipes/quickstart.yaml

Ordinary training on public text comes first if the recipe asks for it. The held-out records are measured before and
after the private training. `train.resume_from_checkpoint=true` continues a stopped run; `auto` starts if there is
nothing to continue, and does nothing if the run is completed.
"""
console = Console(highlight=False, soft_wrap=True)
NOISY_NORM = (
    "noisy_grad_norm in the log is the norm of the gradient after clipping and noise: mostly the noise. It does not "
    "show whether the model learns; the loss does"
)
PROCESSES_OPTION = ("--num_processes", "--num-processes")
THREADS_OPTION = ("--num_cpu_threads_per_process", "--num-cpu-threads-per-process")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the recipe, a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as privacy.epsilon=3")
    options = parser.parse_args()
    carry_out(options.config, options.overrides)


def carry_out(recipe: str | Path, overrides: Sequence[str]) -> None:
    """Run a recipe and end the process; a mistake in the recipe or the data prints one line, with exit code 2.

    Args:
        recipe: a file, or the name of a shipped recipe.
        overrides: as for `dpllm.config.load_recipe`.

    Raises:
        SystemExit: the exit code is not 0.
    """
    print_any_character()
    code, together = 2, False
    end_with_the_launcher()
    try:
        check_numbers()
        console.quiet = process_number("RANK") > 0
        use_all_cores()
        if not torch.accelerator.is_available():  # accelerate imports DeepSpeed, which would log its choice of the CPU
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        find_deepspeed_config(shipped_root())
        whole, found = complete_recipe(recipe, overrides, to_train=True)
        for setting in found:
            console.print(f"proposed: {setting.override}", markup=False)
        code, together = run(whole), True
    except RunCompletedError as done:
        console.print(str(done), markup=False)
        code, together = 0, True
    except Exception as error:  # any: the program ends here, and `tell` prints the traceback of a fault
        if not isinstance(error, OtherProcessError):  # torch's launcher names the first process with an error
            get_error_handler().record_exception(error)  # `record` sees only the exit code
        code = tell(error, None if _has_to_say(error) else (lambda text: None))
        note_exit_code(code)
    except KeyboardInterrupt:
        if not console.quiet:
            print("stopped at once; a step that was under way stays charged", file=sys.stderr)
        code = exit_code(signal.SIGINT)
    if torch.distributed.is_initialized():
        leave(code, together)
    if code:
        sys.exit(code)


def program() -> None:
    """Run `main`; torch's launcher then reports the first process that failed, and its error."""
    record(main)()


def _has_to_say(error: Exception) -> bool:
    """Return whether this process prints an error: one process per machine prints an error that all of them raised."""
    return isinstance(error, OtherProcessError) or is_first_to_say(f"{type(error).__name__}: {words_of(error)}")


def leave(code: int, together: bool) -> None:
    """End one process of several.

    After success all processes end together, since rank 0 may still be writing. The interpreter's normal shutdown is
    skipped: waiting threads of communication libraries would abort the process during it.
    """
    if together:
        torch.distributed.barrier()
    Processes.leave()
    torch.distributed.destroy_process_group()
    remove_private_folder()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(recipe: Recipe) -> int:
    """Run the recipe up to the model and its report; return the exit code, which is nonzero after most signals."""
    began, phases = time.monotonic(), Phases(console, bars=not recipe.train.get("disable_tqdm"))
    phases.begin("checking the recipe", "options, model and output folder")
    if recipe.beside:
        name = next(iter(recipe.beside))
        raise ConfigError(
            f"the recipe has a section {name}, but this program would train one model on all records: run it with "
            f"`{registry.method(name).invocation}`, or leave the section out"
        )
    check_recipe(recipe)  # before anything is read
    if wanted := unstarted_processes(launchers_words()):
        phases.say(wanted)
    args = training_arguments(_section(recipe))
    processes = Processes()
    processes.set_time_limit(args.ddp_timeout, remove_private_folder)
    with processes.during("the run"):
        return run_in(recipe, args, phases, began)


def run_in(recipe: Recipe, args: TrainingArguments, phases: Phases, began: float) -> int:
    """Run the recipe on connected processes; return the exit code.

    Args:
        recipe: the recipe.
        args: the training arguments from its section `train`.
        phases: phases of the run.
        began: start time of the run (`time.monotonic`).
    """
    output = Path(str(args.output_dir))
    restart = begin_in(output, args.resume_from_checkpoint, Processes())
    resume = restart.checkpoint
    if not restart.continues and is_used(output / LEDGER_FILE):
        raise ValueError(
            completed(output, read_ledger(output / LEDGER_FILE))
            or f"{output} already holds a private run: continue it with train.resume_from_checkpoint=auto, or set "
            "train.output_dir to another folder"
        )

    if restart.continues and recipe.model.name is not None and recipe.model.adapter is not None:
        Processes().from_main(lambda: refuse_other_start(output / LEDGER_FILE, str(recipe.model.name)))

    # The number of private records fixes the plan before anything is trained.
    train_records, eval_records, plan = read(recipe, args, phases)
    if recipe.privacy.budget_file and not resume:  # before the public training, not only after it
        require_room(recipe.privacy.budget_file, plan, str(recipe.privacy.dataset))

    num_labels = num_labels_of(train_records, recipe.data)
    start = public_start(recipe, train_records, eval_records, num_labels, restart.continues, phases)
    if recipe.public_pretrain:
        args = training_arguments(_section(recipe))  # again: the engine was set up for the other training
    phases.begin("loading the model, tokenizing the records")
    before = Begin(None, phases, plan.num_steps)
    trainer, held_out = trainer_of(recipe, args, start, (train_records, eval_records), num_labels, before)
    if Processes().size == 1:  # shards would be counted otherwise
        phases.say(model_words(recipe, trainer.model))
    before.held_out, before.trainer = held_out if not resume else None, trainer
    trainer.add_callback(End(phases))
    trainer.declared_points, trainer.notes = start.declared, noted(recipe)
    add_sources(trainer.sources, recipe, start, train_records, eval_records)

    def attached() -> None:
        phases.say(trainer.rehearsal or "")
        if args.should_save:  # not earlier: a refused resume leaves the folder unchanged
            note_start(recipe, trainer, output)

    trainer.add_callback(WhenAttached(attached))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    phases.end()
    if trainer.interrupted_by is not None:
        return stopped(trainer, trainer.interrupted_by)
    with StopRequest("training is complete; its model and report are being saved").listening():
        finish(recipe, trainer, began, before.result, held_out, phases)
    return 0


def add_sources(
    sources: PrivateSources,
    recipe: Recipe,
    start: Start,
    train_records: datasets.Dataset,
    eval_records: datasets.Dataset | None,
) -> None:
    """Add the records of a recipe and their files to the sources of its run.

    Args:
        sources: sources that the trainer notes.
        recipe: the recipe.
        start: the public parts.
        train_records: the private records.
        eval_records: the held-out records.
    """
    data = recipe.data
    sources.training.append(train_records)
    if eval_records is not None and not data.eval.public:
        sources.held_out.append(eval_records)
    own = [path for path in (data.path, None if data.eval.public else data.eval.path) if path is not None]
    sources.paths += [path for path in own if find_files(path)]
    if find_files(data.path):  # includes columns that no key names
        sources.people += columns_of(data).people
    sources.label_columns += [data.column("label"), data.column("tags")]
    sources.class_names = data.class_names
    if recipe.model.tokenizer_vocab_size is not None:  # trained by this run, on the public text
        sources.preprocessing = [one for one in sources.preprocessing if one != OWN_TOKENIZER]
    sources.public += start.public


def _section(recipe: Recipe) -> dict[str, Any]:
    compiled = {"torch_compile": True} if recipe.model.compile == "blocks" else {}
    return {**PLAIN, **compiled, **recipe.train}


def note_start(recipe: Recipe, trainer: DPTrainer, output: Path) -> None:
    """Write the recipe next to the ledger, and the hash of an adapter's starting weights into it; on rank 0.

    The adapter needs these weights again when it is loaded, and they are stored in a different folder; see
    `dpllm.models.start_weights`.
    """
    save_recipe(recipe, output / RECIPE_FILE)
    ledger = trainer.ledger
    if recipe.model.name is None or recipe.model.adapter is None or ledger is None:
        return
    if START_FILES not in read_ledger(ledger.path).notes.facts:
        files = start_files(recipe.model.name)
        if files is not None:
            ledger.append_fact(START_FILES, files)


def trainer_of(
    recipe: Recipe,
    args: TrainingArguments,
    start: Start,
    records: tuple[datasets.Dataset, datasets.Dataset | None],
    num_labels: int | None,
    before: Begin,
) -> tuple[DPTrainer, HeldOut | HeldOutPairs | None]:
    """Make the rows and the trainer, and return it with the held-out records.

    Args:
        recipe: the recipe.
        args: the training arguments from its section `train`.
        start: the public parts.
        records: the private and the held-out records.
        num_labels: number of classes, if the model is a classifier.
        before: a callback of the trainer.
    """
    tokenizer, task, phases = start.tokenizer, recipe.model.task, before.phases
    train_records, eval_records = records
    model = load_base_model(start.model, tokenizer, num_labels)
    if recipe.data.class_names is not None:  # the released model answers with these names
        name_classes(model, recipe.data.class_names, own=True)
    options: dict[str, Any] = {
        "callbacks": [before],
        "public": start.public,
        "max_tokens_per_microbatch": recipe.microbatch.tokens,
        "pack_rows": recipe.microbatch.pack,
        "eval_is_public": recipe.data.eval.public,
        "start_is_independent": recipe.model.start_is_independent,
        "head": recipe.model.head,
        "noise_memory": recipe.noise_memory,
        "average": recipe.train.get("average"),
    }
    if recipe.train.get("trainer") is not None:
        prepared = prepare_model(model, recipe.model)
        return trl_trainers.trainer_of(recipe, args, prepared, tokenizer, train_records, eval_records, **options)
    num_labels = model.config.num_labels
    keep = [recipe.privacy.unit] if recipe.privacy.unit else []
    with args.main_process_first(desc="tokenizing the records"):
        train_rows = tokenize_records(train_records, tokenizer, recipe.data, keep, task, num_labels)
        eval_rows = (
            tokenize_records(eval_records, tokenizer, recipe.data, (), task, num_labels) if eval_records else None
        )
    collator = RowCollator(pad_token_id=tokenizer.pad_token_id, task=task)
    phases.begin("checking the run", "rows, model, optimizer and ledger")
    held_out = HeldOut(HeldOutRows(eval_records, eval_rows, collator, recipe.data, tokenizer)) if eval_rows else None
    trainer = DPTrainer(
        model=prepare_model(model, recipe.model),
        args=args,
        privacy=recipe.privacy,
        train_dataset=train_rows,
        processing_class=tokenizer,
        data_collator=collator,
        **options,
    )
    return trainer, held_out


def read(
    recipe: Recipe, args: TrainingArguments, phases: Phases
) -> tuple[datasets.Dataset, datasets.Dataset | None, PrivacyPlan]:
    """Read the private and the held-out records; compute and print the plan."""
    phases.begin("reading the records")
    with args.main_process_first(desc="reading the records"):
        train_records, eval_records = load_train_and_eval(recipe.data, recipe.privacy)
        refuse_private_parts(recipe, train_records, eval_records)
    units = unit_index_of(train_records, recipe.privacy)
    phases.end(read_words(units.num_units, eval_records, recipe.privacy))
    for line in reading_remarks(train_records):
        phases.say(line)
    phases.begin("planning", "the noise that ε needs" if recipe.privacy.epsilon else "")
    plan = plan_for(args, recipe.privacy, units, average=recipe.train.get("average"))
    phases.end()
    phases.say(plan_words(plan))
    return train_records, eval_records, plan


def plan_words(plan: PrivacyPlan) -> str:
    """Return the guarantee and the steps of a plan in one line; `dpllm plan` prints all numbers."""
    draws = "rows" if plan.sampling == "example" else f"{unit_word(plan)}s"
    size = f"{plan.num_steps:,} steps of {plan.expected_batch_size:,} {draws} on average"
    return f"{plan.guarantee} for each {unit_word(plan)} · {size} · σ {plan.noise_multiplier:.4g}, C {plan.clip_norm:g}"


def unit_word(plan: PrivacyPlan) -> str:
    """Return the unit of a plan in the words of the phases and of the summary."""
    return "user" if plan.unit == "user" else "record"


def model_words(recipe: Recipe, model: Any) -> str:
    """Return the model and its trained part in one line."""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    total, trained = sum(count for count, _ in counts), sum(count for count, requires in counts if requires)
    name = Path(recipe.model.name).name if recipe.model.name else "a model from scratch"
    how = f"LoRA r {recipe.model.adapter.get('r', 8)}" if recipe.model.adapter else "no adapter"
    return f"{name}, {how}: {trained:,} of {total:,} parameters are trained"


def read_words(num_units: int, eval_records: datasets.Dataset | None, privacy: PrivacyConfig) -> str:
    """Return a sentence about the records: the units to train on and those held out, counted in the same way.

    Args:
        num_units: N.
        eval_records: the held-out records; None: there are none.
        privacy: the definition of a unit.
    """
    if privacy.protects != "user":
        held_out = f", {len(eval_records):,} records held out" if eval_records else ""
        return f"{num_units:,} records to train on{held_out}"
    words = f"{num_units:,} users to train on"
    if not eval_records:
        return words
    column, count = privacy.unit, f"{len(eval_records):,} records"
    if column not in eval_records.column_names:  # a separate file need not name users
        return f"{words}; {count} held out"
    users = len({str(name) for name in eval_records[column]})
    return f"{words}, {users:,} users held out, with {count}"


@dataclasses.dataclass(frozen=True)
class Start:
    """The public parts of a run: the model and the tokenizer from which the private training starts.

    Attributes:
        model: the starting model.
        tokenizer: its tokenizer.
        public: earlier training on public data, one line each.
        declared: open points of the report about them.
    """

    model: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    public: list[str]
    declared: list[str]


def public_start(
    recipe: Recipe,
    private: datasets.Dataset,
    held_out: datasets.Dataset | None,
    num_labels: int | None,
    continues: bool,
    phases: Phases,
) -> Start:
    """Load the starting weights, or train them on public text, without privacy.

    Args:
        recipe: the recipe.
        private: the private records, which may not be in the public text.
        held_out: the held-out records, which may not be in it either, unless they are public.
        num_labels: number of classes, if the model is a classifier.
        continues: whether a run is continued.
        phases: phases of the run.
    """
    weights = recipe.release.base_model or recipe.model.name
    public = [f"starting weights: {_without_place(weights)}"] if weights and recipe.model.name else []
    if recipe.public_pretrain is None:
        return Start(recipe.model, load_tokenizer(recipe.model, None), public, [])
    text = recipe.public_pretrain.data
    phases.begin("reading the public text", text.path)
    records, shared = load_records(text), recipe.public_pretrain.max_shared_records
    refuse_shared_records(private, recipe.data, records, text, shared, privacy=recipe.privacy)
    refuse_shared_held_out(held_out, recipe.data, records, text, shared)
    public.append(f"pretraining text: {_without_place(text.path)}")
    if recipe.model.tokenizer_vocab_size:
        public.append(f"text that the tokenizer was trained on: {_without_place(text.path)}")
    tokenizer = load_tokenizer(recipe.model, records[text.column("text")])
    model = pretrain(recipe, tokenizer, records, num_labels, continues, phases)
    return Start(model, tokenizer, public, shared_records_point(shared, text))


def _without_place(name: str) -> str:
    """Return a file's or folder's own name: report, card and ledger are published, and must not reveal local paths."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


def noted(recipe: Recipe) -> ReleaseNotes:
    """Return the notes of a recipe; a base model from the Hub is named by its id."""
    name = recipe.model.name if recipe.model.name and not Path(recipe.model.name).exists() else None
    values = dataclasses.asdict(recipe.release)
    return ReleaseNotes(**{**values, "base_model": recipe.release.base_model or name})


def finish(
    recipe: Recipe,
    trainer: DPTrainer,
    began: float,
    before: Measurement | None,
    held_out: HeldOut | HeldOutPairs | None,
    phases: Phases,
) -> None:
    """Measure, save and show the finished model."""
    args, plan, output = trainer.args, trainer.plan, Path(str(trainer.args.output_dir))
    after = None
    if held_out is not None:
        phases.begin("evaluating after", "the held-out records")
        after = evaluated(trainer.model, held_out, trainer.processes, phases)
    phases.begin("saving", "the model with its plan, ledger, report and card")

    # Measurements on private records go to the screen, the picture and a file that is not for release. The report
    # counts them. It prints only those on public records, and no duration, which depends on the private records.
    utility, public = figure_words(before, after), recipe.data.eval.public
    if utility and not public:
        trainer.disclose(HELD_OUT, len(utility))
    elif after is not None and trainer.ledger is not None:
        trainer.ledger.append_score(after.score, after.value)
    hardware = str(args.device) if args.world_size == 1 else f"{args.world_size} processes, {args.device.type}"
    kept = {**({} if public else utility), "seconds in all": round(time.monotonic() - began)}
    if args.should_save:
        keep_utility(output, kept)
    figures = {**(utility if public else {}), "hardware": hardware}
    trainer.notes = dataclasses.replace(trainer.notes, utility=figures, utility_elsewhere=tuple(kept))
    trainer.save_model()
    if not args.should_save:
        return
    picture = draw(trainer, output / "training.png", before, after)
    phases.end()
    summary = [
        *held_out_rows(before, after),
        ("guarantee", f"{trainer.guarantee} for each {unit_word(plan)} of {plan.num_units:,}"),
    ]
    show(f"done in {time.monotonic() - began:.0f} s: {output}", [*summary, *results(trainer, picture)])


def held_out_rows(before: Measurement | None, after: Measurement | None) -> list[tuple[str, str]]:
    """Return each held-out figure before and after the training; they are exact, and ε does not cover them."""
    earlier = {} if before is None else before.figures
    return [
        (f"held-out {name}", f"{earlier[name]:.4g} → {value:.4g}" if name in earlier else f"{value:.4g}")
        for name, value in ({} if after is None else after.figures).items()
    ]


def stopped(trainer: DPTrainer, number: int) -> int:
    """Print how to continue a run that a signal ended; return the exit code."""
    step, output = trainer.state.global_step, Path(str(trainer.args.output_dir))
    if trainer.args.should_save:
        rows = [
            ("private steps", steps_taken(trainer)),
            ("checkpoint", str(output / f"checkpoint-{step}")),
            ("privacy report", str(output / "privacy_report.md")),
            *to_go_on(trainer.plan, read_ledger(output / LEDGER_FILE)),
        ]
        show(f"stopped by {signal.Signals(number).name}", rows)
    return exit_code(number)


def results(trainer: DPTrainer, picture: Path) -> list[tuple[str, str]]:
    """Return the results for the summary: steps, files, and what to do next."""
    output, processes = Path(str(trainer.args.output_dir)), trainer.args.world_size
    return [
        ("private steps", steps_taken(trainer)),
        *([("processes", f"{processes}")] if processes > 1 else []),
        ("picture", str(picture)),
        ("next", f"dpllm verify {shlex.quote(str(output))} · dpllm report {shlex.quote(str(output))} --open"),
    ]


def steps_taken(trainer: DPTrainer) -> str:
    """Return the number of charged steps, and where a crash lost some, the number contained in the weights."""
    contents = read_ledger(Path(str(trainer.args.output_dir)) / LEDGER_FILE)
    return steps_words(contents.num_steps, trainer.plan.num_steps, lost_steps(contents))


def use_all_cores() -> None:
    """Compute on every core of a machine without an accelerator, unless the user set a number of threads.

    `accelerate launch` gives each process OMP_NUM_THREADS=1 if nobody set a number.
    """
    if "ACCELERATE_MIXED_PRECISION" in os.environ and not torch.accelerator.is_available() and not threads_were_set():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // max(1, process_number("LOCAL_WORLD_SIZE", 1))))


def threads_were_set() -> bool:
    """Return whether the user set OMP_NUM_THREADS, or the launcher's option for it.

    A number other than 1 was set, or the launcher divided the cores. The launcher also writes 1 where nothing was
    set, so its own environment and command line show whether 1 was. If they cannot be read, it was not.
    """
    if os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return True
    try:
        launcher = psutil.Process().parent()
        return launcher is not None and (
            "OMP_NUM_THREADS" in launcher.environ()
            or any(word.startswith(THREADS_OPTION) for word in launchers_words())
        )
    except (psutil.Error, OSError):
        return False


def launchers_words() -> list[str]:
    """Return the command line of the program that started this one; empty if it cannot be read."""
    try:
        launcher = psutil.Process().parent()
        return [] if launcher is None else launcher.cmdline()
    except (psutil.Error, OSError):
        return []


def unstarted_processes(words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Return a remark if `accelerate launch` was asked for several processes but started one; "" otherwise.

    Without a GPU it silently starts one process, unless the configuration is for several processes on the CPU.

    Args:
        words: the launcher's command line.
        environment: environment variables. None: those of this process.

    >>> unstarted_processes(["accelerate", "launch", "--num_processes", "2", "recipes/finetune.py"], {})[:57]
    'accelerate launch was asked for 2 processes but started 1'
    """
    if process_number("WORLD_SIZE", 1, environment) > 1 or "launch" not in words[:4]:
        return ""
    wanted = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    wanted.add_argument(*PROCESSES_OPTION, dest="number", type=int, default=1)
    try:
        number = wanted.parse_known_args(list(words))[0].number
    except argparse.ArgumentError:
        return ""
    if number < 2:
        return ""
    return (
        f"accelerate launch was asked for {number} processes but started 1, since it found no GPU. On the CPU, use "
        "dpllm train --config cpu_ddp, or accelerate launch --config_file accelerate_configs/cpu_ddp.yaml"
    )


class Begin(TrainerCallback):
    """Callback before the private steps: it measures the held-out records, and announces the phases.

    Attributes:
        trainer: trainer whose ledger has the charged steps; set before the training.
        result: the score before the training. None: there was nothing to measure.
    """

    def __init__(self, held_out: HeldOut | HeldOutPairs | None, phases: Phases, planned: int) -> None:
        """Store the records to measure, and the number of planned steps."""
        self.held_out, self.phases, self._planned = held_out, phases, planned
        self.result: Measurement | None = None
        self.trainer: DPTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure once, and begin the phase of the private steps."""
        if self.held_out is not None:
            self.phases.begin("evaluating before", "the held-out records")
            processes = Processes() if args.world_size > 1 else None
            self.result = evaluated(kwargs["model"], self.held_out, processes, self.phases)
        assert self.trainer is not None and self.trainer.ledger is not None, "the training has begun"
        charged = self.trainer.ledger.num_steps  # more than the weights contain, where a crash lost some
        self.phases.begin("training", cut_short(state.max_steps - charged, self._planned - charged))
        self.phases.say(NOISY_NORM)


class End(TrainerCallback):
    """Callback that announces the phase after the private steps; added last, so that the bar is closed before."""

    def __init__(self, phases: Phases) -> None:
        """Store the phases."""
        self.phases = phases

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the phase of the report, which is written once and is then on the disk, whatever follows."""
        self.phases.begin("report", "recomputing ε from the ledger, with cross-checks by other accountants")


def evaluated(model: Any, held_out: HeldOut | HeldOutPairs, processes: Processes | None, phases: Phases) -> Measurement:
    """Measure the held-out records, with a progress bar, and print the scores."""
    with phases.bar(held_out.size, "row") as moved:
        found = held_out.measure(model, processes, moved)
    phases.end(", ".join(f"{name} {value:.4g}" for name, value in found.figures.items()))
    return found


def pretrain(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    records: datasets.Dataset,
    num_labels: int | None,
    continues: bool,
    phases: Phases,
) -> ModelConfig:
    """Train on the public text, without privacy; return the trained model as the start of the private training.

    A continued run (``continues``) loads the model that is already there, whose files the ledger names. In any other
    run, a model there may come from a different text.
    """
    public = recipe.public_pretrain
    assert public is not None
    folder = Path(recipe.train["output_dir"]).expanduser() / PRETRAINED_FOLDER
    if not (continues and (folder / "config.json").exists()):
        phases.begin("public training", f"on {public.data.path}, without privacy")
        train_on_public_text(recipe, records, tokenizer, num_labels, folder)
    return start_in(folder, recipe.model)


def draw(trainer: DPTrainer, path: Path, before: Measurement | None, after: Measurement | None) -> Path:
    """Write the picture of the run."""
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    steps = [int(entry["step"]) for entry in logs]
    ends = [(0, before), (trainer.state.global_step, after)]
    return plot_training(
        steps,
        [entry["loss"] for entry in logs],
        steps,
        [entry["epsilon"] for entry in logs],
        path,
        [(step, point.row_loss) for step, point in ends if point],
    )


def show(title: str, rows: list[tuple[str, str]]) -> None:
    """Print names and values; a path is never wrapped."""
    console.print(f"\n{title}", style="bold")
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(f"  {name:<{width}}  ", style="dim", end="")
        console.print(value, markup=False)


# --------------------------------------------------------------------------------------------------- public text


def train_on_public_text(
    recipe: Recipe,
    records: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    num_labels: int | None,
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Train the recipe's model on public records and save it. Called by all processes together.

    The model is saved and loaded again, so that no hooks and shards of this training's engine remain in it.

    Args:
        recipe: recipe with a section ``public_pretrain``.
        records: public records, to be read with ``public_pretrain.data``.
        tokenizer: tokenizer of the model.
        num_labels: number of classes, if the model is a classifier.
        folder: folder to save the model in.
        changes: values that replace those of ``public_pretrain.train``. A change of ``disable_tqdm`` to true also
            removes the printed lines.
        callbacks: as for ``Trainer``.
    """
    public = recipe.public_pretrain
    assert public is not None, "the caller has a public stage"
    args = training_arguments({"output_dir": str(folder), **PLAIN, **public.train, **(changes or {})})
    whole = dataclasses.replace(recipe.model, quantization=None)  # all of it is trained here, and quantised afterwards
    model: PreTrainedModel = load_base_model(whole, tokenizer, num_labels)
    with args.main_process_first(desc="tokenizing the public text"):
        rows = tokenize_records(records, tokenizer, public.data, task=recipe.model.task)
    collator: Any = RowCollator(pad_token_id=tokenizer.pad_token_id, task=recipe.model.task)
    trainer = Trainer(
        model=model, args=args, train_dataset=rows, data_collator=collator, callbacks=list(callbacks) or None
    )
    if (changes or {}).get("disable_tqdm"):
        trainer.remove_callback(PrinterCallback)
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if args.should_save:
        trainer.accelerator.unwrap_model(trainer.model_wrapped).save_pretrained(folder, state_dict=state)
        sync_files(folder)  # every resume of the private run begins with loading them
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()


def start_in(folder: Path, model: ModelConfig) -> ModelConfig:
    """Return the recipe's model section with the model that `train_on_public_text` saved as the start."""
    return dataclasses.replace(model, name=str(folder), config=None, tokenizer_vocab_size=None)
