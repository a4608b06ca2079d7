"""A PATE run: teachers are trained in turn and vote, labels or completions are released, and a student learns them.

Before the vote nothing leaves the process; the vote is charged before it is counted; everything after it reads no
private record. Trainings are ordinary and have no noise. A teacher's training may do anything with the teacher's own
units; nothing of it is written or shown but its votes.

A classifier votes on all texts before the next teacher is trained, and is not kept. Causal language models are kept in
memory until the last text is written: of each only the trained parameters, which are small with adapters.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer
from transformers.trainer_utils import set_seed
from transformers.utils import logging

from dpllm.config import ConfigError
from dpllm.config.query_recipe import QueryRecipe
from dpllm.data.rows import RowCollator, tokenize_records, unit_index_of
from dpllm.data.units import Int64Array, UnitIndex
from dpllm.ghost.model_calls import tokens_by_themselves
from dpllm.methods.pate.prepare import QUIET, Prepared, prepare
from dpllm.methods.pate.votes import (
    NO_LABEL,
    Ballots,
    Partition,
    TokenVotes,
    ballots_of,
    released_labels,
    written_tokens,
)
from dpllm.methods.queries.run import QueryCommand, QueryRun, begin_from
from dpllm.methods.sections import PateConfig
from dpllm.models.generation import TextGenerator
from dpllm.models.load import StartingValues, load_base_model, load_tokenizer, prepare_model
from dpllm.models.starting_point import check_start
from dpllm.models.writing import Continuation
from dpllm.privacy.query_plan import QueryPlan
from dpllm.report.disclosures import HELD_OUT
from dpllm.training.arguments import training_arguments
from dpllm.training.evaluation import measure

Say = Callable[[str], None]
Progress = Callable[[int], None]
"""Called with the number of teachers that have voted, or for tokens that were trained, after each."""
_ROWS = 64  # rows of a forward pass
_SEED_BITS = 32
State = Mapping[str, Tensor]
"""Values of trainable parameters and buffers, by name: a teacher."""


def fresh_seed() -> int:
    """Return a seed from the operating system, so that random numbers of a training do not depend on other data."""
    return secrets.randbits(_SEED_BITS)


def train_without_privacy(
    model: Any, rows: datasets.Dataset, collator: RowCollator, section: Mapping[str, Any], folder: Path
) -> Any:
    """Train a model in place on rows, without privacy, and return it.

    Nothing is written, and nothing is shown. Random numbers come from a fresh seed.
    """
    seed = fresh_seed()
    fixed = {**QUIET, "output_dir": str(folder), "seed": seed, "data_seed": seed}
    args = training_arguments({"dataloader_pin_memory": torch.accelerator.is_available(), **section, **fixed})
    verbosity = logging.get_verbosity()
    try:
        trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collator)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    finally:
        logging.set_verbosity(verbosity)
    accelerator = trainer.accelerator
    trained = accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
    accelerator.free_memory()
    return trained


class OneBase:
    """One model in memory, which is reset to its start for every teacher.

    Guarantee: each training starts from the same values of every parameter and buffer that can change, and of other
    module state (the longest row so far, a number of hash buckets), whatever was trained before.
    """

    def __init__(self, model: nn.Module) -> None:
        """Copy the values that a training may change: trainable parameters and buffers."""
        self.model = model
        changing = [*((name, p) for name, p in model.named_parameters() if p.requires_grad), *model.named_buffers()]
        self._start = {name: tensor.detach().clone().cpu() for name, tensor in changing}
        self._attributes = StartingValues(model)

    def begin(self) -> Any:
        """Reset the model to its start with a fresh seed of random numbers, and return it."""
        set_seed(fresh_seed())
        self._attributes.restore()
        return self.put()

    def state(self) -> State:
        """Return a copy of the current values of all that a training may change, on the model's device."""
        return {name: tensor.detach().clone() for name, tensor in self._tensors() if name in self._start}

    @torch.no_grad()
    def put(self, state: State | None = None) -> Any:
        """Set all that a training may change, and return the model.

        Args:
            state: as returned by `state`; None: the start.
        """
        values = self._start if state is None else state
        for name, tensor in self._tensors():
            if name in self._start:
                tensor.copy_(values[name])
        return self.model

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


@torch.no_grad()
def classes_of(model: Any, rows: datasets.Dataset, collator: RowCollator) -> Int64Array:
    """Return the class with the highest score of each row, (N,): a whole number, even if scores are not finite."""
    lengths: Sequence[int] = [len(ids) for ids in rows["input_ids"]]
    order = np.argsort(lengths, kind="stable")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    classes_N = np.empty(len(rows), dtype=np.int64)
    for start in range(0, len(rows), _ROWS):
        numbers = order[start : start + _ROWS]
        batch = collator(list(rows.select(numbers)))
        batch.pop("labels")
        logits_BC = model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits.float()
        classes_N[numbers] = logits_BC.nan_to_num(nan=-torch.inf).argmax(dim=1).cpu().numpy()
    model.train(was_training)
    return classes_N


class Classroom:
    """The public model in memory with its tokenizer; turns records and texts into its rows."""

    def __init__(self, prepared: Prepared) -> None:
        """Load the model with its adapters and its tokenizer, which may be trained on the public texts.

        Raises:
            ConfigError: they cannot be loaded, or the start holds private records.
        """
        self.prepared = prepared
        self.tokenizer = load_tokenizer(prepared.model, prepared.prompts[prepared.prompts_data.column("text")])
        base = load_base_model(prepared.model, self.tokenizer, prepared.num_classes)
        model = prepare_model(base, prepared.model)
        declared = check_start(model, None, prepared.model.start_is_independent)
        self.points = (*prepared.points, *declared)
        self.base = OneBase(model)
        self.collator = RowCollator(pad_token_id=self.tokenizer.pad_token_id, task=prepared.model.task)

    def rows(self, records: datasets.Dataset, keep: Sequence[str] = ()) -> datasets.Dataset:
        """Return the rows of records."""
        prepared = self.prepared
        data, task = prepared.recipe.data, prepared.model.task
        return tokenize_records(records, self.tokenizer, data, keep, task, prepared.num_classes)

    def private_rows(self) -> datasets.Dataset:
        """Return the rows of the private records, with the ids of their users."""
        column = self.prepared.recipe.privacy.unit
        return self.rows(self.prepared.private, [column] if column else [])

    def prompts(self) -> datasets.Dataset:
        """Return the rows of the public texts; their class, 0, is not read."""
        return self.rows(self.labelled(np.zeros(len(self.prepared.prompts), dtype=np.int64)))

    def labelled(self, labels_N: Int64Array) -> datasets.Dataset:
        """Return the public texts that have a label, with their labels, in the columns of the private records."""
        prepared, data = self.prepared, self.prepared.recipe.data
        chosen = np.flatnonzero(labels_N != NO_LABEL)
        texts = prepared.prompts.select(chosen)[prepared.prompts_data.column("text")]
        return datasets.Dataset.from_dict({data.column("text"): texts, data.column("label"): labels_N[chosen].tolist()})

    def require_room(self) -> None:
        """Refuse public texts that leave no room for T new tokens.

        Raises:
            ConfigError: a text is too long, for the model or for a row of the student.
        """
        prepared = self.prepared
        if not prepared.tokens:
            return
        new = prepared.new_tokens
        sees = getattr(self.base.model.config, "max_position_embeddings", None) or prepared.recipe.data.max_length
        apart = tokens_by_themselves(self.base.model)  # beyond it, a text depends on others in its batch
        limit = min(sees, prepared.recipe.data.max_length, sees if apart is None else apart)
        for number, row in enumerate(self.encoded_prompts()):
            if len(row) + new > limit:
                raise ConfigError(
                    f"public text {number} has {len(row)} tokens, {len(row) + new} with pate.max_new_tokens={new}, "
                    f"and a row has room for {limit}: shorten it, lower pate.max_new_tokens, or raise data.max_length"
                )

    def encoded_prompts(self) -> list[list[int]]:
        """Return the tokens of each public text, as they begin a row of a record."""
        encode = TextGenerator(self.base.model, self.tokenizer).encode
        return [encode(text) for text in self._prompt_texts()]

    def ends(self) -> list[int]:
        """Return the tokens that end a text."""
        return TextGenerator(self.base.model, self.tokenizer).ends

    def completed(self, texts: Sequence[Sequence[int]]) -> datasets.Dataset:
        """Return the public texts that have new tokens, completed, in the columns of the private records."""
        data, prompts = self.prepared.recipe.data, self._prompt_texts()
        records = [
            data.form.record(prompt, self._decoded(row, new)) or {}
            for prompt, row, new in zip(prompts, self.encoded_prompts(), texts, strict=True)
            if new
        ]
        return datasets.Dataset.from_dict({name: [one[name] for one in records] for name in data.form.required})

    def _prompt_texts(self) -> list[str]:
        return list(self.prepared.prompts[self.prepared.prompts_data.column("text")])

    def _decoded(self, row: Sequence[int], new: Sequence[int]) -> str:
        """Decode new tokens; at the start of a text, tokens may be decoded without their space."""
        head, whole = self._text([*row]), self._text([*row, *new])
        return whole[len(head) :] if whole.startswith(head) else self._text(new)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _division(classroom: Classroom, rows: datasets.Dataset, run: QueryRun) -> tuple[Partition, UnitIndex]:
    """Return the secret division of the units among the teachers, and the rows of each unit."""
    prepared = classroom.prepared
    units = unit_index_of(rows, prepared.recipe.privacy, run.randomness.generator())
    return Partition(prepared.plan.num_units, prepared.options.teachers, run.randomness.generator()), units


def _teacher(classroom: Classroom, rows: datasets.Dataset, run: QueryRun) -> Any:
    """Return a teacher, trained from the start on these rows; one without rows is the public model."""
    model, section = classroom.base.begin(), classroom.prepared.options.train
    return train_without_privacy(model, rows, classroom.collator, section, run.private_folder) if len(rows) else model


def labelled_texts(
    classroom: Classroom, rows: datasets.Dataset, run: QueryRun, say: Say, done: Progress
) -> datasets.Dataset:
    """Return the public texts that the teachers labelled, in the columns of the private records."""
    prepared = classroom.prepared
    ballots = count_votes(classroom, rows, run, done)
    say(f"labelling {prepared.vote.num_prompts:,} public texts by a noisy vote")
    labels_N = released_labels(prepared.vote, prepared.options.teachers, run, ballots)
    labelled = classroom.labelled(labels_N)
    run.fact("labelled public texts", len(labelled))
    return labelled


def count_votes(classroom: Classroom, rows: datasets.Dataset, run: QueryRun, done: Progress) -> Ballots:
    """Train every teacher on the rows of its units; return the counts of the votes, which are private."""
    partition, units = _division(classroom, rows, run)
    prompts, num_classes = classroom.prompts(), classroom.prepared.num_classes
    assert num_classes is not None, "teachers of tokens write in completed_texts"

    def vote_of(teacher: int, rows_of_teacher: Int64Array) -> Int64Array:
        model = _teacher(classroom, rows.select(rows_of_teacher), run)
        classes_N = classes_of(model, prompts, classroom.collator)
        done(teacher + 1)
        return classes_N

    return ballots_of(partition, units, Ballots(len(prompts), num_classes), vote_of)


class Panel:
    """Teachers that write (`dpllm.methods.pate.votes.Writers`): adapters over one model in memory.

    Each has its own keys and values for the texts so far. Tokens are drawn as argmax(logits + τ·g), with Gumbel noise g
    that the public model and all teachers share: each draws from its own distribution at temperature τ, and models that
    agree draw the same token (coordinated sampling; Cohen et al., Hot PATE, arXiv:2312.02132). The noise g depends on
    no record, so a vote is still a function of one teacher's units, of released tokens, and of public numbers.

    The candidates are the tokens with the largest logits + τ·g of the public model, and each teacher votes for its best
    among them. So no vote is lost, and every token can become a candidate.

    Args:
        base: the public model at its start, with adapters.
        teachers: the values of each teacher.
        prompts: tokens of each public text, one at least.
        options: candidates and temperature.
        rng: secret generator of the common random numbers, which are no noise of the release.
        barred: tokens that no text may have, such as padding.
        vocabulary: number of the tokenizer's tokens; a model may have unused ones after them.
    """

    def __init__(
        self,
        base: OneBase,
        teachers: Sequence[State],
        prompts: Sequence[Sequence[int]],
        options: PateConfig,
        rng: np.random.Generator,
        barred: Collection[int] = (),
        vocabulary: int | None = None,
    ) -> None:
        """Start the texts."""
        self.num_texts, self.num_teachers = len(prompts), len(teachers)
        self._base, self._teachers, self._options, self._rng = base, teachers, options, rng
        self._barred, self._vocabulary = sorted(barred), vocabulary
        model: Any = base.begin().eval()  # so that no teacher's module state affects the candidates
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        length = max(map(len, prompts))
        self._public, *self._own = (
            Continuation(model, prompts, length, len(prompts)) for _ in range(1 + self.num_teachers)
        )
        self._noise_RV: Tensor | None = None
        self._candidates_RC: Tensor | None = None

    def candidates(self) -> Int64Array:
        """Return the candidates of the next place, (R, C), from the public model and fresh shared random numbers."""
        self._noise_RV = None
        scores_RV = self._scores(self._public, None)
        known = scores_RV.shape[1] - len(self._barred)
        count = min(self._options.candidates or known, known)
        self._candidates_RC = scores_RV.topk(count, dim=1).indices
        return self._candidates_RC.cpu().numpy()

    def vote(self, teacher: int) -> Int64Array:
        """Return the candidate with a teacher's highest score, (R,): a whole number, even if scores are not finite."""
        assert self._candidates_RC is not None, "candidates come first"
        scores_RV = self._scores(self._own[teacher], self._teachers[teacher])
        return scores_RV.gather(1, self._candidates_RC).argmax(dim=1).cpu().numpy()

    def append(self, tokens_R: Int64Array) -> None:
        """Append a token to each text, for every teacher."""
        for rows in (self._public, *self._own):
            rows.append(torch.as_tensor(tokens_R, device=self._device))

    @property
    def _device(self) -> Any:
        return next(self._base.model.parameters()).device

    def _scores(self, rows: Continuation, state: State | None) -> Tensor:
        """Return logits + τ·g of the public model or of a teacher, (R, V)."""
        self._base.put(state)
        ((_, logits_RV),) = rows.logits()
        wide_RV = logits_RV[:, : self._vocabulary].to(torch.promote_types(logits_RV.dtype, torch.float32)).clone()
        if self._options.temperature:
            if self._noise_RV is None:
                drawn = self._rng.gumbel(scale=self._options.temperature, size=tuple(wide_RV.shape))
                self._noise_RV = torch.from_numpy(drawn).to(wide_RV)
            wide_RV += self._noise_RV
        wide_RV[:, self._barred] = -torch.inf
        return wide_RV.nan_to_num(nan=-torch.inf, posinf=torch.finfo(wide_RV.dtype).max, neginf=-torch.inf)


def completed_texts(
    classroom: Classroom, rows: datasets.Dataset, run: QueryRun, say: Say, done: Progress
) -> datasets.Dataset:
    """Return the public texts that the teachers completed, in the columns of the private records."""
    prepared = classroom.prepared
    options, vote = prepared.options, prepared.vote
    teachers = trained_teachers(classroom, rows, run, done)
    prompts = classroom.encoded_prompts()
    say(f"continuing {len(prompts):,} public texts by at most {vote.most_labels:,} tokens, each by a noisy vote")
    votes = TokenVotes(vote, options.teachers, run, options.public_votes)
    ends, rng = classroom.ends(), run.randomness.generator()
    barred = {number for number in classroom.tokenizer.all_special_ids if number not in ends}
    texts: list[list[int]] = []
    for start in range(0, len(prompts), options.rows_per_pass):
        part = prompts[start : start + options.rows_per_pass]
        if not votes.left:
            texts += [[] for _ in part]
            continue
        panel = Panel(classroom.base, teachers, part, options, rng, barred, len(classroom.tokenizer))
        texts += written_tokens(panel, votes, prepared.new_tokens, ends)
    completed = classroom.completed(texts)
    run.fact("completed public texts", len(completed))
    run.fact("tokens of the completions", sum(map(len, texts)))
    run.fact("tokens by vote, with those that end a text", vote.most_labels - votes.left)
    return completed


def trained_teachers(classroom: Classroom, rows: datasets.Dataset, run: QueryRun, done: Progress) -> list[State]:
    """Train every teacher on the rows of its units; return their parameters, which are private."""
    partition, units = _division(classroom, rows, run)
    teachers: list[State] = []
    for teacher in range(partition.num_teachers):
        _teacher(classroom, rows.select(partition.rows_of(teacher, units)), run)
        teachers.append(classroom.base.state())
        done(teacher + 1)
    return teachers


LABELS_FILE, TEXTS_FILE = "labels.jsonl", "texts.jsonl"
STUDENT_FOLDER = "student"


@dataclass(frozen=True)
class Taught:
    """The public result of a run.

    Attributes:
        num_texts: texts that got a label or a completion.
        figures: measured on held-out records, by name; empty without them. ε covers them only if the records are
        public.
    """

    num_texts: int
    figures: Mapping[str, float]


def teach(prepared: Prepared, say: Say, done: Progress) -> Taught:
    """Train the teachers, release noisy labels or completions, and train the student.

    Raises:
        ValueError, ConfigError: the model or a record cannot be used; or the folder holds a run.
        BudgetError: the budget does not allow the run.
    """
    recipe, options = prepared.recipe, prepared.options
    say(f"reading the model {prepared.model.name or 'of model.config'}")
    classroom = Classroom(prepared)
    rows = classroom.private_rows()  # an unusable record ends the run before anything is charged
    classroom.require_room()
    file = TEXTS_FILE if prepared.tokens else LABELS_FILE
    with begin_from(recipe, prepared.plan, results=[file, *([STUDENT_FOLDER] if options.student else [])]) as run:
        run.note_units(unit_index_of(rows, recipe.privacy))
        for point in classroom.points:
            run.open_point(point)
        say(f"training {options.teachers} teachers in turn, without privacy; nothing of them is shown")
        made = (completed_texts if prepared.tokens else labelled_texts)(classroom, rows, run, say, done)
        path = Path(recipe.output_dir) / file
        write_texts(made, path)
        figures: dict[str, float] = {}
        released = [path]
        try:
            if options.student and len(made):
                kind = "completed" if prepared.tokens else "labelled"
                say(f"training the student on {len(made):,} {kind} public texts")
                if prepared.tokens:
                    figures |= measured(classroom, run, classroom.base.begin(), "the public model")
                student = train_student(classroom, run, made)
                released += save_student(classroom, student)
                figures |= measured(classroom, run, student, "the student")
        finally:  # the vote is charged, even if the student fails
            run.release(*released)
    return Taught(len(made), figures)


def write_texts(made: datasets.Dataset, path: Path) -> None:
    """Write the labelled or completed texts as JSON lines, in the columns of the private records."""
    with open(path, "w", encoding="utf-8") as file:
        for row in made:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def train_student(classroom: Classroom, run: QueryRun, made: datasets.Dataset) -> Any:
    """Train the student on the labelled or completed texts, from the teachers' start, and return it.

    It is computed from released labels or tokens, public texts and public weights, so it costs nothing.
    """
    options = classroom.prepared.options
    section = options.train if options.student_train is None else options.student_train
    rows = classroom.rows(made)
    return train_without_privacy(classroom.base.begin(), rows, classroom.collator, section, run.private_folder)


def save_student(classroom: Classroom, student: Any) -> list[Path]:
    """Write the student and its tokenizer; return their files."""
    folder = Path(classroom.prepared.recipe.output_dir) / STUDENT_FOLDER
    student.save_pretrained(folder)
    classroom.tokenizer.save_pretrained(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def measured(classroom: Classroom, run: QueryRun, model: Any, whose: str) -> dict[str, float]:
    """Measure a model on the held-out records, if there are any; return accuracy or perplexity by name.

    ε does not cover a figure of private records: it is recorded as a disclosure and not written.
    """
    prepared = classroom.prepared
    if prepared.held_out is None:
        return {}
    found = measure(model, classroom.rows(prepared.held_out), classroom.collator)
    if prepared.recipe.data.eval.public:
        run.fact(f"{found.name} of {whose} on public held-out records", f"{found.value:.4g}")
    else:
        run.disclose(HELD_OUT)
    return {f"{found.name} of {whose} on the held-out records": found.value}


def _carry_out(recipe: QueryRecipe, prepared: Prepared, plan: QueryPlan, say: Say) -> dict[str, Any]:
    teachers, every = recipe.options.teachers, max(1, recipe.options.teachers // 10)

    def done(number: int) -> None:
        if number % every == 0 or number == teachers:
            say(f"  {number} of {teachers} teachers {'are trained' if prepared.tokens else 'have voted'}")

    taught = teach(prepared, say, done)
    figures = {name: float(f"{value:.4g}") for name, value in taught.figures.items()}
    return {"texts" if prepared.tokens else "labels": taught.num_texts, **figures}


QUERY = QueryCommand(
    "reading the records and the public texts", prepare, lambda recipe, prepared: prepared.plan, _carry_out
)
