"""A federated run at the server: from a recipe over its rounds to the model and its report, with simulated clients.

A round is a step of the plan: draw a cohort, charge, ask, add up, add noise, update. It is charged before a client is
asked, whether or not it is given up later. The records are read as `dpllm.training.finetune` does, and each client has
those of one user.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase, TrainingArguments, get_scheduler

from dpllm.config import RECIPE_FILE, ConfigError, PrivacyConfig, Recipe, save_recipe
from dpllm.data.records import contents_of
from dpllm.data.rows import RowCollator, load_train_and_eval, tokenize_records, unit_index_of
from dpllm.data.shared_records import refuse_private_parts
from dpllm.data.units import UnitIndex
from dpllm.engines.processes import Processes
from dpllm.mechanism.catalogue import noise_of
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.parts import Spec
from dpllm.mechanism.sampling import secret_rng
from dpllm.methods.federated.client import Clients, LocalTraining, SharedWeights, Shares, is_secure
from dpllm.methods.federated.distributed import DistributedNoise, DistributedStep
from dpllm.methods.sections import FederatedConfig
from dpllm.models.load import load_base_model, prepare_model
from dpllm.models.starting_point import check_start
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.budget import require_room
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PrivacyPlan, format_plan, make_plan
from dpllm.privacy.rounding import up
from dpllm.privacy.run_folder import COMPLETED, is_used, note_release, snapshot
from dpllm.report.definition import FEDERATED, SECURE, TRUSTED, WHO_SEES
from dpllm.report.disclosures import HELD_OUT
from dpllm.report.release_notes import keep_utility
from dpllm.report.statement import MARKDOWN_FILE, write_report
from dpllm.training.arguments import training_arguments
from dpllm.training.draws import Charges, Draws
from dpllm.training.evaluation import HeldOut, HeldOutRows, Measurement, figure_words
from dpllm.training.finetune import Start, add_sources, console, evaluated, noted, public_start, show
from dpllm.training.ledger_notes import PrivateSources, note_data, note_units
from dpllm.training.preflight import PLAIN, check_recipe
from dpllm.training.save_rehearsal import bytes_to_write, rehearse, until_there_is_room
from dpllm.training.screen import Phases
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.signals import StopRequest, exit_code
from dpllm.training.trainer_outputs import StartingModel

GIVEN_UP = "rounds given up because too few clients answered; each stays charged"
"""The diagnostic of that name."""
TOO_MANY_LEFT = (
    "A round was given up, because too few clients answered. With the dropouts that the plan declares this almost "
    "never happens: δ counts on it. Find out how many clients left on average. If it was a larger share than "
    "declared, or if leaving depended on the records or on the draw, this ε and δ do not hold."
)
"""The open point of a run with such rounds."""


def require_federated(plan: PrivacyPlan | PrivacyConfig) -> None:
    """Refuse a plan, or a privacy section, that federated rounds cannot guarantee.

    Raises:
        ConfigError: its units are not clients or are not drawn as a whole, its clipping or noise is of an unsupported
            kind, or its random numbers are not secret.
    """
    unit = plan.protects if isinstance(plan, PrivacyConfig) else plan.unit
    if unit != "user" or plan.sampling != "unit":
        raise ConfigError(
            f"a federated run protects clients, and the plan has unit={unit!r} and sampling={plan.sampling!r}: "
            "set data.columns.unit to the column of the client's id, and leave sampling out"
        )
    clipping, noise = Spec.of(plan.clipping).kind, Spec.of(plan.noise).kind
    if clipping != "flat" or noise not in ("independent", "distributed"):
        raise ConfigError(
            f"a federated run has no {clipping!r} clipping with {noise!r} noise: leave "
            "privacy.clipping out, and set privacy.noise to independent (a trusted server) or distributed (secure "
            "aggregation)"
        )
    seeded = plan.seeded if isinstance(plan, PrivacyPlan) else plan.seed is not None
    if seeded or plan.selection is not None:
        raise ConfigError(
            "a federated run takes cohorts and noise from the operating system, and is released by itself: leave "
            "privacy.seed and privacy.selection out"
        )


def against_the_server(plan: PrivacyPlan) -> float:
    """Return ε of the noisy sums against somebody who knows the cohorts, for a client in every round."""
    event = plan.event
    assert isinstance(event, DistributedStep)
    return epsilon([(event.against_the_server, plan.num_steps)], plan.delta)


def words_about_the_server(plan: PrivacyPlan) -> str:
    """Describe who sees what, for the ledger."""
    words = "in this simulation one process sees the records of all clients. In a deployment of its rounds "
    if not is_secure(plan):
        return words + (
            "a trusted server sees the bounded update of each client of a cohort and adds the noise; ε protects from "
            "those who see the weights that it sends out or releases"
        )
    return words + (
        "the server sees the sum of a round with the noise of its clients, and no single update (secure aggregation). "
        "It knows the cohorts, and so do their members: for them no sampling hides a client, and for one in all "
        f"{plan.num_steps} rounds ε is at most {up(against_the_server(plan))} at the same δ"
    )


def require_rounds(plan: PrivacyPlan, clients: Clients, weights: SharedWeights) -> None:
    """Refuse rounds that would not have the guarantee of the plan.

    Raises:
        ConfigError: the plan is not that of a federated run, or its number of clients is different.
        ValueError: the model is too large for the grid of secure aggregation.
    """
    require_federated(plan)
    if clients.num_clients != plan.num_units:
        raise ConfigError(
            f"{clients.num_clients} clients exist, and the plan has N = {plan.num_units}: the sampling rate would "
            "be different. Make the plan for the fixed, public number of clients"
        )
    if is_secure(plan):
        Shares.of(plan).require_entries(max(weights.size(weights.of_round(number)) for number in (0, 1)))


class Rounds:
    """Computes the rounds of a run.

    Guarantee: each round has a truncated Poisson cohort from 256 bits of the operating system, over all N clients, and
    is charged before anybody is asked. The sum of updates of norm at most C gets noise of deviation σC or more, and is
    divided by the public b, never by the number of answers.

    Raises:
        ConfigError: the plan is not that of a federated run, or its number of clients is different.
        ValueError: the model is too large for the grid of secure aggregation.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        ledger: Charges,
        clients: Clients,
        weights: SharedWeights,
        optimizer: torch.optim.Optimizer,
        schedule: Any = None,
    ) -> None:
        """Check the plan, before anything is charged."""
        require_rounds(plan, clients, weights)
        self._plan, self._ledger, self._clients, self._weights = plan, ledger, clients, weights
        self._optimizer, self._schedule = optimizer, schedule
        self._shares = Shares.of(plan) if is_secure(plan) else None
        self._draws = Draws(plan, ledger, Processes(), plan.mechanism.sampler.steps(secret_rng()))
        self._noise = None
        if not plan.mechanism.noise.tensors_kept and self._shares is None:
            self._noise = plan.mechanism.noise.stream(NoiseSource(randomness=plan.randomness), plan.num_steps)

    def take(self) -> bool:
        """Compute the next round; return whether it changed the weights. False: it was given up, and stays charged.

        Raises:
            ValueError: the plan has no round left.
            LedgerError: the round cannot be charged; no client was asked.
        """
        number = self._ledger.num_steps
        drawn, _ = self._draws.take(self._draws.next(), mode="", error=None)
        names = self._weights.of_round(number)
        answers = self._clients.answers(drawn.tolist(), self._weights.read(), number)
        total = self._secure(answers) if self._shares else self._trusted(answers, number, self._weights.size(names))
        if total is not None:
            mean = total / self._plan.expected_batch_size
            for name, part in self._weights.divide(-mean, names).items():
                parameter = self._weights.parameters([name])[name]
                parameter.grad = part.to(parameter)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        if self._schedule is not None:
            self._schedule.step()
        return total is not None

    def _trusted(self, updates: dict[int, NDArray[Any]], number: int, size: int) -> NDArray[np.float64]:
        """Return the sum of the bounded updates, (size,), with the noise of the round."""
        assert self._noise is not None
        noisy = torch.from_numpy(sum(updates.values(), np.zeros(size)))
        self._noise.begin(number)
        self._noise.add_share_("the sum of the updates", noisy, self._plan.noise_stddev, rank=0, size=1)
        return noisy.numpy()

    def _secure(self, vectors: dict[int, NDArray[Any]]) -> NDArray[np.float64] | None:
        """Return the sum of the survivors' vectors, which hold the noise; None: there were too few."""
        event = self._plan.event
        assert self._shares is not None and isinstance(event, DistributedStep)
        if len(vectors) < event.min_batch_size:
            return None
        return self._shares.read(functools.reduce(np.add, vectors.values()))  # modulo 2^64


TRAIN_KEYS = (
    *("output_dir", "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("per_device_train_batch_size", "disable_tqdm"),
)
"""The keys of ``train`` that a federated run reads: rounds, the server's learning rate, rows of a client's step."""
_STOP = "finishing this round, then saving the model and its privacy report"


def check_federated(recipe: Recipe) -> TrainingArguments:
    """Check a recipe before any record is read; return the arguments of ``train``.

    Raises:
        ConfigError: it is not the recipe of a federated run, or sets options that such a run does not support.
    """
    section: FederatedConfig | None = recipe.beside.get("federated")
    if section is None:
        raise ConfigError(
            "the recipe has no section federated: add one (federated: {local_steps: 8}), or use dpllm train"
        )
    unknown = sorted(set(recipe.train) - set(TRAIN_KEYS))
    if unknown:
        raise ConfigError(
            f"train.{unknown[0]} is not used by a federated run, which takes {', '.join(TRAIN_KEYS)}: leave it out"
        )
    if int(recipe.train.get("max_steps") or 0) < 1:
        raise ConfigError("a federated run needs train.max_steps, the number of rounds: set it, such as 20")
    others: dict[str, object] = {
        "microbatch.pack": recipe.microbatch.pack,
        "microbatch.tokens": recipe.microbatch.tokens,
    }
    others |= {"model.quantization": recipe.model.quantization}
    given = [name for name, value in others.items() if value]
    if given or recipe.model.task != "causal_lm":
        raise ConfigError(
            f"a federated run does not support {given[0] if given else f'model.task={recipe.model.task}'}: its clients "
            "train a causal language model without it. Leave it out"
        )
    require_federated(recipe.privacy)
    noise = noise_of(Spec.of(recipe.privacy.noise))
    if isinstance(noise, DistributedNoise) and section.simulated_dropouts > noise.dropouts:
        raise ConfigError(
            f"federated.simulated_dropouts={section.simulated_dropouts:g}, and privacy.noise declares "
            f"dropouts={noise.dropouts:g} at most: δ counts on it. Declare as many as there are"
        )
    check_recipe(recipe)
    return training_arguments({**PLAIN, **recipe.train})


def read(
    recipe: Recipe, args: TrainingArguments, phases: Phases
) -> tuple[datasets.Dataset, datasets.Dataset | None, PrivacyPlan]:
    """Return the records of all clients, the held-out ones and the plan; print the plan. Clients are users."""
    phases.begin("reading the records")
    train, held_out = load_train_and_eval(recipe.data, recipe.privacy)
    refuse_private_parts(recipe, train, held_out)
    num_clients = unit_index_of(train, recipe.privacy).num_units
    phases.end(f"{num_clients:,} clients{f', {len(held_out):,} records held out' if held_out else ''}")
    phases.begin("planning", "the noise that ε needs" if recipe.privacy.epsilon else "")
    plan = make_plan(recipe.privacy, num_clients, args.max_steps)
    require_federated(plan)
    phases.end()
    show("privacy plan", [*format_plan(plan), ("who sees what", words_about_the_server(plan))])
    return train, held_out, plan


def run(recipe: Recipe) -> int:
    """Run a recipe with simulated clients up to the model and its report; return the exit code.

    Raises:
        ConfigError, ValueError, LedgerError, BudgetError: the run cannot begin, or would not have its guarantee.
    """
    phases = Phases(console, bars=not recipe.train.get("disable_tqdm"))
    phases.begin("checking the recipe", "options, model and output folder")
    args = check_federated(recipe)
    if is_used(Path(str(args.output_dir)) / LEDGER_FILE):
        raise ValueError(
            f"{args.output_dir} already holds a private run, and a federated run is not resumed: set train.output_dir "
            "to another folder. The rounds of the first run stay charged"
        )
    train, private_held_out, plan = read(recipe, args, phases)
    if recipe.privacy.budget_file:
        require_room(recipe.privacy.budget_file, plan, str(recipe.privacy.dataset))
    start = public_start(recipe, train, private_held_out, None, False, phases)
    phases.begin("loading the model, tokenizing the records")
    model = prepare_model(load_base_model(start.model, start.tokenizer, None), recipe.model)
    rows, units = rows_of_clients(recipe, train, start.tokenizer)
    collator = RowCollator(pad_token_id=_padding(start.tokenizer))
    held_out = None
    if private_held_out:
        held_out_rows = tokenize_records(private_held_out, start.tokenizer, recipe.data)
        held_out = HeldOut(HeldOutRows(private_held_out, held_out_rows, collator, recipe.data, start.tokenizer))
    server = Server(recipe, args, plan, model, start, held_out)

    def note(ledger: SharedLedger) -> None:
        note_units(ledger, units)
        note_data(ledger, rows, units, recipe.privacy)
        sources = PrivateSources()
        add_sources(sources, recipe, start, train, private_held_out)
        sources.note(ledger, model, plan)
        if (contents := contents_of(train)) is not None:
            ledger.remember_records(contents)

    def rows_of(client: int) -> list[Any]:
        numbers, _ = units.rows_of(np.array([client]))
        return list(rows.select(numbers))

    section, own = section_of(recipe), copy.deepcopy(model)
    weights = SharedWeights(own, section.lora)
    training = LocalTraining(own, weights, collator, section, args.per_device_train_batch_size)
    clients = Clients(plan, training, rows_of, section.simulated_dropouts)
    return server.carry_out(clients, phases, note)


def rows_of_clients(
    recipe: Recipe, records: datasets.Dataset, tokenizer: PreTrainedTokenizerBase
) -> tuple[datasets.Dataset, UnitIndex]:
    """Return the rows of records and the rows of each client: a long record may become several rows."""
    rows = tokenize_records(records, tokenizer, recipe.data, [str(recipe.privacy.unit)])
    return rows, unit_index_of(rows, recipe.privacy, secret_rng())


def section_of(recipe: Recipe) -> FederatedConfig:
    """Return the section ``federated``; `check_federated` made sure that there is one."""
    section: FederatedConfig = recipe.beside["federated"]
    return section


class Server:
    """The server of a run: the model whose weights the rounds move, its ledger, and its release.

    Attributes:
        model: of the server.
        folder: of the run.
        held_out: records to measure before and after. None: there are none.

    Raises:
        ConfigError: the starting weights may hold private records.
    """

    def __init__(
        self,
        recipe: Recipe,
        args: TrainingArguments,
        plan: PrivacyPlan,
        model: Any,
        start: Start,
        held_out: HeldOut | None,
    ) -> None:
        """Check the starting weights; nothing is written or charged."""
        self._recipe, self._args, self._plan, self._start = recipe, args, plan, start
        self.model, self.folder = model, Path(str(args.output_dir))
        self.held_out = held_out
        self._points = [*start.declared, *check_start(model, self.folder, recipe.model.start_is_independent)]

    def carry_out(self, clients: Clients, phases: Phases, note: Callable[[SharedLedger], None]) -> int:
        """Compute all rounds and release the model; return the exit code, which is not 0 after a signal."""
        recipe, plan = self._recipe, self._plan
        config, weights = section_of(recipe), SharedWeights(self.model, section_of(recipe).lora)
        optimizer = _optimizer(config, list(weights.parameters().values()), self._args.learning_rate)
        schedule = get_scheduler(
            self._args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=self._args.get_warmup_steps(plan.num_steps),
            num_training_steps=plan.num_steps,
        )
        require_rounds(plan, clients, weights)  # before anything is charged
        phases.say(rehearse(self.model, self._save, self._args, self._start.tokenizer))
        ledger = SharedLedger.create(
            self.folder / LEDGER_FILE, plan, Processes(), self._start.public, recipe.privacy.budget_file
        )
        request = StopRequest(_STOP)
        with request.listening():
            with ledger.ended_on_failure():
                save_recipe(recipe, self.folder / RECIPE_FILE)
                note(ledger)
                self._note(ledger)
                before = self._measured("before", phases)
                rounds = Rounds(plan, ledger, clients, weights, optimizer, schedule)
                given_up = self._take(rounds, ledger, phases, request)
                after = self._measured("after", phases)
                self._release(ledger, phases, before, after)
            self._show(ledger, before, after, given_up)
        return exit_code(request.number) if request.number is not None else 0

    def _note(self, ledger: SharedLedger) -> None:
        ledger.append_fact(FEDERATED, SECURE if is_secure(self._plan) else TRUSTED)
        ledger.append_fact(WHO_SEES, words_about_the_server(self._plan))
        for point in self._points:
            ledger.append_open_point(point)

    def _take(self, rounds: Rounds, ledger: SharedLedger, phases: Phases, request: StopRequest) -> int:
        """Compute the rounds until a signal; return how many were given up."""
        phases.begin("training", f"{self._plan.num_steps:,} rounds")
        given_up = 0
        with phases.bar(self._plan.num_steps, "round") as moved:
            for _ in range(self._plan.num_steps):
                if not rounds.take():
                    given_up += 1
                moved(1)
                if request.requested:
                    break
        if given_up:
            ledger.append_diagnostic(GIVEN_UP, given_up)
            ledger.append_open_point(TOO_MANY_LEFT)
        phases.end(f"{ledger.num_steps} rounds charged, {given_up} of them given up")
        return given_up

    def _measured(self, when: str, phases: Phases) -> Measurement | None:
        if self.held_out is None:
            return None
        phases.begin(f"evaluating {when}", "the held-out records")
        return evaluated(self.model, self.held_out, None, phases)

    def _release(
        self, ledger: SharedLedger, phases: Phases, before: Measurement | None, after: Measurement | None
    ) -> None:
        """Save the model with plan, ledger, report and card."""
        phases.begin("saving", "the model with its plan, ledger, report and card")
        figures = figure_words(before, after)
        public = self._recipe.data.eval.public
        if figures and not public:
            ledger.append_disclosure(HELD_OUT, len(figures))
            keep_utility(self.folder, figures)
        elif after is not None:
            ledger.append_score(after.score, after.value)
        files = snapshot(self.folder)
        needed = bytes_to_write(self.model, self._args, 0, merges=False)
        until_there_is_room(lambda: self._save(self.folder), self.folder, needed, self._save)
        note_release(ledger, self.folder, files)
        ledger.append_end(COMPLETED, independent=self._recipe.privacy.stop == "independent")
        elsewhere = () if public else tuple(figures)
        notes = dataclasses.replace(noted(self._recipe), utility=figures if public else {}, utility_elsewhere=elsewhere)
        report = write_report(self.folder, self._plan, read_ledger(ledger.path), notes, opened=ledger)
        start = StartingModel(self._recipe.model.name, self._recipe.model.task)
        start.write_card(self.folder, report, self.model, ledger=ledger)
        phases.end()

    def _save(self, folder: str | Path, state: dict[str, Any] | None = None) -> None:
        self.model.save_pretrained(folder, state_dict=state)
        self._start.tokenizer.save_pretrained(folder)

    def _show(self, ledger: SharedLedger, before: Measurement | None, after: Measurement | None, given_up: int) -> None:
        plan = self._plan
        rows = [
            *figure_words(before, after).items(),
            ("guarantee", str(plan.guarantee.of(ledger.history))),
            ("unit of privacy", f"one client of {plan.num_units:,}"),
            ("rounds", f"{ledger.num_steps} of {plan.num_steps} charged, {given_up} given up"),
            ("model", str(self.folder)),
            ("privacy report", str(self.folder / MARKDOWN_FILE)),
        ]
        show("done", rows)


def _optimizer(config: FederatedConfig, parameters: list[Any], rate: float) -> torch.optim.Optimizer:
    if config.server_optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=config.server_momentum)
    return torch.optim.Adam(parameters, lr=rate)


def _padding(tokenizer: PreTrainedTokenizerBase) -> int:
    assert isinstance(tokenizer.pad_token_id, int)  # load_tokenizer sets one
    return tokenizer.pad_token_id
