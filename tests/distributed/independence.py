"""The program in the processes of `test_independence`: sound and coupled losses on engines, in one launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from dpllm import PrivateRun, per_sequence_loss
from dpllm.data.rows import RowCollator
from dpllm.engines import model_inside
from dpllm.engines.processes import Processes
from dpllm.training.checks.independence import IndependenceError
from tests.conftest import tiny_llama_config
from tests.distributed.matrix import plan_of
from tests.distributed.setups import dispose, prepare, update
from tests.memory_ledger import MemoryLedger
from tests.small_model import rows_by_number

NUM_ROWS = 12


class Disclosing(MemoryLedger):
    """Counts disclosures of an error message as well."""

    def __init__(self) -> None:
        super().__init__()
        self.disclosures = 0
        self.points: list[str] = []

    def append_open_point(self, text: str) -> None:
        self.points.append(text)

    def append_disclosure(self, what: str, count: int) -> None:
        self.disclosures += count


def sound(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    return per_sequence_loss(model(**inputs).logits, labels)


def coupled(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Every rank divides by its own microbatch's targets."""
    return sound(model, inputs) / (inputs["labels"] != -100).sum()


def coupled_on_one_rank(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return (coupled if Processes().rank == 1 else sound)(model, inputs)


def with_a_coin_on_one_rank(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Rank 1 draws one number for all rows of a microbatch."""
    return sound(model, inputs) * (1 + torch.rand(()) if Processes().rank == 1 else 1)


def verdicts(engines: list[str]) -> dict[str, tuple[int, float, str, str, str]]:
    """Per engine: sound steps that were charged, their largest difference, and the three errors."""
    found = {}
    for engine in engines:
        steps, largest, _ = _attempt(engine, sound)
        errors = [_attempt(engine, loss)[2] for loss in (coupled, coupled_on_one_rank, with_a_coin_on_one_rank)]
        found[engine] = (steps, largest, *errors)
    return found


def late(engine: str) -> tuple[int, str, list[str]]:
    """Rank 1 couples its rows in the ninth and last step: charged steps, error and open points."""
    ledger = Disclosing()

    def loss_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        return (coupled_on_one_rank if ledger.num_steps == 9 else sound)(model, inputs)

    steps, _, message = _attempt(engine, loss_of, ledger, 9)
    return steps, message, ledger.points


def _attempt(engine: str, loss_of: Any, ledger: Disclosing | None = None, count: int = 3) -> tuple[int, float, str]:
    rng = np.random.default_rng(3)
    rows = [{"input_ids": rng.integers(3, 61, int(n)).tolist()} for n in rng.integers(3, 17, NUM_ROWS)]
    data = rows_by_number(rows, RowCollator(pad_token_id=0), [len(row["input_ids"]) for row in rows])
    torch.manual_seed(0)
    model, optimizer = prepare(engine, LlamaForCausalLM(tiny_llama_config(attention_dropout=0.2)).train(), lr=1e-3)
    ledger = Disclosing() if ledger is None else ledger
    run = PrivateRun(plan_of(0.5, 1.0, num_units=NUM_ROWS), data, ledger)
    run.attach(model, optimizer)
    check, message = run._attached.independence, ""
    try:
        for unit_ids in run.draws(count):
            run.step(unit_ids, loss_of)
            update(model, optimizer)
    except IndependenceError as error:
        message = str(error)
    assert ledger.disclosures == bool(message)
    run.detach()
    model_inside(model).eval()
    dispose(model)
    assert check is not None and check.last is not None
    return ledger.num_steps, max(check.last.loss, check.last.norm), message
