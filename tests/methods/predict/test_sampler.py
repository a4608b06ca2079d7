"""Tests of dpllm.methods.predict.sampler: bounded scores, the exact draw, neighbours through a model, ends of texts."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from dpllm.audit.bounds import claimed_epsilon, trial_bounds
from dpllm.config import ConfigError
from dpllm.methods.predict import sampler as module
from dpllm.methods.predict.inputs import Template
from dpllm.methods.predict.sampler import MOST, STEPS, GroupSampler, Scoring, TextLimits, draw_index
from dpllm.methods.predict.token_draw import TokenDraw
from tests.mutations import kills
from tests.small_model import save_small_model


def shares(log_weights):
    """Return each entry's exact share of the draws: count the numbers that lead to it, by bisection."""
    seen = {}

    def total(bound):
        seen["bound"] = bound
        return 0

    draw_index(log_weights, total)
    bound = seen["bound"]
    ends, place = {}, 0
    while place < bound:
        token = draw_index(log_weights, lambda _, at=place: at)
        low, high = place, bound
        while high - low > 1:  # the numbers of a token are consecutive
            middle = (low + high) // 2
            low, high = (middle, high) if draw_index(log_weights, lambda _, at=middle: at) == token else (low, middle)
        ends[token] = Fraction(high - place, bound)
        place = high
    return ends


def test_each_share_is_exact():
    """Also of tokens whose share is far below the rounding error of a running sum of floats."""
    logs = np.array([0.0, -1.5, -np.inf, -60.0, -300.0, -60.0])
    weights = {n: Fraction(float(np.exp(one))) for n, one in enumerate(logs) if one > -np.inf}
    assert shares(logs) == {n: weight / sum(weights.values()) for n, weight in weights.items()}


def test_draws_follow_the_weights():
    """With the operating system's randomness."""
    logs = np.log(np.array([1.0, 0.5, 0.25, 0.25]))
    drawn = Counter(draw_index(logs) for _ in range(8000))
    assert stats.chisquare([drawn[n] for n in range(4)], [4000, 2000, 1000, 1000]).pvalue > 1e-6


@pytest.mark.parametrize("logs", [[], [-np.inf], [0.5], [np.nan, 0.0]])
def test_unusable_weights(logs):
    """An error, and not a token."""
    with pytest.raises(ValueError, match="token can"):
        draw_index(np.array(logs, dtype=np.float64))


V = 40
EXTREME = [float("inf"), float("-inf"), float("nan"), 1e30, -1e30, 0.0, 3.7]


def scorings():
    """Both kinds, with and without a set of tokens."""
    return [
        Scoring(clip=0.6, units=8, temperature=1.1, around_public=True, top_k=7),
        Scoring(clip=0.6, units=8, temperature=0.3, around_public=True),
        Scoring(clip=10.0, units=50, temperature=2.0),
        Scoring(clip=10.0, units=50, temperature=2.0, top_k=7),
    ]


def some_logits(rows, seed):
    """Return rows of which some have extreme entries."""
    generator = torch.Generator().manual_seed(seed)
    logits_RV = 30 * torch.randn(rows, V, generator=generator)
    for number, value in enumerate(EXTREME):
        logits_RV[number % rows, (3 * number) % V] = value
    logits_RV[rows - 1] = 1e6 * torch.randn(V, generator=generator)
    return logits_RV


@kills(
    "the scores of a private prediction are not clipped",
    "dpllm/methods/predict/sampler.py",
    ".round().clamp(-MOST, MOST).long()",
    ".clamp(-1e15, 1e15).round().long()",
)
@kills(
    "each record of a user adds to the scores as much as a whole user may",
    "dpllm/methods/predict/sampler.py",
    'torch.div(steps_RV, rows_of_unit_R[:, None], rounding_mode="trunc")',
    "steps_RV",
)
@pytest.mark.parametrize("scoring", scorings())
@pytest.mark.parametrize("rows_of_unit", [1, 3])
def test_a_unit_is_bounded_and_moves_the_average_by_no_more(scoring, rows_of_unit):
    """Neighbours: the sum with and without the unit, by exact whole numbers; and the log-weights that follow."""
    public_V = 5 * torch.randn(V)
    counts_R = torch.full((rows_of_unit,), rows_of_unit)
    others_V = scoring.contributions(some_logits(7, 1), public_V, torch.ones(7, dtype=torch.long)).sum(dim=0)
    for seed in range(20):
        unit_V = scoring.contributions(some_logits(rows_of_unit, seed), public_V, counts_R).sum(dim=0)
        assert unit_V.dtype == torch.int64 and int(unit_V.abs().max()) <= MOST < STEPS
        without = scoring.log_weights(others_V, public_V).numpy()
        with_unit = scoring.log_weights(others_V + unit_V, public_V).numpy()
        drawn = without > -np.inf
        assert (drawn == (with_unit > -np.inf)).all()  # the set of tokens is public
        normalised = [logs[drawn] - np.log(np.exp(logs[drawn]).sum()) for logs in (without, with_unit)]
        moved = normalised[1] - normalised[0]
        assert moved.max() - moved.min() <= 2 / scoring.noise_multiplier


def test_a_unit_reaches_its_bound():
    """So the test above can fail: an extreme unit moves a score by almost c/s."""
    scoring = Scoring(clip=10.0, units=50, temperature=2.0)
    row = torch.full((1, V), -1e9)
    row[0, 3] = 1e9
    unit_V = scoring.contributions(row, torch.zeros(V), torch.ones(1, dtype=torch.long))[0]
    assert int(unit_V[3]) == MOST and int(unit_V[0]) == -MOST


def test_private_logits_are_shifted_and_clipped_as_in_the_paper():
    """clip(z - max z + c) to [-c, c], averaged over the public s, divided by τ (arXiv:2407.12108)."""
    scoring = Scoring(clip=10.0, units=4, temperature=2.0)
    logits_RV = 8 * torch.randn(4, V, dtype=torch.float64)
    mean_V = (logits_RV - logits_RV.amax(1, keepdim=True) + 10).clamp(-10, 10).sum(0) / 4 / 2
    sums_V = scoring.contributions(logits_RV, torch.zeros(V), torch.ones(4, dtype=torch.long)).sum(0)
    found_V = scoring.log_weights(sums_V, torch.zeros(V))
    assert torch.allclose(found_V, mean_V - mean_V.amax(), atol=1e-3)


def test_differences_to_the_public_logits_are_clipped():
    """φ_pub + (1/s) Σ clip(φ_i - φ_pub), over the tokens within 2c/s of the k-th public one (arXiv:2507.02974)."""
    scoring = Scoring(clip=0.6, units=4, temperature=1.5, around_public=True, top_k=5)
    logits_RV, public_V = 3 * torch.randn(4, V, dtype=torch.float64), 3 * torch.randn(V, dtype=torch.float64)
    mean_V = (public_V + (logits_RV - public_V).clamp(-0.6, 0.6).sum(0) / 4) / 1.5
    kept_V = public_V >= public_V.sort(descending=True).values[4] - 2 * 0.6 / 4
    sums_V = scoring.contributions(logits_RV, public_V, torch.ones(4, dtype=torch.long)).sum(0)
    found_V = scoring.log_weights(sums_V, public_V)
    assert (found_V[~kept_V] == -torch.inf).all() and 5 <= int(kept_V.sum()) < V
    assert torch.allclose(found_V[kept_V], (mean_V - mean_V[kept_V].amax())[kept_V], atol=1e-4)


def test_few_units_count_as_the_public_size():
    """The sum is divided by s, and not by the number of rows that are there."""
    scoring = Scoring(clip=10.0, units=100, temperature=1.0)
    row_RV = torch.full((1, V), -100.0)
    row_RV[0, 0] = 0.0
    sums_V = scoring.contributions(row_RV, torch.zeros(V), torch.ones(1, dtype=torch.long))[0]
    logs_V = scoring.log_weights(sums_V, torch.zeros(V))
    assert float(logs_V[1]) == pytest.approx(-20 / 100, rel=1e-3)


RECORDS = [["the small dog"], ["a red house and the old man"], ["one bridge"], ["seven clouds under one bridge"]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A small model that is sure of its tokens, with its tokenizer."""
    folder = save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.lm_head.weight.data *= 40
    return model, AutoTokenizer.from_pretrained(folder)


def sampler_of(loaded, scoring=None, **limits):
    scoring = scoring or Scoring(clip=2.0, units=4, temperature=1.0, around_public=True)
    return GroupSampler(*loaded, scoring, TextLimits(**{"max_new_tokens": 5, **limits}), 12)


@pytest.fixture
def drawn(monkeypatch):
    """Keep the log-weights of every token; draw the likeliest."""
    seen = []

    def likeliest(log_weights):
        seen.append(log_weights)
        return int(log_weights.argmax())

    monkeypatch.setattr(module, "draw_index", likeliest)
    return seen


@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(clip=2.0, units=4, temperature=1.0, around_public=True),
        Scoring(clip=2.0, units=4, temperature=1.0, around_public=True, top_k=20),
        Scoring(clip=2.0, units=4, temperature=1.0),
    ],
)
@pytest.mark.parametrize("one", [["clouds"], ["the old man", "walks over one bridge", "red"], ["seven clouds"]])
def test_neighbours_through_model_and_tokenizer(loaded, drawn, scoring, one):
    """Take a unit away, of one or of several records: log-probabilities move within a range of 2c/(sτ)."""
    limited = sampler_of(loaded, scoring, max_new_tokens=1, rows_per_unit=3)
    for group in ([*RECORDS[:3], one], RECORDS[:3]):
        limited.text(group, "the")
    logs = [log_weights - np.log(np.exp(log_weights).sum()) for log_weights in drawn]
    finite = np.isfinite(logs[0])
    assert (finite == np.isfinite(logs[1])).all()  # the set of tokens is public
    moved = logs[0][finite] - logs[1][finite]
    assert 0 < moved.max() - moved.min() <= 2 / scoring.noise_multiplier


@kills(
    "the number of a user's records shows in the shape of a pass",
    "dpllm/methods/predict/sampler.py",
    "            empty = most - len(unit)",
    "            empty = 0 if unit else most",
)
def test_the_rows_of_the_passes_are_public(loaded, monkeypatch):
    """Users with other numbers of records, or none, leave the shapes of all passes and the places of others alone."""
    given = []

    class Kept(module.Continuation):
        def __init__(self, model, rows, *others):
            given.append(rows)
            super().__init__(model, rows, *others)

    monkeypatch.setattr(module, "Continuation", Kept)
    limited = sampler_of(loaded, max_new_tokens=1, rows_per_unit=3, rows_per_pass=5)
    three = ["the small dog", "one bridge", "red"]
    for one in (three, three[:1], []):
        limited.text([["seven clouds"], one, three, ["a house"]], "the")
    first, second, third = given[::2]  # the others are of the public model
    assert len(first) == len(second) == len(third) == 4 * 3
    for other in (second, third):
        assert {place for place in range(12) if other[place] != first[place]} <= {3, 4, 5}
    with pytest.raises(ValueError, match="4 records"):
        limited.text([[*three, "old"]], "the")


def test_rows_continue_with_the_same_tokens(loaded, drawn):
    """Against the model on each whole row, one at a time."""
    model, _ = loaded
    limited = sampler_of(loaded, rows_per_pass=3)
    limited.text(RECORDS, "the")
    public = limited._row("", limited._public.encoded("the"))
    rows = [limited._row(one[0], limited._public.encoded("the")) for one in RECORDS]
    scoring, tokens = limited._scoring, []
    for found in drawn:
        with torch.no_grad():
            logits = [model(torch.tensor([[*row, *tokens]])).logits[0, -1].double() for row in (public, *rows)]
        mean = logits[0] + sum((one - logits[0]).clamp(-2, 2) for one in logits[1:]) / scoring.units
        assert np.allclose(found, (mean - mean.max()).numpy(), atol=1e-3)
        tokens.append(int(found.argmax()))
    assert 1 <= len(tokens) <= 5


def test_a_text_has_at_most_its_tokens_and_ends_before_the_stop(loaded, monkeypatch):
    """The end of a text is a public rule about the tokens drawn."""
    _, tokenizer = loaded
    word, end = tokenizer(" dog", add_special_tokens=False)["input_ids"][0], tokenizer.eos_token_id
    monkeypatch.setattr(module, "draw_index", lambda _: word)
    full = sampler_of(loaded).text(RECORDS, "the")
    assert len(tokenizer(full, add_special_tokens=False)["input_ids"]) == 5
    stop = full[2:4]
    assert sampler_of(loaded, stop=stop).text(RECORDS, "the") == full[: full.index(stop)]
    tokens = iter([word, end])
    monkeypatch.setattr(module, "draw_index", lambda _: next(tokens))
    assert sampler_of(loaded).text(RECORDS, "the") == tokenizer.decode([word])


def test_more_units_than_the_public_size(loaded):
    """The average would move further than is charged."""
    with pytest.raises(ValueError, match="public size"):
        sampler_of(loaded, Scoring(2.0, 3, 1.0, True)).text(RECORDS, "the")


def test_no_room_for_the_tokens(loaded):
    """Refused before anything is charged."""
    with pytest.raises(ConfigError, match="sees 64"):
        sampler_of(loaded, max_new_tokens=60).require_room(["the"])


def test_an_encoder_with_a_decoder(loaded):
    """Its context is not a prefix of the text."""
    model = T5ForConditionalGeneration(T5Config(vocab_size=320, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(ConfigError, match="causal language model"):
        sampler_of((model, loaded[1]))


def test_templates():
    """Columns by name, and nothing else of a record or of Python."""
    template = Template("{mr} -> {ref}{", ["mr", "ref"])
    assert template.of({"mr": "{ref}", "ref": None}) == "{ref} -> {"
    with pytest.raises(ConfigError, match="mean 'ref"):
        Template("{reff}", ["mr", "ref"])
    with pytest.raises(ConfigError, match="names no column"):
        Template("{} {0.__class__}", ["mr"])


TOKENS, DELTA, RUNS, WORDS_OF_THE_MODEL = 10, 1e-3, 2000, 4


class Unclipped(Scoring):
    """Planted: contributions are on the grid, and not clipped."""

    def contributions(self, logits_RV, public_V, rows_of_unit_R):
        """Return what a row adds, without a bound."""
        return super().contributions(logits_RV, public_V, rows_of_unit_R) * 5


def bounds(scoring):
    """Return ε of the plan, and the lower bounds from runs with and without the canary."""
    public_V, one = torch.zeros(WORDS_OF_THE_MODEL), torch.ones(1, dtype=torch.long)
    canary_V = torch.full((1, WORDS_OF_THE_MODEL), -50.0)
    canary_V[0, 0] = 50.0
    canary_V = scoring.contributions(canary_V, public_V, one)[0]
    logs = {held: scoring.log_weights(canary_V * held, public_V).numpy() for held in (0, 1)}
    coins = np.random.default_rng(0).integers(0, 2, RUNS)
    scores = np.array([sum(draw_index(logs[coin]) == 0 for _ in range(TOKENS)) for coin in coins], dtype=np.float64)
    history = [(TokenDraw(noise_multiplier=scoring.noise_multiplier), TOKENS)]
    return claimed_epsilon(history, DELTA), trial_bounds(scores, coins.astype(bool), DELTA, history=history)


@pytest.mark.deep
@pytest.mark.parametrize("around_public", [True, False])
def test_tokens_show_no_more_than_the_accounting_allows_and_without_clipping_refute_it(around_public):
    """The bound is well above 0, so it can fail, and below ε; the same test, on a planted bug."""
    options = {"clip": 1.0, "units": 2, "temperature": 1.0, "around_public": around_public}
    claim, found = bounds(Scoring(**options))
    assert not any(bound.refutes for bound in found)
    assert 0.15 * claim < max(bound.epsilon for bound in found) <= claim
    claim, found = bounds(Unclipped(**options))
    assert any(bound.refutes for bound in found) and max(bound.epsilon for bound in found) > claim
