"""How good is the released model at a given ε, and what does each part of a private run contribute to it?

    python benchmarks/utility.py --model stories260K --data trainset.csv --held-out devset.csv --json utility.json
    python benchmarks/utility.py … --arms textbook "banded, average" --epsilons 8 --rates 0.5 1 2 --runs 2
    python benchmarks/utility.py --report utility.json --figure utility.svg           # table and picture of its runs

Every run goes through the product: `DPTrainer` with the real sampler, noise, accountant, ledger and report. The figure
is the perplexity per token of held-out references, given the prompt, of the model that it saved. All arms start from
the same weights and take the same number of steps with the same expected batch, so they cost the same compute.

non-private       the stock `transformers.Trainer` with AdamW and a linear schedule
textbook          DP-AdamW: independent noise, linear schedule
average           independent noise, constant rate after a warm-up; the average of the iterates is released
banded            noise correlated over the steps, the same schedule; the last iterate is released
banded, average   both
public stage      before `banded, average`: steps without privacy on sentences made from public templates
low-passed AdamW  `banded, average` with the product's optim_args: second_moment=low_passed; only where asked for
corrected AdamW   `banded, average` with second_moment=corrected, which is AdamBC entry by entry; only where asked for
AdamBC            `banded, average` with AdamBC in place of AdamW (benchmarks/optimizers.py); only where asked for
low-passed        `banded, average` with a second moment of the first moment by rows, only where asked for
DiSK              `textbook` with DiSK in place of AdamW, only where asked for
scaled            `banded, average` of a model whose gradients are scaled before they are clipped, by factors of public
                  gradients (benchmarks/scaling.py), only where asked for

Learning rates are tuned on the held-out records, in every arm alike: `--rates` multiplies each arm's base rate, and the
table has the best. That choice looks at records, so it is no part of what ε covers; the benchmark's records are public.
A run that the JSON file already holds is not repeated, and the file is written after each run.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from optimizers import experiment
from real_records import quiet, records_of, section_of
from scaling import merge, public_squares, scale

from dpllm import DPTrainer, PrivacyConfig
from dpllm.config import ConfigError, ModelConfig
from dpllm.data.rows import DataError, RowCollator, tokenize_records
from dpllm.engines.guard import innermost
from dpllm.models.load import load_base_model, load_tokenizer, prepare_model
from dpllm.report.figures import BLUE, GREY, ORANGE
from dpllm.training.evaluation import measure

EMA = {"kind": "ema", "decay": 0.95}
CONSTANT = "constant_with_warmup"


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        rate: base learning rate.
        noise: of the recipe's privacy section; None: without privacy.
        schedule: of the learning rate.
        average: of the iterates, as in the recipe's train section.
        public_steps: steps on public sentences beforehand.
        optimizer: of `optimizers.EXPERIMENTS`; None: AdamW.
        scaled: whether gradients are scaled before they are clipped.
        optim_args: of AdamW, as in the recipe's train section.
    """

    rate: float
    noise: Any = "independent"
    schedule: str = CONSTANT
    average: Any = None
    public_steps: int = 0
    optimizer: str | None = None
    scaled: bool = False
    optim_args: str | None = None


# The rates of experiments are such that entries without a signal move as far as with AdamW.
ARMS = {
    "non-private": Arm(rate=4e-3, noise=None, schedule="linear"),
    "textbook": Arm(rate=4e-3, schedule="linear"),
    "average": Arm(rate=4e-3, average=EMA),
    "banded": Arm(rate=3.2e-2, noise="banded"),
    "banded, average": Arm(rate=3.2e-2, noise="banded", average=EMA),
    "public stage": Arm(rate=3.2e-2, noise="banded", average=EMA, public_steps=120),
    "low-passed AdamW": Arm(rate=3.2e-2, noise="banded", average=EMA, optim_args="second_moment=low_passed"),
    "corrected AdamW": Arm(rate=3.2e-2, noise="banded", average=EMA, optim_args="second_moment=corrected"),
    "AdamBC": Arm(rate=1e-2, noise="banded", average=EMA, optimizer="AdamBC"),
    "low-passed": Arm(rate=2.3e-3, noise="banded", average=EMA, optimizer="low-passed"),
    "DiSK": Arm(rate=3e-3, schedule="linear", optimizer="DiSK"),
    "scaled": Arm(rate=3.2e-2, noise="banded", average=EMA, scaled=True),
}
_COLOURS = (GREY, ORANGE, "#b08d2f", "#5b8e7d", BLUE, "#8a5a83")
USUAL = [name for name, arm in ARMS.items() if arm.optimizer is arm.optim_args is None and not arm.scaled]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs have in common."""

    model: str
    data: str
    held_out: str
    columns: tuple[str, str] = ("mr", "ref")
    units: int = 5000
    held_out_units: int = 500
    batch: int = 128
    steps: int = 160
    delta: float = 2e-5
    clip_norm: float = 0.1
    max_length: int = 320
    max_tokens: int = 8192


@dataclass(frozen=True)
class Material:
    """The start and the rows of all runs.

    Attributes:
        base: the model, never trained itself.
        tokenizer: its tokenizer.
        rows: of the training records.
        held_out: rows of the held-out records.
    """

    base: Any
    tokenizer: Any
    rows: Any
    held_out: Any

    @property
    def collator(self) -> RowCollator:
        """Pads rows."""
        return RowCollator(pad_token_id=self.tokenizer.pad_token_id)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run to make."""

    arm: str
    mode: str
    epsilon: float | None
    rate: float
    number: int

    @property
    def key(self) -> str:
        """Name of the run in the JSON file."""
        return f"{self.arm} | {self.mode} | {self.epsilon} | {self.rate:g} | {self.number}"


def prepare(settings: Settings) -> Material:
    """Load the model and the records.

    Raises:
        ValueError: something cannot be loaded.
    """
    section = ModelConfig(name=settings.model)
    tokenizer = load_tokenizer(section)

    def rows(path: str, most: int) -> Any:
        data = section_of(path, settings.columns, settings.max_length)
        return tokenize_records(records_of(data, most), tokenizer, data)

    return Material(
        base=load_base_model(section, tokenizer),
        tokenizer=tokenizer,
        rows=rows(settings.data, settings.units),
        held_out=rows(settings.held_out, settings.held_out_units),
    )


# -------------------------------------------------------------- public sentences

_PUBLIC: dict[str, Sequence[str]] = {
    "name": ("The Green Lamp", "The Old Mill", "River House", "Corner Table", "The Silver Fork", "Blue Door"),
    "eatType": ("restaurant", "pub", "coffee shop"),
    "food": ("Italian", "French", "Chinese", "Indian", "English", "Japanese", "Fast food"),
    "priceRange": ("cheap", "moderate", "high", "less than £20", "£20-25", "more than £30"),
    "customer rating": ("low", "average", "high", "1 out of 5", "3 out of 5", "5 out of 5"),
    "area": ("city centre", "riverside"),
    "familyFriendly": ("yes", "no"),
    "near": ("the station", "the Market Hall", "Hill Park", "the Grand Theatre"),
}
_SENTENCES: dict[str, Sequence[str]] = {
    "food": ("It serves {} food.", "You can get {} food there."),
    "priceRange": ("Its prices are {}.", "The price range is {}."),
    "customer rating": ("It has a customer rating of {}.", "Customers rate it {}."),
    "area": ("It is in the {} area.", "You find it in the {}."),
    "near": ("It is near {}.", "It is located close to {}."),
}
_FRIENDLY = {"yes": "It is family friendly.", "no": "It is not family friendly."}


def template_pairs(count: int, columns: tuple[str, str], seed: int = 0) -> datasets.Dataset:
    """Return prompts and sentences about restaurants from templates, without a look at any record.

    The eight attributes are those of the E2E challenge's public description; names, words and sentences are made up.

    >>> template_pairs(1, ("mr", "ref"))[0]["mr"].startswith("name[")
    True
    """
    pick, pairs = random.Random(seed), []
    for _ in range(count):
        chosen = {"name", "eatType", *pick.sample(list(_PUBLIC)[2:], k=pick.randint(1, 6))}
        values = {name: pick.choice(options) for name, options in _PUBLIC.items() if name in chosen}
        words = [f"{values['name']} is a {values['eatType']}."]
        words += [pick.choice(forms).format(values[name]) for name, forms in _SENTENCES.items() if name in values]
        words += [_FRIENDLY[values["familyFriendly"]]] if "familyFriendly" in values else []
        prompt = ", ".join(f"{name}[{value}]" for name, value in values.items())
        pairs.append(dict(zip(columns, (prompt, " ".join(words)), strict=True)))
    return datasets.Dataset.from_list(pairs)


def public_rows(settings: Settings, material: Material, count: int) -> Any:
    """Return rows of public sentences."""
    data = section_of("templates", settings.columns, settings.max_length)
    return tokenize_records(template_pairs(count, settings.columns), material.tokenizer, data)


def public_start(settings: Settings, material: Material, steps: int) -> Any:
    """Return the model after some steps without privacy on public sentences."""
    rows = public_rows(settings, material, 3000)
    model = copy.deepcopy(material.base)
    with tempfile.TemporaryDirectory() as folder:
        arguments = _arguments(folder, steps=steps, rate=2e-3, schedule="cosine", rows=32)
        _stock(model, arguments, rows, material).train()
    return model


def scale_by_public_gradients(model: Any, settings: Settings, material: Material) -> None:
    """Write the model in the coordinates of `scaling`, by the gradients of 16 batches of 32 public sentences.

    Raises:
        ConfigError: the model has adapters, of which one half has no gradient at the start.
    """
    if hasattr(model, "peft_config"):
        raise ConfigError("the arm `scaled` trains all weights: leave out --modes lora")
    rows = public_rows(settings, material, 512)
    batches = (material.collator([rows[i] for i in range(first, first + 32)]) for first in range(0, 512, 32))
    scale(model, public_squares(model, batches, lambda output: output.loss))


# ------------------------------------------------------------------------ runs


def _arguments(folder: str, *, steps: int, rate: float, schedule: str, rows: int, **more: Any) -> TrainingArguments:
    on_cpu = not torch.cuda.is_available()
    return TrainingArguments(
        folder,
        max_steps=steps,
        learning_rate=rate,
        lr_scheduler_type=schedule,
        warmup_steps=round(0.1 * steps),
        weight_decay=0.0,
        per_device_train_batch_size=rows,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        **more,
    )


def _stock(model: Any, arguments: TrainingArguments, rows: Any, material: Material) -> Trainer:
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=material.tokenizer,
        data_collator=material.collator,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _section(mode: str) -> ModelConfig:
    """Return the model section: all weights, or adapters with embeddings and head, which a new domain needs."""
    peft = {"r": 16, "target_modules": "all-linear", "modules_to_save": ["embed_tokens", "lm_head"]}
    return ModelConfig(name="start", adapter=peft if mode == "lora" else None)


class Experiment(DPTrainer):
    """A private run with one of the optimizers of `optimizers.EXPERIMENTS`."""

    name: str | None = None

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer named by the arm."""
        if self.name is None:
            return super().create_optimizer(model)
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self.optimizer = experiment(self.name, trained, self.args.learning_rate, self.plan)
        return self.optimizer


def train(run: Run, settings: Settings, material: Material, folder: str) -> dict[str, Any]:
    """Train once; return the ε that the run's report states, and its σ and mechanism."""
    arm = ARMS[run.arm]
    start = public_start(settings, material, arm.public_steps) if arm.public_steps else copy.deepcopy(material.base)
    model = prepare_model(start, _section(run.mode))
    if arm.noise is None:
        rows = max(1, settings.max_tokens // settings.max_length)
        rows = max(size for size in range(1, rows + 1) if settings.batch % size == 0)
        arguments = _arguments(
            folder,
            steps=settings.steps,
            rate=run.rate,
            schedule=arm.schedule,
            rows=rows,
            gradient_accumulation_steps=settings.batch // rows,
            seed=run.number,
        )
        trainer = _stock(model, arguments, material.rows, material)
        trainer.train()
        trainer.save_model(folder)
        return {}
    if arm.scaled:
        scale_by_public_gradients(model, settings, material)
    privacy = PrivacyConfig(
        epsilon=run.epsilon,
        delta=settings.delta,
        clip_norm=settings.clip_norm,
        expected_batch_size=settings.batch,
        noise=arm.noise,
    )
    private = Experiment(
        model=model,
        args=_arguments(
            folder, steps=settings.steps, rate=run.rate, schedule=arm.schedule, rows=1, optim_args=arm.optim_args
        ),
        privacy=privacy,
        train_dataset=material.rows,
        processing_class=material.tokenizer,
        data_collator=material.collator,
        max_tokens_per_microbatch=settings.max_tokens,
        average=arm.average,
        start_is_independent=True,  # pretrained on other text, or on the templates above
    )
    private.name = arm.optimizer
    private.remove_callback(PrinterCallback)
    private.train()
    if private.interrupted_by is not None:  # it ended early without an error, and its model is no result
        raise SystemExit(f"utility.py: signal {int(private.interrupted_by)} ended the run {run.key}: it is not stored")
    if arm.scaled:
        merge(model)
        model.save_pretrained(folder)
    else:
        private.save_model(folder)
    plan = private.plan
    facts = {"stated_epsilon": plan.epsilon, "noise_multiplier": plan.noise_multiplier, "noise": plan.noise.to_plain()}
    at_floor = getattr(innermost(private.optimizer), "at_floor", None)
    return facts if at_floor is None else facts | {"at_floor": round(at_floor, 3)}


def make(run: Run, settings: Settings, material: Material) -> dict[str, Any]:
    """Train once and measure the model that was saved."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        facts = train(run, settings, material, folder)
        released = AutoModelForCausalLM.from_pretrained(folder).to("cuda" if torch.cuda.is_available() else "cpu")
    found = measure(released, material.held_out, material.collator)
    return asdict(run) | facts | {"perplexity": found.value, "seconds": round(time.perf_counter() - begin, 1)}


def runs_of(options: argparse.Namespace) -> list[Run]:
    """Return the runs that the command line asks for: each rate once, and nothing private without an ε."""
    runs = []
    for mode in options.modes:
        for epsilon in options.epsilons:
            for name in options.arms:
                arm = ARMS[name]
                target = None if arm.noise is None else epsilon
                for factor in options.rates:
                    for number in range(options.runs):
                        runs.append(Run(arm=name, mode=mode, epsilon=target, rate=arm.rate * factor, number=number))
    return list({run.key: run for run in runs}.values())


# --------------------------------------------------------------------- results


@dataclass
class Best:
    """The best rate of an arm, and the perplexities of its runs."""

    rate: float
    perplexities: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return math.exp(sum(map(math.log, self.perplexities)) / len(self.perplexities))


def best_runs(runs: Sequence[dict[str, Any]]) -> dict[tuple[str, str, float | None], Best]:
    """Return the best rate of each arm, mode and ε; of rates with one run and with several, the mean counts."""
    by_rate: dict[tuple[str, str, float | None], dict[float, Best]] = {}
    for run in runs:
        place = by_rate.setdefault(_place(run), {})
        place.setdefault(run["rate"], Best(run["rate"])).perplexities.append(run["perplexity"])
    return {key: min(rates.values(), key=lambda best: best.mean) for key, rates in by_rate.items()}


def gap_closed(private: float, textbook: float, non_private: float) -> float:
    """Return the share of the gap in log-perplexity between textbook and non-private training that is closed.

    >>> round(gap_closed(3.104, 3.68, 2.384), 2)
    0.39
    """
    return 1 - math.log(private / non_private) / math.log(textbook / non_private)


def as_markdown(report: dict[str, Any]) -> str:
    """Return a table with a row for each arm, mode and ε, and the perplexity at each learning rate, the best in bold.

    >>> run = {"arm": "textbook", "mode": "full", "epsilon": 8.0, "rate": 0.004, "perplexity": 3.12}
    >>> print(as_markdown({"runs": [run | {"noise_multiplier": 0.59082}]}).splitlines()[-1])
    | textbook | 8 | .5908 | **.004: 3.120** | |
    """
    runs = report["runs"]
    best = best_runs(runs)
    modes = list(dict.fromkeys(run["mode"] for run in runs))
    lines = ["| arm | ε | σ | learning rate: perplexity | gap closed |", "|---|---|---|---|---|"]
    for key in sorted(best, key=lambda key: (modes.index(key[1]), list(ARMS).index(key[0]), -(key[2] or math.inf))):
        name, mode, target_epsilon = key
        rates: dict[float, list[str]] = {}
        multiplier = None
        for run in sorted((run for run in runs if _place(run) == key), key=lambda run: run["rate"]):
            rates.setdefault(run["rate"], []).append(f"{run['perplexity']:.3f}")
            multiplier = run.get("noise_multiplier", multiplier)
        cells = {rate: f"{_number(rate)}: {' / '.join(values)}" for rate, values in rates.items()}
        cells[best[key].rate] = f"**{cells[best[key].rate]}**"
        textbook, plain = best.get(("textbook", mode, target_epsilon)), best.get(("non-private", mode, None))
        closed = ""
        if textbook is not None and plain is not None and name not in ("textbook", "non-private"):
            closed = f"{gap_closed(best[key].mean, textbook.mean, plain.mean):.0%} "
        where = name if len(modes) == 1 else f"{name}, {mode}"
        target = "-" if target_epsilon is None else f"{target_epsilon:g}"
        sigma = "-" if multiplier is None else _number(round(multiplier, 4))
        lines.append(f"| {where} | {target} | {sigma} | {' · '.join(cells.values())} | {closed}|")
    return "\n".join(lines)


def _place(run: dict[str, Any]) -> tuple[str, str, float | None]:
    return run["arm"], run["mode"], run["epsilon"]


def _number(value: float) -> str:
    return f"{value:g}".removeprefix("0") if value < 1 else f"{value:g}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the best perplexity of each usual arm against ε. The same runs give the same SVG file: it has no date."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    best = best_runs(report["runs"])
    modes = list(dict.fromkeys(run["mode"] for run in report["runs"]))
    with matplotlib.rc_context({"svg.hashsalt": "utility", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(1, len(modes), figsize=(6.5 * len(modes), 4), squeeze=False, sharey=True)
        for axis, mode in zip(axes[0], modes, strict=True):
            for name, colour in zip(USUAL, _COLOURS, strict=True):
                points = sorted(
                    (key[2], found.mean) for key, found in best.items() if key[:2] == (name, mode) and key[2]
                )
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", color=colour, label=name)
            plain = best.get(("non-private", mode, None))
            if plain is not None:
                axis.axhline(plain.mean, color=GREY, linestyle=":", label="non-private")
            axis.set(xscale="log", yscale="log", xlabel="ε", title=mode if len(modes) > 1 else None)
            axis.set_ylabel("perplexity per token of held-out references")
            ticks = sorted({key[2] for key in best if key[1] == mode and key[2]})
            axis.set_xticks(ticks, [f"{value:g}" for value in ticks])
            low, high = axis.get_ylim()
            ticks = [
                value for value in (1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100) if low <= value <= high
            ]
            axis.set_yticks(ticks, [f"{value:g}" for value in ticks])
            axis.minorticks_off()
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(frameon=False)
        figure.tight_layout()
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


# ---------------------------------------------------------------- command line


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""

    class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass

    defaults = {item.name: item.default for item in Settings.__dataclass_fields__.values()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    parser.add_argument("--model", help="folder or Hub name of a causal language model")
    parser.add_argument("--data", help="file with the training records")
    parser.add_argument("--held-out", help="file with the held-out records")
    parser.add_argument("--columns", nargs=2, default=defaults["columns"], help="prompt and completion")
    for name in ("units", "held_out_units", "batch", "steps", "max_length", "max_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=defaults[name])
    for name in ("delta", "clip_norm"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=defaults[name])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=USUAL, metavar="ARM")
    parser.add_argument("--epsilons", nargs="+", type=float, default=[8.0, 3.0, 1.0])
    parser.add_argument("--modes", nargs="+", choices=("full", "lora"), default=["full"])
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0], help="multiples of each arm's base rate")
    parser.add_argument("--runs", type=int, default=1, help="runs of each rate; batches and noise differ")
    parser.add_argument("--json", type=Path, help="file that keeps every run; runs in it are not repeated")
    parser.add_argument("--report", type=Path, help="train nothing; print the table of this file")
    parser.add_argument("--figure", type=Path, help="draw perplexity against ε into this file, an SVG or a PNG")
    options = parser.parse_args(arguments)
    if options.report is None and not (options.model and options.data and options.held_out):
        parser.error("--model, --data and --held-out are needed, or --report with the file of earlier runs")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Train, print, write."""
    options = parse_arguments(arguments)
    quiet()
    if options.report is None:
        try:
            report = run_all(options)
        except (ConfigError, DataError) as error:
            raise SystemExit(f"utility.py: error: {error}") from error
    else:
        report = json.loads(options.report.read_text())
    print(as_markdown(report))
    if options.figure:
        draw(report, options.figure)


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Make the runs that the JSON file lacks, and return all of them.

    Raises:
        ConfigError: the file holds runs of other settings.
    """
    values = {name: getattr(options, name) for name in Settings.__dataclass_fields__}
    settings = Settings(**values | {"columns": tuple(options.columns)})
    plain = json.loads(json.dumps(asdict(settings)))
    plain |= {name: Path(plain[name]).name for name in ("model", "data", "held_out")}  # not where they are stored
    report: dict[str, Any] = {"settings": plain, "torch": torch.__version__, "runs": []}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())
        if report["settings"] != plain:
            raise ConfigError(f"{options.json} holds runs of other settings: name another file")
    material = prepare(settings)
    done = {Run(**{name: run[name] for name in Run.__dataclass_fields__}).key for run in report["runs"]}
    for run in runs_of(options):
        if run.key in done:
            continue
        made = make(run, settings, material)
        report["runs"].append(made)
        print(f"{run.key}: perplexity {made['perplexity']:.4g}, {made['seconds']:.0f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main()
