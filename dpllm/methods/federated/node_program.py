"""The program of `dpllm federation node`: it reads the records of its clients and answers the server for them.

Place in the flow: on the machine of the records; above `node` and `flower`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from dpllm.config import RECIPE_FILE, ConfigError, Recipe, load_recipe
from dpllm.data.rows import load_records, unit_index_of
from dpllm.methods.federated.flower import answer_forever, require_flower
from dpllm.methods.federated.node import Answered, Node
from dpllm.methods.federated.preparing import (
    AUTHORITY,
    SERVER_KEY,
    SIGNING_KEY,
    agreed,
    check_deployed,
    private,
)
from dpllm.methods.federated.run import participant_of, rows_of_clients
from dpllm.methods.federated.secure import require_packages
from dpllm.methods.federated.wire import Signer
from dpllm.models.load import load_base_model, load_tokenizer, prepare_model

LOCK = "node.lock"


def node_of(folder: Path, records: str, overrides: Sequence[str], say: Callable[[str], None]) -> Node:
    """Return the node of a folder, with its records read.

    Args:
        folder: that `dpllm federation prepare` wrote for it.
        records: file, folder or glob with the records of its clients only.
        overrides: changes of the recipe, such as the place of the base model.
        say: prints a line.

    Raises:
        ConfigError: the records are not those of the node's clients in the roster, or the folder is not a node's.
    """
    require_packages()
    private(folder)
    recipe = load_recipe(folder / RECIPE_FILE, list(overrides))
    plan, roster = agreed(folder, recipe)
    signer = Signer.load(folder / SIGNING_KEY)
    member = next((one for one in roster if one.key == signer.public), None)
    if member is None:
        raise ConfigError(f"the key in {folder} is of no node in the roster: take the folder made for this node")
    found = load_records(dataclasses.replace(recipe.data, path=records))
    num_clients = unit_index_of(found, recipe.privacy).num_units
    if num_clients != member.count:
        raise ConfigError(
            f"{records} has the records of {num_clients} clients (column {recipe.privacy.unit_column!r}), and the "
            f"roster counts {member.count} at node {member.name}: N is public and fixed. Give the file of these "
            "clients, or prepare a new deployment"
        )
    tokenizer = load_tokenizer(recipe.model, None)
    model = prepare_model(load_base_model(recipe.model, tokenizer, None), recipe.model)
    rows, units = rows_of_clients(recipe, found, tokenizer)

    def rows_of(client: int) -> list[Any]:
        numbers, _ = units.rows_of(np.array([client - member.first]))
        return list(rows.select(numbers))

    participant = participant_of(recipe, _arguments(recipe), plan, model, tokenizer, rows_of)
    say(f"node {member.name}: {member.count} clients of {roster.num_clients}, plan {plan.hash[:12]}")
    server = (folder / SERVER_KEY).read_text(encoding="ascii").strip()
    return Node(member, plan, participant.answer, signer, server, Answered(folder, plan), say)


def run_node(folder: Path, records: str, address: str, overrides: Sequence[str], say: Callable[[str], None]) -> None:
    """Answer the server until Ctrl-C.

    Args:
        folder: as in `node_of`.
        records: as in `node_of`.
        address: host:port of the server.
        overrides: as in `node_of`.
        say: prints a line.

    Raises:
        ConfigError: as in `node_of`; the node runs already; or there is no connection.
    """
    require_flower()
    private(folder)
    try:
        with filelock.FileLock(folder / LOCK, timeout=0):
            node = node_of(folder, records, overrides, say)
            answer_forever(address, (folder / AUTHORITY).read_bytes(), node.reply, say)
    except filelock.Timeout as error:
        raise ConfigError(f"a process already answers for {folder}: two would answer a round twice") from error


def _arguments(recipe: Recipe) -> Any:
    return check_deployed(recipe)
