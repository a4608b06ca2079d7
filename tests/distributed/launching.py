"""Starts the recipe program as people do, by `accelerate launch`, on a small run of real text."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from dpllm.data.corpora import sotu
from tests import children
from tests.distributed.world import ROOT, free_port, tools

RECIPE = Path(__file__).with_name("tiny.yaml")
PROGRAM = ROOT / "recipes" / "finetune.py"
FSDP2_ON_CPU = Path(__file__).with_name("fsdp2_on_cpu.py")
NUM_RECORDS = 400


def write_data(folder: Path) -> None:
    """Sentences of presidents' addresses, as public text and as private records."""
    sentences = re.split(r"(?<=\.)\s+", " ".join(record["text"] for record in sotu()[:200]))
    (folder / "public.txt").write_text("\n".join(sentences[:200]), encoding="utf-8")
    records = [json.dumps({"text": sentence}) for sentence in sentences[200 : 200 + NUM_RECORDS]]
    (folder / "private.jsonl").write_text("\n".join(records) + "\n", encoding="utf-8")


def command(config: str, folder: Path, *overrides: str, num_processes: int | None = None) -> list[str]:
    """The command line; paths are relative to the folder, where it is to be started."""
    fsdp2 = config == "cpu_fsdp2"
    state = "accelerator_config.use_configured_state=true"
    return [
        str(Path(sys.executable).with_name("accelerate")),
        "launch",
        f"--config_file={ROOT / 'accelerate_configs' / config}.yaml",
        f"--main_process_port={free_port()}",
        *([f"--num_processes={num_processes}"] if num_processes else []),
        *([str(FSDP2_ON_CPU)] if fsdp2 else []),
        str(PROGRAM),
        "--config",
        str(RECIPE),
        *([f"train.{state}", f"public_pretrain.train.{state}"] if fsdp2 else []),
        *overrides,
    ]


def environment() -> dict[str, str]:
    """One thread per process, for two cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), **tools()}


def start(config: str, folder: Path, *overrides: str, **options: Any) -> children.Child:
    """Start a run, whose output goes to ``folder/log``."""
    with open(folder / "log", "wb") as log:
        return children.Child(
            command(config, folder, *overrides, **options), stdout=log, stderr=log, cwd=folder, env=environment()
        )


def launch(config: str, folder: Path, *overrides: str, **options: Any) -> str:
    """Run to the end and return the output.

    Raises:
        AssertionError: it failed.
    """
    (code,) = children.wait_all([start(config, folder, *overrides, **options)])
    printed = (folder / "log").read_text(encoding="utf-8", errors="replace")
    assert code == 0, printed[-6000:]
    return printed
