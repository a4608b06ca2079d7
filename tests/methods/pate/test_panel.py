"""Teachers over one model: each votes as its own model would by itself, and similar teachers agree."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from transformers import LlamaForCausalLM

from dpllm.methods.pate.teach import OneBase, Panel
from dpllm.methods.sections import TeachConfig
from tests.conftest import tiny_llama_config
from tests.mutations import kills

VOCABULARY, BARRED = 44, (0, 7)
PROMPTS = [[1, 5, 9, 20], [1, 3], [2]]


def made(num_teachers, spread=0.5):
    """Return one float64 model with adapters, and teachers whose adapters are random."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama_config(vocab_size=48, initializer_range=0.3)).double()
    base = OneBase(get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")))
    teachers = [
        {name: tensor + spread * torch.randn_like(tensor) if "lora" in name else tensor for name, tensor in start}
        for start in (base.state().items() for _ in range(num_teachers))
    ]
    return base, teachers


def scores_of(base, state, rows, noise_RV):
    """Return the scores of texts one at a time, without a cache and without padding."""
    model = base.put(state)
    with torch.no_grad():
        logits_RV = torch.cat([model(torch.tensor([row])).logits[:, -1, :VOCABULARY] for row in rows])
    scores_RV = logits_RV + torch.from_numpy(noise_RV)
    scores_RV[:, list(BARRED)] = -torch.inf
    return scores_RV.numpy()


class ByTheFirstRow(LlamaForCausalLM):
    """Chooses its logits by the length of the first row that it sees, as Reformer its number of hash buckets."""

    first = None

    def forward(self, input_ids, **inputs):
        self.first = self.first or input_ids.shape[1]
        found = super().forward(input_ids, **inputs)
        found.logits = found.logits.roll(self.first, dims=-1)
        return found


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize("kind", [LlamaForCausalLM, ByTheFirstRow])
def test_no_row_of_a_teacher_changes_another_teacher_or_a_candidate(kind):
    """Dynamic rotary embeddings keep the longest row so far, and other models the first, beside their tensors."""
    rope = {"max_position_embeddings": 8, "rope_parameters": DYNAMIC} if kind is LlamaForCausalLM else {}
    row, long = torch.arange(12)[None], torch.arange(40)[None]

    def found(trained_before):
        torch.manual_seed(0)
        base = OneBase(kind(tiny_llama_config(vocab_size=48, initializer_range=0.3, **rope)))
        if trained_before:
            base.begin()(long)
        with torch.no_grad():
            scores = base.begin().eval()(row).logits
        if trained_before:
            base.begin()(long)
        panel = Panel(base, [], row[:, :8].tolist(), TeachConfig(temperature=0), np.random.default_rng(0))
        return scores, torch.from_numpy(panel.candidates())

    for alone, after in zip(found(False), found(True), strict=True):
        assert torch.equal(alone, after)


@kills(
    "the candidates of a token are those of a teacher",
    "dpllm/methods/pate/teach.py",
    "self._scores(self._public, None)",
    "self._scores(self._public, self._teachers[0])",
)
@pytest.mark.parametrize("candidates", [6, None])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_teacher_votes_as_it_would_by_itself(candidates, temperature):
    """A loop over teachers, texts and places in float64: nothing of one teacher is left for the next."""
    base, teachers = made(3)
    options = TeachConfig(candidates=candidates, temperature=temperature)
    panel = Panel(base, teachers, PROMPTS, options, np.random.default_rng(3), BARRED, VOCABULARY)
    rng, rows = np.random.default_rng(3), [list(row) for row in PROMPTS]
    for token in (4, 17, 30, 2):
        noise_RV = np.zeros((3, VOCABULARY))
        if temperature:
            noise_RV = rng.gumbel(scale=temperature, size=noise_RV.shape)
        found = panel.candidates()
        count = candidates or VOCABULARY - len(BARRED)
        expected = np.argsort(-scores_of(base, None, rows, noise_RV), axis=1)[:, :count]
        assert np.array_equal(found, expected) and not set(BARRED) & set(found.flatten())
        votes = []
        for teacher, state in enumerate(teachers):
            votes.append(panel.vote(teacher))
            own = np.take_along_axis(scores_of(base, state, rows, noise_RV), expected, axis=1)
            assert np.array_equal(votes[-1], own.argmax(axis=1))
        assert len(set(map(bytes, votes))) > 1  # teachers differ, so the test can fail
        panel.append(np.full(3, token))
        rows = [[*row, token] for row in rows]


def test_teachers_draw_from_their_own_distributions_and_agree_where_these_do():
    """Common random numbers: the frequencies are a teacher's own, and the public model's copy draws as it does."""
    base, (teacher,) = made(1)
    copy, prompts = base.state(), [[1, 5]] * 3000
    noise = np.zeros((1, VOCABULARY))
    options = TeachConfig(candidates=None, temperature=1.0)
    panel = Panel(base, [copy, teacher], prompts, options, np.random.default_rng(1), BARRED, VOCABULARY)
    candidates = panel.candidates()
    assert not panel.vote(0).any()  # the first candidate is the public model's own choice
    votes = panel.vote(1)
    drawn = np.bincount(candidates[np.arange(len(votes)), votes], minlength=VOCABULARY)
    share = np.exp(scores_of(base, teacher, prompts[:1], noise)[0])
    expected = len(votes) * share / share.sum()
    kept = expected > 5
    tables = [np.append(counts[kept], counts[~kept].sum()) for counts in (drawn, expected)]
    assert kept.sum() > 5 and stats.chisquare(*tables).pvalue > 1e-4
    assert (votes == 0).mean() > 1.5 * np.square(share / share.sum()).sum()  # more often than independent draws


def test_scores_that_are_not_finite_are_still_one_vote():
    """A teacher whose training failed names a candidate like any other."""
    base, (teacher,) = made(1)
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in teacher.items()}
    panel = Panel(base, [broken], PROMPTS, TeachConfig(), np.random.default_rng(0))
    candidates = panel.candidates()
    assert panel.vote(0).tolist() == [0, 0, 0] and candidates.shape == (3, 16)
