"""A trained head in chunks, through the clipper: norms and sums of a float64 loop over rows, and when it is used."""

import copy
import functools

import pytest
import torch
import transformers

from dpllm import GhostClipper
from dpllm.ghost import GhostError, NormMethod
from dpllm.ghost.chunked_head import token_losses
from dpllm.ghost.sums import Sum
from dpllm.ghost.unit_gradients import RowGradients
from dpllm.mechanism.clipping import FlatClipping, PerLayerClipping
from dpllm.models.tasks import default_row_loss
from dpllm.training.row_losses import HeadLosses, RowLosses
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.training.test_head_losses import Largest, model_of, rows_of
from tests.training.test_trainer import arguments, privacy, trainer, update_of

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
CLIPPINGS = {"flat": FlatClipping(0.5), "per layer": PerLayerClipping(0.5)}
UNITS = {"rows": None, "several rows": [1, 0, 1, 2], "padding": [0, 1, -1, -1]}


def trained(name="llama", dtype=torch.float64):
    """A model whose parameters are all trained."""
    return model_of(name, dtype).unload().requires_grad_().train()


def square_batch():
    """As many rows as tokens."""
    ids = torch.randint(3, 61, (4, 4))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def by_rows(model, batch, unit_index):
    """The gradients of the units by name, from all logits of one row at a time."""
    rows = len(batch["labels"])
    model, units = copy.deepcopy(model), list(range(rows)) if unit_index is None else unit_index
    losses, named = RowLosses(default_row_loss(model), False), dict(model.named_parameters())
    total = {name: torch.zeros(max(units) + 1, *p.shape, dtype=p.dtype) for name, p in named.items()}
    for row, unit in enumerate(units):
        if unit >= 0:
            loss = losses(model, {key: value[row : row + 1] for key, value in batch.items()})
            for name, grad in zip(named, torch.autograd.grad(loss.sum(), list(named.values())), strict=True):
                total[name][unit] += grad
    return total


class Clipped:
    """Norms, factors and sums of a model through the clipper, and the parameters whose sums were formed early."""

    def __init__(self, model, batch, clipping, unit_index=None, passes="auto", mode="chunks", calls=1):
        self.clipper = GhostClipper(model, None, NormMethod(backward_passes=passes), clipping)
        head = HeadLosses(mode)
        head.clipper = self.clipper
        names = {id(p): name for name, p in self.clipper.parameters.items()}
        units = None if unit_index is None else torch.tensor(unit_index)
        totals = {name: Sum.of(p) for name, p in self.clipper.parameters.items()}
        self.early = set()

        def finish(parameter):
            self.early.add(names[id(parameter)])
            with totals[names[id(parameter)]].kept_open():
                self.clipper.add_clipped_sum_(parameter, totals[names[id(parameter)]])

        try:
            for _ in range(calls):
                self.early.clear()
                self.result = self.clipper.clip(
                    RowLosses(default_row_loss(model), False, head)(model, batch), units, finish
                )
                for name, parameter in self.clipper.parameters.items():
                    if name not in self.early:
                        self.clipper.add_clipped_sum_(parameter, totals[name])
            self.sums = {name: total.filled() for name, total in totals.items()}
            self.groups = clipping.groups({name: tuple(p.shape) for name, p in self.clipper.parameters.items()})
        finally:
            self.clipper.remove()

    def assert_is(self, gradients, calls=1):
        """Compare with gradients of the units."""
        squares = torch.stack([grad.flatten(1).square().sum(1) for grad in gradients.values()]).sum(0)
        torch.testing.assert_close(self.result.norms.double(), squares.sqrt(), rtol=1e-6, atol=0)
        factors = self.result.factors.double().view(-1, len(squares))
        assert (factors < 1).any()
        for factor_U, names in zip(factors, self.groups, strict=True):
            for name in names:
                expected = calls * torch.tensordot(factor_U, gradients[name], 1)
                assert float((self.sums[name] - expected).norm()) <= 1e-6 * float(expected.norm())


@kills(
    "a use that no tap sees is not counted, so that a tied table's sum is formed without it",
    "dpllm/ghost/tapped_model.py",
    "        self.uses[self.ladder.target_of(parameter).name] += 1\n",
    "",
)
@pytest.mark.parametrize("clipping", CLIPPINGS.values(), ids=CLIPPINGS.keys())
@pytest.mark.parametrize("passes", [1, "auto", 2])
@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS.keys())
@pytest.mark.parametrize("name", ["llama", "tied", "soft-cap", "bias"])
def test_norms_and_sums_are_those_of_single_rows(name, units, passes, clipping):
    """In one pass, group by group and in two passes; a head that is also the table waits for both of its uses."""
    model, batch = trained(name), rows_of()
    clipped = Clipped(model, batch, clipping, units, passes)
    clipped.assert_is(by_rows(model, batch, units))
    head = next(n for n, p in model.named_parameters() if p is model.get_output_embeddings().weight)
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    by_groups = clipping is CLIPPINGS["per layer"] and passes == "auto" and units is None
    if passes == 2 or by_groups:
        assert clipped.early and (head in clipped.early) == (not is_tied)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("passes", ["auto", 2])
def test_activation_checkpointing(reentrant, passes):
    """Chunks come by themselves then, where the logits outweigh the inputs of the blocks."""
    model, batch = trained("tied"), rows_of()
    gradients = by_rows(model, batch, None)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for clipping in CLIPPINGS.values():
        clipped = Clipped(model, batch, clipping, None, passes, "auto")
        clipped.assert_is(gradients)
        if passes == 2 or clipping is CLIPPINGS["per layer"]:  # the sums of all blocks, norms included
            assert {name for name in gradients if "layers" in name} <= clipped.early


@pytest.mark.parametrize("passes", [1, 2])
def test_as_many_rows_as_tokens_over_several_microbatches(passes):
    """The sums add up."""
    model, batch = trained(), square_batch()
    Clipped(model, batch, CLIPPINGS["flat"], None, passes, calls=3).assert_is(by_rows(model, batch, None), calls=3)


def test_a_first_call_of_one_row():
    """The taps are tried again with two rows, and the head is in chunks in both calls."""
    model, head = trained(), HeadLosses("chunks")
    clipper = head.clipper = GhostClipper(model, 0.5)
    for rows in (1, 2, 4):
        batch = {name: value[:rows] for name, value in rows_of().items()}
        norms = clipper.clip(RowLosses(default_row_loss(model), False, head)(model, batch)).norms
        total = torch.stack([g.flatten(1).square().sum(1) for g in by_rows(model, batch, None).values()]).sum(0)
        torch.testing.assert_close(norms.double(), total.sqrt(), rtol=1e-6, atol=0)
        clipper.forget()
    clipper.remove()


def test_where_a_trained_head_is_in_chunks():
    """By the mode, and by itself under checkpointing, unless many blocks keep more than the logits take."""

    def is_chunked(mode, layers=1, recomputes=False, clips=True, grad=True):
        config = tiny_llama_config(num_hidden_layers=layers)
        model = transformers.LlamaForCausalLM(config).double().train()
        if recomputes:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        head = HeadLosses(mode)
        if clips:
            head.clipper = GhostClipper(model, 1.0)
        ids = torch.randint(3, config.vocab_size, (2, 5))
        with torch.set_grad_enabled(grad):
            return head(model, {"input_ids": ids}, ids)[1] is not None

    config = tiny_llama_config()
    many = 2 * config.vocab_size // config.hidden_size
    assert is_chunked("chunks") and not is_chunked("chunks", clips=False) and not is_chunked("whole", recomputes=True)
    assert is_chunked("auto", recomputes=True) and not is_chunked("auto")
    assert is_chunked("auto", grad=False)
    assert is_chunked("auto", many - 1, recomputes=True) and not is_chunked("auto", many + 1, recomputes=True)


def test_there_are_never_all_logits(monkeypatch):
    """Neither in the first call, which tries the taps, nor in the passes."""
    few = functools.partial(token_losses, entries=4000)
    monkeypatch.setattr("dpllm.training.row_losses.token_losses", few)
    model, head = transformers.LlamaForCausalLM(tiny_llama_config(vocab_size=1000)), HeadLosses("chunks")
    batch = {name: value.repeat(16, 2) for name, value in rows_of().items()}
    head.clipper = clipper = GhostClipper(model, 0.5, NormMethod("gram", backward_passes=2))
    with Largest() as largest:
        clipper.backward(RowLosses(default_row_loss(model), False, head)(model, batch))
    clipper.remove()
    assert largest.entries < batch["labels"].numel() * 1000 / 2


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 weights", "autocast"])
def test_bf16(autocast):
    """As all logits, which are rounded more."""
    model = trained("llama", torch.float32 if autocast else torch.bfloat16)
    batch, norms = rows_of(), []
    for mode in ("whole", "chunks"):
        head, clipper = HeadLosses(mode), GhostClipper(model, 0.5)
        head.clipper = clipper
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = RowLosses(default_row_loss(model), False, head)(model, batch)
        norms.append(clipper.backward(losses).norms)
        clipper.remove()
    torch.testing.assert_close(norms[1], norms[0], rtol=0.02, atol=0)


def test_uses_are_refused_outside_the_passes():
    """A use belongs to a call of the model, and its gradient to a backward pass of the clipper."""
    model, batch = trained(), rows_of()
    clipper, weight = GhostClipper(model, 0.5), model.lm_head.weight
    with pytest.raises(GhostError, match="call of the model"):
        clipper.expect(weight)
    with pytest.raises(GhostError, match="backward"):
        clipper.take(weight, RowGradients(torch.zeros(4, *weight.shape)))
    head = HeadLosses("chunks")
    head.clipper = clipper
    losses = RowLosses(default_row_loss(model), False, head)(model, batch)
    with pytest.raises(GhostError, match="backward"):
        losses.sum().backward()
    clipper.remove()


def test_a_run_has_the_same_update(tmp_path):
    """Two steps at σ = 0 through the Trainer, whose comparison of rows sees the losses in chunks."""
    updates = []
    for mode in ("whole", "chunks"):
        torch.manual_seed(0)
        run = trainer(
            tmp_path / mode,
            trained("tied", torch.float32),
            config=privacy(noise_multiplier=0.0, clip_norm=0.05, seed=3),
            args=arguments(tmp_path / mode, max_steps=2, optim="sgd", learning_rate=1.0),
            head=mode,
        )
        updates.append(update_of(run))
    assert float((updates[1] - updates[0]).norm()) <= 1e-4 * float(updates[0].norm()) > 0
