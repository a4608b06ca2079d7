"""Private tuning: runs with settings drawn from a public list, of which only the best is released."""

from __future__ import annotations

from dpllm.privacy.private_folder import PRIVATE_FOLDER
from dpllm.registry import Method, MethodFolder

RECORD_FILE = f"{PRIVATE_FOLDER}/tuning.jsonl"
"""Relative to the tuning's folder; readable by its owner only."""
RELEASED_FOLDER = "released"
"""The folder, inside that of the tuning, of the released model."""

METHOD = Method(
    name="tune",
    commands=("dpllm.methods.tune.command:tune",),
    folder=MethodFolder(
        record=RECORD_FILE, what="a tuning", released=RELEASED_FOLDER, verify="dpllm.methods.tune.tune:verify_tuning"
    ),
)
