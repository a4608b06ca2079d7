"""Texts that teachers write together: at each place every teacher votes for a token, and the winner is released.

Place in the flow: between the teachers and the completed texts. The teachers behind `Writers` do not matter here:
`dpllm.methods.pate.completing` has models, and the audit (`dpllm.methods.pate.probe`) some that know what they vote.

**One unit.** It is a unit of one teacher. With the same text so far and the same candidates, the other teachers vote as
before, and this one may name any candidate: one vote goes from one candidate to another, as in a vote on labels. The
text so far is a release, and the candidates follow from it and from the public model.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from dpllm.data.units import Int64Array
from dpllm.methods.pate.release import TokenVotes
from dpllm.methods.pate.votes import NO_LABEL, Ballots


class Writers(Protocol):
    """The public model and the teachers, with R texts that all of them continue."""

    @property
    def num_texts(self) -> int:
        """Return R."""
        ...

    @property
    def num_teachers(self) -> int:
        """Return k."""
        ...

    def candidates(self) -> Int64Array:
        """Return (R, C) the tokens that may come next; the public model's own choice is the first.

        They follow from released tokens and from public models and random numbers only. Called once for each place.
        """
        ...

    def vote(self, teacher: int) -> Int64Array:
        """Return (R,) the number of the candidate that a teacher names for each text; called once for each place."""
        ...

    def append(self, tokens_R: Int64Array) -> None:
        """Append a token to each text."""
        ...


def written_tokens(writers: Writers, votes: TokenVotes, most: int, ends: Collection[int] = ()) -> list[list[int]]:
    """Return the tokens that follow each text.

    A text ends before a token that ends texts, after the most tokens, or when no vote is left for it. Where the check
    of a threshold fails, the public model's own token is taken.

    Args:
        writers: public model and teachers.
        votes: charged for all tokens that may follow.
        most: T, the most tokens of a text.
        ends: tokens that end a text.
    """
    texts: list[list[int]] = [[] for _ in range(writers.num_texts)]
    going = list(range(writers.num_texts))
    for _ in range(most):
        going = going[: votes.left]
        if not going:
            break
        candidates_RC = writers.candidates()
        ballots = Ballots(len(going), candidates_RC.shape[1])
        for teacher in range(writers.num_teachers):
            ballots.add(writers.vote(teacher)[going])
        winners = votes.winners(ballots)
        tokens_R = candidates_RC[:, 0].copy()  # of texts that have ended, where nobody reads it
        tokens_R[going] = candidates_RC[going, np.where(winners == NO_LABEL, 0, winners)]
        going = [text for text in going if int(tokens_R[text]) not in ends]
        for text in going:
            texts[text].append(int(tokens_R[text]))
        writers.append(tokens_R)
    return texts
