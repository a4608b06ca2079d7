"""Public texts with completions: all teachers are trained, and then write on together, token by token.

Place in the flow: called by `dpllm.methods.pate.teach` for a causal language model. The teachers are kept in memory
until the last text is written: of each only the trained parameters, which with adapters are small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from dpllm.data.rows import unit_index_of
from dpllm.data.units import Int64Array
from dpllm.methods.pate.classroom import Classroom
from dpllm.methods.pate.partition import Partition
from dpllm.methods.pate.release import TokenVotes
from dpllm.methods.pate.section import PateConfig
from dpllm.methods.pate.tokens import written_tokens
from dpllm.methods.pate.trainings import OneBase, State, train_without_privacy
from dpllm.methods.queries.run import QueryRun
from dpllm.models.writing import Continuation


class Panel:
    """Teachers that write (`dpllm.methods.pate.tokens.Writers`): adapters over one model in memory.

    Each has its own keys and values of the texts so far. Tokens are drawn as argmax(logits + τ·g), with Gumbel noise g
    that public model and all teachers share: each draws from its own distribution at temperature τ, and models that
    agree draw the same token (coordinated sampling; Cohen et al., Hot PATE, arXiv:2312.02132). The noise g depends on
    no record, so a vote is still a function of one teacher's units, of released tokens, and of public numbers.

    The candidates are the tokens with the largest logits + τ·g of the public model. Each teacher names its own best
    among them. So its vote is never lost, and every token can become a candidate.

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
        """Begin the texts."""
        self.num_texts, self.num_teachers = len(prompts), len(teachers)
        self._base, self._teachers, self._options, self._rng = base, teachers, options, rng
        self._barred, self._vocabulary = sorted(barred), vocabulary
        model: Any = base.begin().eval()  # nothing that the last teacher's rows chose decides the candidates
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        length = max(map(len, prompts))
        self._public, *self._own = (
            Continuation(model, prompts, length, len(prompts)) for _ in range(1 + self.num_teachers)
        )
        self._noise_RV: Tensor | None = None
        self._candidates_RC: Tensor | None = None

    def candidates(self) -> Int64Array:
        """Return (R, C) the candidates of the next place, from the public model and fresh common random numbers."""
        self._noise_RV = None
        scores_RV = self._scores(self._public, None)
        known = scores_RV.shape[1] - len(self._barred)
        count = min(self._options.candidates or known, known)
        self._candidates_RC = scores_RV.topk(count, dim=1).indices
        return self._candidates_RC.cpu().numpy()

    def vote(self, teacher: int) -> Int64Array:
        """Return (R,) the candidate with a teacher's highest score: a whole number, also if scores are not finite."""
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
        """Return (R, V) logits + τ·g of the public model, or of a teacher."""
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


Trained = Callable[[int], None]


def completed_texts(
    classroom: Classroom, rows: datasets.Dataset, run: QueryRun, say: Callable[[str], None], trained: Trained
) -> datasets.Dataset:
    """Return the public texts that were continued, in the columns of the private records.

    Args:
        classroom: with the model.
        rows: of the private records.
        run: the run, which is charged for all tokens that the texts may have.
        say: prints a line.
        trained: called with the number of teachers that were trained, after each.
    """
    prepared = classroom.prepared
    options, vote = prepared.options, prepared.vote
    teachers = trained_teachers(classroom, rows, run, trained)
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


def trained_teachers(classroom: Classroom, rows: datasets.Dataset, run: QueryRun, trained: Trained) -> list[State]:
    """Train every teacher on the rows of its units, and return their values, which are private.

    Args:
        classroom: with the model.
        rows: of the private records.
        run: the run; its secret randomness divides the units.
        trained: called with the number of teachers that were trained, after each.
    """
    prepared = classroom.prepared
    options = prepared.options
    units = unit_index_of(rows, prepared.recipe.privacy, run.randomness.generator())
    partition = Partition(prepared.plan.num_units, options.teachers, run.randomness.generator())
    teachers: list[State] = []
    for teacher in range(options.teachers):
        model = classroom.base.begin()
        own = rows.select(partition.rows_of(teacher, units))
        if len(own):
            train_without_privacy(model, own, classroom.collator, options.train, run.private_folder)
        teachers.append(classroom.base.state())
        trained(teacher + 1)
    return teachers
