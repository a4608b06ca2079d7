"""Entries that a mask or an index selects: a layer that reads them gets each row's own, or the pass is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from dpllm import GhostClipper, GhostError, per_sequence_loss
from tests.conftest import tiny_llama_config
from tests.ghost.loop import assert_is_the_loop, perturbed
from tests.mutations import kills

ROWS, TOKENS, WIDTH = 4, 6, 4


def places(mask):
    return mask.flatten().nonzero()[:, 0]


SELECTIONS = {
    "mask": lambda h, m: h[m],
    "numbers": lambda h, m: h[m.nonzero(as_tuple=True)],
    "mask and slice": lambda h, m: h[m, :],
    "masked_select": lambda h, m: h.masked_select(m[..., None]).view(-1, WIDTH),
    "mask of tokens": lambda h, m: h.flatten(0, 1)[m.flatten()],
    "numbers of tokens": lambda h, m: h.flatten(0, 1)[places(m)],
    "numbers in a list": lambda h, m: h.flatten(0, 1)[places(m).tolist()],
    "numbers of NumPy": lambda h, m: h.flatten(0, 1)[places(m).numpy()],
    "index_select": lambda h, m: h.flatten(0, 1).index_select(0, places(m)),
    "gather": lambda h, m: h.flatten(0, 1).gather(0, places(m)[:, None].expand(-1, WIDTH)),
    "take_along_dim": lambda h, m: h.flatten(0, 1).take_along_dim(places(m)[:, None].expand(-1, WIDTH), 0),
    "embedding": lambda h, m: F.embedding(places(m), h.flatten(0, 1)),
    "parts of rows": lambda h, m: torch.cat([row[mask] for row, mask in zip(h, m, strict=True)]),
    "tokens one by one": lambda h, m: torch.stack([h[b, t] for b, t in m.nonzero().tolist()]),
    "rows of them": lambda h, m: h[m].view(len(h), -1, WIDTH),
    "written elsewhere": lambda h, m: torch.zeros(int(m.sum()), WIDTH, dtype=h.dtype).copy_(h[m]),
    "assigned elsewhere": lambda h, m: assigned(h[m]),
}


def assigned(chosen):
    other = torch.zeros_like(chosen)
    other[:] = chosen
    return other


class Picks(nn.Module):
    """A body, a selection, a frozen layer and a trained head."""

    def __init__(self, select, body=True, function=False, reentrant=None):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.body.requires_grad_(body)
        self.middle.requires_grad_(False)
        self.gate = nn.Parameter(torch.rand(WIDTH) + 0.5) if function else None
        self.select, self.reentrant = select, reentrant

    def _pick(self, h, mask):
        return self.head(torch.tanh(self.middle(self.select(h, mask))) * (1 if self.gate is None else self.gate))

    def forward(self, x, mask):
        h = torch.tanh(self.body(x))
        run = checkpoint if self.reentrant is not None else lambda function, *args, **_: function(*args)
        return run(self._pick, h, mask, use_reentrant=self.reentrant)


def losses(model, batch):
    return model(**batch).square().unflatten(0, (len(batch["x"]), -1)).flatten(1).sum(1)


def batch_of(*counts):
    """Return a batch in which row b has ``counts[b]`` places to select."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    for row, count in enumerate(counts):
        mask[row, torch.randperm(TOKENS, generator=generator)[:count]] = True
    return {"x": x, "mask": mask}


def refused_after_some(model, good, bad, user):
    """The batches that are in order are clipped, also in calls that nothing else watches; the last one is refused."""
    clipper = GhostClipper(model, 1.0)
    try:
        for _ in range(5):
            clipper.backward(losses(model, good))
        with pytest.raises(GhostError, match=rf"{user} reads \d entries that were selected from the 4 rows .*per_unit"):
            clipper.backward(losses(model, bad))
    finally:
        clipper.remove()


@kills(
    "a layer takes selected entries for its rows",
    "dpllm/ghost/hooks.py",
    "                uses.refuse_other_order(path, tensors)\n",
    "",
)
@kills(
    "a selection's order is looked at in some calls only",
    "dpllm/ghost/uses.py",
    "            self._needed |= orders.needs_every_call(tensors)\n",
    "",
)
@pytest.mark.parametrize("body", [True, False], ids=["trained-body", "frozen-body"])
@pytest.mark.parametrize("kind", SELECTIONS)
def test_a_selection_is_the_loop_or_refused(kind, body):
    """With one place in each row every entry is its row's; in calls 1 to 5 and, with others, refused in call 6."""
    model = perturbed(Picks(SELECTIONS[kind], body))
    assert_is_the_loop(model, losses, batch_of(1, 1, 1, 1), microbatches=3)
    refused_after_some(model, batch_of(1, 1, 1, 1), batch_of(2, 0, 1, 1), "head")


def test_several_places_in_each_row_are_the_loop_or_refused():
    """Eight entries of four rows are cut into two for each."""
    model = perturbed(Picks(SELECTIONS["mask"]))
    assert_is_the_loop(model, losses, batch_of(2, 2, 2, 2))
    refused_after_some(model, batch_of(2, 2, 2, 2), batch_of(3, 1, 2, 2), "head")


def test_a_parameter_in_a_function_reads_rows_in_order():
    """A gate is not in a module with a rule."""
    model = perturbed(Picks(SELECTIONS["mask"], function=True))
    model.head.requires_grad_(False)
    assert_is_the_loop(model, losses, batch_of(1, 1, 1, 1))
    refused_after_some(model, batch_of(1, 1, 1, 1), batch_of(2, 0, 1, 1), "gate")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_selection_in_a_recomputed_part_is_seen(reentrant):
    model = perturbed(Picks(SELECTIONS["mask"], reentrant=reentrant))
    refused_after_some(model, batch_of(1, 1, 1, 1), batch_of(2, 0, 1, 1), "head")


def test_rows_in_another_order_are_refused():
    """Rows sorted by their content, as for a recurrent network, are in order in some batches only."""
    model = perturbed(Picks(lambda h, mask: h[mask.sum(1).argsort(descending=True, stable=True)]))
    refused_after_some(model, batch_of(1, 1, 1, 1), batch_of(0, 1, 1, 1), "head")


HARMLESS = {
    "last token": lambda h, m: h[torch.arange(len(h)), m.int().argmax(1)],
    "first token": lambda h, m: h[:, 0],
    "some tokens": lambda h, m: h.index_select(1, torch.tensor([3, 1])),
    "tokens in a list": lambda h, m: h[:, [0, 2]],
    "tokens in an array": lambda h, m: h[:, np.array([0, 2])],
    "tokens of each": lambda h, m: h.gather(1, m.int().argsort(1)[..., None].expand_as(h)),
    "row after row": lambda h, m: torch.stack([row[mask].mean(0) for row, mask in zip(h, m, strict=True)]),
    "sorted and back": lambda h, m: h[(order := m.int().argmax(1).argsort())].tanh()[order.argsort()],
    "experts": lambda h, m: sorted_experts(h),
}


def sorted_experts(h):
    """Tokens sorted by an expert, multiplied in parts, and sorted back."""
    tokens = h.flatten(0, 1)
    expert = (tokens[:, 0] > 0).int()
    order = expert.argsort()
    ours, others = tokens[order].split([int((expert == 0).sum()), int(expert.sum())])
    return torch.cat([ours, 2 * others])[order.argsort()].view_as(h)


@pytest.mark.parametrize("kind", HARMLESS)
def test_entries_of_each_row_are_the_loop(kind):
    """Whatever the mask, each row gives its own entries."""
    assert_is_the_loop(perturbed(Picks(HARMLESS[kind])), losses, batch_of(2, 1, 3, 1), microbatches=3)


def test_a_mask_of_padding_leaves_later_calls_unwatched():
    """transformers picks the masks of rows by their numbers: in order for any data, so later calls need no watch."""
    model = LlamaForCausalLM(tiny_llama_config())
    clipper, ids = GhostClipper(model, 1.0), torch.randint(3, 61, (4, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    watched = []
    for _ in range(4):
        clipper.backward(per_sequence_loss(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, ids))
        watched.append(clipper._book._hooks.uses.active)
    assert watched == [True, True, False, True]
