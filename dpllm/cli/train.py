"""`dpllm train`: from a recipe to a model with its report, on this machine's GPUs or its CPU."""

from __future__ import annotations

from typing import Annotated

import typer

import dpllm
from dpllm.cli.common import Overrides, RecipeName, command
from dpllm.config import load_recipe
from dpllm.config.shipped import recipe_file
from dpllm.planning.learning_rate import stale_rate


@command("dpllm train quickstart privacy.epsilon=3 train.output_dir=runs/eps3")
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="An accelerate config: a file, or single, ddp, fsdp2, zero1, zero2, zero3, zero3_offload, cpu_ddp. "
            "Without it: one process; on several GPUs DDP, or FSDP2 if a copy of the model does not fit on each."
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Number of processes, one per GPU. Without it: as many as there are GPUs.")
    ] = None,
) -> None:
    """Fine-tune a language model privately, from a recipe to the model and its privacy report.

    Hardware has no influence on ε: the same recipe runs on a CPU, on one GPU and on several. Ctrl-C, SIGTERM, SIGHUP
    and SIGUSR1 end a run after the current step, with a checkpoint and a report; the exit code is then 128 + the
    signal's number. train.resume_from_checkpoint=true continues a stopped run; "auto" starts if there is nothing to
    continue, and does nothing if the run is completed.
    """
    from dpllm.cli.launch import attend, choose, is_first

    say = typer.echo if is_first() else lambda line: None
    say(f"dpllm {dpllm.__version__}: training {recipe_file(recipe)}")  # first: the rest takes seconds
    read = load_recipe(recipe, overrides or ())
    remark = stale_rate(recipe, overrides or (), read)
    if remark is not None:
        say(remark)
    say(f"output in {read.train.get('output_dir')}; loading the libraries")
    launch = choose(read, config, processes)
    say(launch.words)
    if launch.config is not None:
        from dpllm.training.proposals import proposals  # here once, and not in each process

        found = [setting.override for setting in proposals(recipe, overrides or (), to_train=True)]
        for one in found:
            say(f"proposed: {one}")
        raise typer.Exit(attend(launch.command(recipe, [*(overrides or ()), *found]), launch.environment))
    from dpllm.training.finetune import carry_out

    carry_out(recipe, overrides or ())
