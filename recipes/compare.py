"""Fine-tune privately and without privacy on the same records, attack both models, and print one table.

    accelerate launch recipes/compare.py --config recipes/quickstart.yaml train.output_dir=runs/compared
    accelerate launch recipes/compare.py --config audit/recipe.yaml --canaries audit/canaries.json --epochs 10

The private fine-tuning is that of recipes/finetune.py. The other starts at the same weights and trains on the same rows
with the stock Trainer, with the same number of steps and rows, or for --epochs with batches of
per_device_train_batch_size rows. If the recipe releases an average, its learning rate falls linearly instead; if the
noise is correlated, the recipe's rate is divided by the ratio that `dpllm plan` prints. train.output_dir then has the
folders private/ and plain/, compare.json and compare.png. A finished training is not repeated. The results come from
private records, and ε does not cover them.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed
from transformers import Trainer

from dpllm.audit.bounds import AuditError
from dpllm.audit.canaries import CanarySet
from dpllm.audit.result import AuditResult, json_text
from dpllm.audit.run import audit_run
from dpllm.audit.scores import interval
from dpllm.config import PRETRAINED_FOLDER, RECIPE_FILE, Recipe, load_recipe, save_recipe
from dpllm.config.mistakes import print_any_character, tell, words_of
from dpllm.config.recipe import refuse_trainer
from dpllm.data.rows import RowCollator, load_train_and_eval, tokenize_records, unit_index_of
from dpllm.engines.processes import Processes
from dpllm.mechanism.parts import Spec
from dpllm.methods.attacks.attacks import (
    AttackReport,
    AttackSettings,
    attack_facts,
    attack_folder,
    attack_tables,
    plot_attacks,
)
from dpllm.methods.attacks.exposure import Exposure, exposure_of_run
from dpllm.methods.attacks.extraction import ExtractionSettings
from dpllm.methods.attacks.lira import ShadowTraining
from dpllm.models.load import load_base_model, load_tokenizer, prepare_model
from dpllm.privacy.calibration import prediction
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.rounding import down, format_delta, format_epsilon, up
from dpllm.report.disclosures import UTILITY_FILE
from dpllm.report.release_notes import keep_utility, notes_in
from dpllm.training import finetune
from dpllm.training.arguments import num_private_steps, plan_for, training_arguments
from dpllm.training.corrected_adamw import asked_second_moment
from dpllm.training.evaluation import HeldOut, HeldOutRows
from dpllm.training.preflight import PLAIN as PLAIN_OPTIONS
from dpllm.training.preflight import check_recipe
from dpllm.training.workload import UpdateRule

PRIVATE, PLAIN = "private", "plain"
COMPARISON_FILE, PICTURE_FILE = "compare.json", "compare.png"


def main() -> None:
    """Read the command line and run; a mistake in the recipe or in the data is one line and exit code 2."""
    options = parse()
    finetune.console.quiet = int(os.environ.get("RANK", "0")) > 0
    finetune.use_all_cores()
    print_any_character()
    code = 0
    try:
        code = run(load_recipe(options.config, options.overrides), options)
    except Exception as error:  # any: the program ends here, and `tell` prints the traceback of a fault
        code = tell(error, (lambda text: None) if finetune.console.quiet and words_of(error) else None)
        if torch.distributed.is_initialized():
            finetune.leave(code, together=False)
    if code:
        sys.exit(code)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the recipe, a YAML file")
    parser.add_argument("--epochs", type=float, help="epochs of the plain fine-tuning; default: the private steps")
    parser.add_argument("--learning-rate", type=float, help="rate of the plain fine-tuning; default: see above")
    parser.add_argument(
        "--canaries", type=Path, help="canaries.json of `dpllm audit prepare`, whose recipe is compared"
    )
    parser.add_argument("--records", type=int, default=1000, help="most members, and most held-out records")
    parser.add_argument("--extract", type=int, default=200, help="texts sampled per kind of prompt; 0: none")
    parser.add_argument("--span", type=int, default=20, help="tokens in a row that count as verbatim")
    parser.add_argument("--prefix", type=int, default=10, help="target tokens given before a record is continued")
    parser.add_argument("--temperature", type=float, default=1.0, help="temperature of the sampling")
    parser.add_argument("--top-k", type=int, default=40, help="sample among this many of the likeliest tokens; 0: all")
    parser.add_argument("--shadows", type=int, default=0, help="shadow adapters of LiRA for each of the two; 0: none")
    parser.add_argument("--shadow-epochs", type=float, default=4.0, help="passes of each over its half of the records")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw of records, the samples and the shadows")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as privacy.epsilon=3")
    return parser.parse_args(words)


def run(recipe: Recipe, options: argparse.Namespace) -> int:
    """Run the comparison; return the exit code, which is not 0 if a signal ended the private training."""
    settings = settings_of(options)
    check_recipe(recipe)  # before anything is read
    output = Path(training_arguments({**PLAIN_OPTIONS, **recipe.train}).output_dir)
    recipes = {name: in_folder(recipe, output / name) for name in (PRIVATE, PLAIN)}
    check(recipe, options.canaries)
    if is_finished(recipes[PRIVATE], LEDGER_FILE):
        finetune.console.print(f"{output / PRIVATE} is already finished and is not trained again")
    elif code := finetune.run(recipes[PRIVATE]):
        return code
    recipes[PLAIN] = from_start(recipes[PLAIN], output / PRIVATE / PRETRAINED_FOLDER, options)
    if is_finished(recipes[PLAIN], "config.json" if recipe.model.adapter is None else "adapter_config.json"):
        finetune.console.print(f"{output / PLAIN} is already finished and is not trained again")
    else:
        train_plainly(recipes[PLAIN])
    leave_helpers()

    reference = recipes[PLAIN].model.name
    reports: dict[str, AttackReport] = {}
    audits: dict[str, AuditResult] = {}
    exposures: dict[str, Exposure] = {}
    for name in (PRIVATE, PLAIN):
        finetune.console.rule(f"attacks on the {name} model")
        told = dataclasses.replace(settings, reference=reference)
        reports[name] = attack_folder(
            output / name, told, lambda text: finetune.console.print(f"  {text}", style="dim")
        )
        reports[name].save(output / name)
        if options.canaries is not None:
            audits[name] = audit_run(output / name, options.canaries, reference=reference, plain=name == PLAIN)
            with contextlib.suppress(AuditError):  # no canary was included
                exposures[name] = exposure_of_run(output / name, options.canaries, None, reference, name == PLAIN)
    titles = {f"{name}: {claim(report)}": report for name, report in reports.items()}
    picture = plot_attacks(titles, output / PICTURE_FILE)
    path = save(output, recipes, reports, audits, exposures)
    finetune.console.print("\nthe same records, fine-tuned privately and without privacy", style="bold")
    print_table(comparison_rows(reports, audits, exposures))
    finetune.show("files", [("comparison", str(path)), ("picture", str(picture))])
    return 0


def settings_of(options: argparse.Namespace) -> AttackSettings:
    """Return the attack settings of the command line."""
    extraction = None
    if options.extract:
        extraction = ExtractionSettings(
            num_samples=options.extract,
            new_tokens=max(64, options.span),
            span=options.span,
            prefix=options.prefix,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
        )
    return AttackSettings(
        num_records=options.records,
        shadows=options.shadows,
        shadow_training=ShadowTraining(num_epochs=options.shadow_epochs),
        extraction=extraction,
        seed=options.seed,
    )


def check(recipe: Recipe, canaries: Path | None) -> None:
    """Raise before any training if its result could not be compared."""
    refuse_trainer(recipe, "The comparison")
    if recipe.model.task != "causal_lm":
        raise AuditError(
            f"model.task={recipe.model.task}: the attacks read the probability of each token, so set "
            "model.task=causal_lm"
        )
    if recipe.model.name is None and recipe.public_pretrain is None:
        raise AuditError(
            "the recipe starts at random weights, so the two trainings would start at different weights: give "
            "model.name, or a section public_pretrain"
        )
    if recipe.train.get("resume_from_checkpoint"):
        raise AuditError("a comparison cannot be resumed: finish the run with recipes/finetune.py, or set a new folder")
    if load_train_and_eval(recipe.data, recipe.privacy)[1] is None:
        raise AuditError(
            "the recipe holds no records out, so there are no non-members to compare with: set data.eval=0.1"
        )
    if canaries is not None and CanarySet.load(canaries).data_name != Path(recipe.data.path).name:
        raise AuditError(
            f"the recipe trains on {recipe.data.path}, which has no canaries of {canaries}: give the recipe that "
            "`dpllm audit prepare` wrote beside it"
        )


def in_folder(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with another output folder."""
    return dataclasses.replace(recipe, train={**recipe.train, "output_dir": str(folder)})


def is_finished(recipe: Recipe, last_file: str) -> bool:
    """Return whether the folder holds exactly this run, completed.

    Raises:
        AuditError: it holds another run, or an incomplete one.
    """
    folder = Path(recipe.train["output_dir"])
    if not (folder / RECIPE_FILE).exists():
        return False
    whole = (folder / last_file).exists() and (folder / "tokenizer_config.json").exists()
    if whole and last_file == LEDGER_FILE:
        whole = read_ledger(folder / LEDGER_FILE).end == "completed"
    if not whole or load_recipe(folder / RECIPE_FILE) != recipe:
        raise AuditError(f"{folder} holds another run, or an incomplete one: set train.output_dir to a new folder")
    return True


def from_start(recipe: Recipe, pretrained: Path, options: argparse.Namespace) -> Recipe:
    """Return the plain recipe: a public training is already done, and the arguments are those of the Trainer."""
    train = dict(recipe.train)
    train["learning_rate"] = plain_rate(recipe) if options.learning_rate is None else options.learning_rate
    if train.pop("average", None) is not None:
        train["lr_scheduler_type"] = "linear"
    if asked_second_moment(training_arguments({**PLAIN_OPTIONS, **recipe.train})) is not None:
        del train["optim_args"]  # it subtracts the noise, and there is none
    if options.epochs is not None:
        train |= {"num_train_epochs": options.epochs, "max_steps": -1}
    else:
        args = training_arguments({**PLAIN_OPTIONS, **recipe.train})
        units = unit_index_of(load_train_and_eval(recipe.data, recipe.privacy)[0], recipe.privacy)
        population = units.num_rows if recipe.privacy.sampling == "example" else units.num_units
        rows = recipe.privacy.expected_batch_size * units.num_rows / population
        passes = max(1, round(rows / (args.per_device_train_batch_size * args.world_size)))
        steps = num_private_steps(args, recipe.privacy, population)
        train |= {"max_steps": steps, "gradient_accumulation_steps": passes}
    train.pop("save_steps", None)
    train["save_strategy"] = "no"
    if recipe.public_pretrain is None:
        return dataclasses.replace(recipe, train=train)
    model = dataclasses.replace(
        recipe.model, name=str(pretrained), config=None, tokenizer=str(pretrained.parent), tokenizer_vocab_size=None
    )
    return dataclasses.replace(recipe, model=model, public_pretrain=None, train=train)


def plain_rate(recipe: Recipe) -> float:
    """Return the learning rate of the plain training: the recipe's, without the growth for correlated noise."""
    args, average = training_arguments({**PLAIN_OPTIONS, **recipe.train}), recipe.train.get("average")
    if Spec.of(recipe.privacy.noise).kind == "independent":
        return args.learning_rate
    units = unit_index_of(load_train_and_eval(recipe.data, recipe.privacy)[0], recipe.privacy)
    plan = plan_for(args, recipe.privacy, units, average=average)
    rule = UpdateRule.of(args, plan.num_steps, average)
    found = prediction(plan, rule.workload())
    return args.learning_rate / found.step_ratio if found is not None and rule.divides else args.learning_rate


def train_plainly(recipe: Recipe) -> None:
    """Fine-tune with the stock Trainer on the rows from which the private steps drew."""
    finetune.console.rule("fine-tuning without privacy")
    args = training_arguments({**PLAIN_OPTIONS, **recipe.train})
    folder = Path(args.output_dir)
    with args.main_process_first(desc="reading the records"):
        records, held_out = load_train_and_eval(recipe.data, recipe.privacy)
        tokenizer = load_tokenizer(recipe.model)
        keep = [recipe.privacy.unit] if recipe.privacy.unit else []
        rows = tokenize_records(records, tokenizer, recipe.data, keep)
        eval_rows = tokenize_records(held_out, tokenizer, recipe.data) if recipe.data.metrics else None
    rows = rows.select(np.sort(np.asarray(unit_index_of(rows, recipe.privacy).rows)))
    model = prepare_model(load_base_model(recipe.model, tokenizer), recipe.model)
    if args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        save_recipe(recipe, folder / RECIPE_FILE)
    collator = RowCollator(pad_token_id=tokenizer.pad_token_id)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        data_collator=collator,
    )
    trainer.train()
    trainer.save_model()
    if eval_rows is not None:  # as the private training measures them
        held = HeldOut(HeldOutRows(held_out, eval_rows, collator, recipe.data, tokenizer))
        found = held.measure(trainer.model, Processes())
        if args.should_save:
            keep_utility(folder, {f"held-out {name} after": f"{value:.4g}" for name, value in found.figures.items()})


def leave_helpers() -> None:
    """End all processes except the first: attacks run on one."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        if finetune.console.quiet:
            sys.stdout.flush()
            os._exit(0)


def claim(report: AttackReport) -> str:
    """Return the guarantee, in words."""
    if report.epsilon is None:
        return "no guarantee"
    return f"ε = {format_epsilon(report.epsilon)} at δ = {format_delta(report.delta)}"


def comparison_rows(
    reports: Mapping[str, AttackReport], audits: Mapping[str, AuditResult], exposures: Mapping[str, Exposure]
) -> list[tuple[str, ...]]:
    """Return the rows of the table: each measured quantity, and its value for each model."""
    columns = [column_of(report, audits.get(name), exposures.get(name)) for name, report in reports.items()]
    figures = [held_out_figures(report.folder) for report in reports.values()]
    both = [name for name in figures[0] if all(name in found for found in figures)]
    for column, found in zip(columns, figures, strict=True):
        column |= {name: found[name] for name in both}
    return [("", *reports), *((name, *(column[name] for column in columns)) for name in columns[0])]


def held_out_figures(folder: str | Path) -> dict[str, str]:
    """Return the figures of the trained model on held-out records, such as BLEU, that its training wrote down."""
    path = Path(folder) / UTILITY_FILE
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    figures = {**notes_in(folder).utility, **kept}  # those on public records are in the report
    return {name: str(value) for name, value in figures.items() if name.startswith("held-out ") and " after" in name}


def column_of(report: AttackReport, audit: AuditResult | None, exposure: Exposure | None) -> dict[str, str]:
    """Return the measured quantities of one model and their values."""
    values = {"guarantee": claim(report), "records attacked": f"{report.records.num} members, as many others"}
    values |= {
        name: value for name, value in attack_facts(report) if name != "note" and not name.startswith("left out")
    }
    _, head, rows = attack_tables(report)[0]
    for row in rows[: len(report.attacks)]:
        values |= {f"{row[0]}: {name}": value for name, value in zip(head[1:], row[1:], strict=True)}
    for rate, bound in (report.bounds or {}).items():
        values[f"any attack: TPR at FPR {rate:.1%} at most"] = f"{bound:.3f}"
    if report.bounds is None:
        values |= {f"any attack: TPR at FPR {rate:.1%} at most": "1 (no guarantee)" for rate in (0.01, 0.001)}
    for hits in report.samples:
        values[f"sampled after {hits.prompts}: spans only in training / only in held-out"] = (
            f"{hits.training:,} / {hits.held_out:,}"
        )
    return values | canary_column(audit, exposure)


def canary_column(audit: AuditResult | None, exposure: Exposure | None) -> dict[str, str]:
    """Return the results of the audit by canaries."""
    if audit is None:
        return {}
    values = {f"canaries, {attack.name}: AUROC": interval(attack.auroc) for attack in audit.attacks}
    values["canaries: ε is at least"] = f"{down(audit.epsilon_lower, 2)} (ceiling {up(audit.ceiling, 2)})"
    values["canaries: verdict"] = audit.verdict
    if exposure is None:
        return values | {"canaries: exposure": "no canary was included"}
    median, most = exposure.median_by_rank, exposure.most_by_rank
    values["canaries: exposure, median (never seen: 1)"] = f"{median:.2f} of {most:.2f} bits"
    values["canaries: exposure, largest"] = f"{exposure.max_by_rank:.2f} of {most:.2f} bits"
    return values


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Print names and values in columns."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        finetune.console.print("  " + "  ".join(cells).rstrip(), markup=False)


def save(
    output: Path,
    recipes: Mapping[str, Recipe],
    reports: Mapping[str, AttackReport],
    audits: Mapping[str, AuditResult],
    exposures: Mapping[str, Exposure],
) -> Path:
    """Write compare.json."""
    head, *rows = comparison_rows(reports, audits, exposures)
    values: dict[str, Any] = {
        "table": {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows},
        "attacks": {name: report.to_dict() for name, report in reports.items()},
        "canaries": {name: audit.to_dict() for name, audit in audits.items()},
        "train": {name: recipe.train for name, recipe in recipes.items()},
    }
    path = output / COMPARISON_FILE
    path.write_text(json_text(values), encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
