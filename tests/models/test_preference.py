"""Losses of preference pairs: for one pair each is TRL's scalar, and none depends on other pairs."""

import copy

import pytest
import torch

from dpllm.config import ConfigError
from dpllm.models.preference import COUPLED, DIVERGENCES, KINDS, PairLoss
from tests import trl_data
from tests.mutations import kills

SMOOTHED = {"exo_pair": 1e-3, "robust": 0.1}
OF_DIFFERENCES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")


@pytest.fixture(scope="module")
def trl_loss(tmp_path_factory):
    """TRL's own scalar loss of one pair at a time; its trainer is made once, and its options are replaced."""
    trl = pytest.importorskip("trl")
    model, reference = trl_data.model_and_reference()
    args = trl_data.arguments(trl.DPOConfig, tmp_path_factory.mktemp("trl"))
    trainer = trl.DPOTrainer(
        copy.deepcopy(model),
        copy.deepcopy(reference),
        args,
        train_dataset=trl_data.preferences()["prompt"],
        processing_class=trl_data.tokenizer(),
    )

    def loss(number, **options):
        for name, value in {"loss_weights": None, **options}.items():
            setattr(trainer.args, name, value)
        trainer.loss_types = options.get("loss_type", ["sigmoid"])
        trainer.loss_weights = options.get("loss_weights") or [1.0] * len(trainer.loss_types)
        trainer.beta, trainer.label_smoothing = options.get("beta", 0.1), options.get("label_smoothing", 0.0)
        trainer.ld_alpha = options.get("ld_alpha")
        trainer.f_divergence_type = options.get("f_divergence_type", "reverse_kl")
        batch = trainer.data_collator([trainer.train_dataset[number]])
        with torch.no_grad():
            return trainer.compute_loss(trainer.model, batch).item()

    return loss


@pytest.fixture(scope="module")
def own_losses(tmp_path_factory):
    """The losses of all pairs together, from raw examples, by the public trainer's parts."""
    trl = pytest.importorskip("trl")
    from dpllm import DPDPOTrainer
    from dpllm.training.trl_arguments import pair_loss_of

    model, reference = trl_data.model_and_reference()
    data = trl_data.preferences()["prompt"]

    def losses(**options):
        args = trl_data.arguments(trl.DPOConfig, tmp_path_factory.mktemp("own"), **options)
        run = DPDPOTrainer(
            model, args, trl_data.privacy(len(data)), data, processing_class=trl_data.tokenizer(), ref_model=reference
        )
        assert run.loss == pair_loss_of(args)
        batch = run.data_collator(list(run.train_dataset))
        with torch.no_grad():
            return run._losses(run.model, batch).tolist()

    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_one_pair_is_that_of_trl(kind, trl_loss, own_losses):
    """Beside other pairs too: ours have one loss per pair, TRL's one of a batch of one pair."""
    options = {"loss_type": [kind], "label_smoothing": SMOOTHED.get(kind, 0.0), "beta": 0.3}
    assert own_losses(**options) == pytest.approx([trl_loss(n, **options) for n in range(4)], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"ld_alpha": 0.4},
        {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 1.2]},
        *({"f_divergence_type": name} for name in DIVERGENCES if name != "reverse_kl"),
        {"loss_type": ["ipo"], "f_divergence_type": "js_divergence"},
    ],
    ids=str,
)
def test_options_of_the_loss_are_those_of_trl(options, trl_loss, own_losses):
    """Tails, sums of losses, divergences."""
    assert own_losses(**options) == pytest.approx([trl_loss(n, **options) for n in range(4)], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_pairs_loss_has_no_gradient_in_other_pairs(kind, divergence):
    """And does not change with them."""
    if divergence != "reverse_kl" and kind not in OF_DIFFERENCES:
        with pytest.raises(ConfigError, match="f_divergence_type="):
            PairLoss(kinds=(kind,), label_smoothing=SMOOTHED.get(kind, 0.0), f_divergence=divergence)
        return
    loss = PairLoss(kinds=(kind,), label_smoothing=SMOOTHED.get(kind, 0.0), f_divergence=divergence)
    # scores close to each other: beyond its margin, a hinge has no gradient in its own pair either
    log_probs = (torch.randn(5, 2, dtype=torch.float64) / 50).requires_grad_()
    reference, tokens = torch.randn(5, 2, dtype=torch.float64) / 50, torch.randint(1, 9, (5, 2))
    whole = loss(log_probs, reference, tokens)
    assert whole.shape == (5,) and bool(torch.isfinite(whole).all())
    grad = torch.autograd.grad(whole[2], log_probs)[0]
    assert grad[2].any() and not grad[[0, 1, 3, 4]].any()
    alone = torch.cat([loss(log_probs[n : n + 1], reference[n : n + 1], tokens[n : n + 1]) for n in range(5)])
    torch.testing.assert_close(alone, whole, rtol=1e-12, atol=0)


@kills(
    "a loss that sorts all pairs is accepted",
    "dpllm/models/preference.py",
    "            if kind in COUPLED:",
    "            if False:",
)
@pytest.mark.parametrize("kind", COUPLED)
def test_losses_that_couple_pairs_are_refused_with_the_reason(kind):
    """They sort the batch, or average over its tokens."""
    with pytest.raises(
        ConfigError, match=rf"loss_type='{kind}' cannot be used.*depends on other pairs. Use one of sig"
    ):
        PairLoss(kinds=("sigmoid", kind))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kinds": ("sigmoyd",)}, "unknown; did you mean 'sigmoid'"),
        ({"kinds": ()}, "loss_type names no loss; known: sigmoid, "),
        ({"weights": (1.0, 2.0)}, "loss_weights has 2 numbers for 1 losses"),
        ({"weights": (float("nan"),)}, "loss_weights"),
        ({"beta": 0.0}, "beta must be > 0"),
        ({"tail_weight": 1.5}, "ld_alpha must be <= 1"),
        ({"kinds": ("exo_pair",)}, "needs label_smoothing above 0"),
        ({"kinds": ("robust",), "label_smoothing": 0.5}, "needs label_smoothing below 0.5"),
        ({"f_divergence": "kl"}, "f_divergence_type='kl' is unknown"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, says):
    """By the name of TRL's option."""
    with pytest.raises(ConfigError, match=says):
        PairLoss(**options)
