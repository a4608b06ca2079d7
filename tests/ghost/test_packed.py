"""Packed rows: how they are cut, and that any dependence across a boundary is found."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpllm import GhostClipper, GhostError, packed_sequence_loss
from dpllm.data.rows import PackedCollator
from dpllm.ghost.model_calls import PackedRows
from dpllm.models.inputs import attention_by_row
from tests.mutations import kills
from tests.reference.zoo import Case, build_model

LENGTHS = (5, 3, 2, 1)


def boundaries(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def packed(*lengths):
    return PackedRows({"cu_seq_lens_q": boundaries(*lengths)})


def expected(x_N, lengths):
    return torch.stack([F.pad(row, (0, 0, 0, max(lengths) - len(row))) for row in x_N.split(list(lengths))])


@pytest.mark.parametrize("lengths", [LENGTHS, (4, 4), (1, 1, 1), (7, 1)], ids=str)
def test_every_layout_is_cut_into_the_same_rows(lengths):
    """With the tokens first, behind a batch of one, or behind the heads of an attention."""
    tokens = sum(lengths)
    x = torch.randn(tokens, 13)
    rows = expected(x, lengths)
    assert torch.equal(packed(*lengths).cut(x), rows)
    assert torch.equal(packed(*lengths).cut(x[None]), rows)
    by_head = x[None, None].expand(1, 2, -1, -1) if tokens != 2 else x[None, None]
    assert torch.equal(packed(*lengths).cut(by_head), rows[:, :, None].expand(-1, -1, by_head.shape[1], -1))


def test_what_has_no_tokens_is_left_alone():
    """Without packing, or if no dimension has the tokens."""
    x = torch.randn(1, 11, 4)
    assert PackedRows({}).cut(x) is x
    assert packed(3, 2).cut(x) is x
    assert packed(11).cut(x) is x


def test_layers_that_read_one_input_get_one_tensor():
    """Their common Gram matrix is found by its address; a tensor that was changed in between is cut again."""
    rows, x = packed(*LENGTHS), torch.randn(1, 11, 4)
    first = rows.cut(x)
    rows.cut(torch.randn(1, 11, 6))
    assert rows.cut(x.detach()) is first
    x += 1
    assert torch.equal(rows.cut(x), expected(x[0], LENGTHS))


def test_two_dimensions_as_long_as_the_tokens():
    """Other tensors of the call can decide it; otherwise it is an error rather than a guess."""
    x = torch.randn(1, 5, 5, 3)
    with pytest.raises(GhostError, match="5 tokens"):
        packed(3, 2).cut(x)
    rows = packed(3, 2)
    rows.cut(torch.randn(1, 6, 5, 3))
    assert torch.equal(rows.cut(x), packed(3, 2).cut(x[:, 0])[:, :, None].repeat(1, 1, 5, 1)) is False
    assert torch.equal(rows.cut(x)[1, 1], x[0, :, 4]) and not rows.cut(x)[1, 2].any()
    rows.cut(torch.randn(1, 5, 6, 3))
    with pytest.raises(GhostError, match="show which dimension"):
        rows.cut(x)


@pytest.mark.parametrize("wrong", [[1, 4], [0, 3, 3], [0], [[0, 4]], [0, 5, 4]], ids=str)
def test_boundaries_that_are_none_are_refused(wrong):
    """They begin with 0 and increase."""
    with pytest.raises(GhostError, match="increasing from 0"):
        PackedRows({"cu_seq_lens_q": torch.tensor(wrong)})


class Mixer(nn.Module):
    """Tokens to logits, with a module in the middle that may mix tokens."""

    def __init__(self, middle):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(17, 6), middle, nn.Linear(6, 17)

    def forward(self, input_ids, cu_seq_lens_q=None, **_):
        return self.head(self.middle(self.embed(input_ids)))


class TokenConvolution(nn.Module):
    """Each token sees the one before it, like the short convolution of a state-space model."""

    def forward(self, h):
        return h + 0.5 * F.pad(h, (0, 0, 1, 0))[:, :-1]


class LongConvolution(nn.Module):
    """Each token sees the one four places before: of rows of two tokens, the second next row's."""

    def forward(self, h):
        return h + 0.5 * F.pad(h, (0, 0, 4, 0))[:, :-4]


class State(nn.Module):
    """A recurrence over all tokens, as in a state-space model that does not know where rows begin."""

    def forward(self, h):
        return h.cumsum(1)


class Backwards(nn.Module):
    """Each token sees the second after it; the last of a row predicts nothing, so the one before it must be seen."""

    def forward(self, h):
        return h + 0.5 * F.pad(h, (0, 0, 0, 2))[:, 2:]


class Power(nn.Module):
    """Not affine in its parameter, so it is handled row by row."""

    def __init__(self):
        super().__init__()
        self.exponent = nn.Parameter(torch.rand(6) + 1)

    def forward(self, h):
        return h.abs().clamp_min(0.1) ** self.exponent


def batch_of(lengths=LENGTHS, vocabulary=17):
    generator = torch.Generator().manual_seed(2)
    return PackedCollator()(
        [{"input_ids": torch.randint(4, vocabulary, (n,), generator=generator).tolist()} for n in lengths]
    )


def losses(model, inputs):
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    output = model(**inputs)
    return packed_sequence_loss(getattr(output, "logits", output), labels, inputs["cu_seq_lens_q"])


LEAKS = {"convolution": TokenConvolution, "long convolution": LongConvolution, "state": State, "backwards": Backwards}


@kills(
    "of packed rows the first alone is probed",
    "dpllm/ghost/weights_check.py",
    "[real[::2], real[1::2], real[-1:]] if packed",
    "[real[:1]] if packed",
)
@pytest.mark.parametrize("lengths", [(5, 3), (4, 4, 4), (5, 3, 2, 2, 2), (2, 2, 2), (6, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("middle", LEAKS.values(), ids=LEAKS.keys())
def test_a_model_that_mixes_tokens_across_rows_is_refused(middle, lengths):
    """Any coupling, in either direction, also over short rows, is found in the first backward pass or in the check."""
    model = Mixer(middle())
    clipper, inputs = GhostClipper(model, 1.0), batch_of(lengths)
    match = r"depends on the packed row \d.*microbatch.pack: false"
    with pytest.raises(GhostError, match=match):
        clipper.backward(losses(model, inputs))
    with pytest.raises(GhostError, match=match):
        clipper.check_rows(lambda: losses(model, inputs), torch.arange(len(lengths)))
    clipper.remove()


def test_a_model_that_works_on_tokens_one_by_one_is_accepted():
    """The measurement passes, and is made once."""
    model = Mixer(nn.GELU())
    clipper = GhostClipper(model, 1.0)
    clipper.check_rows(lambda: losses(model, batch_of()), torch.arange(4))
    assert clipper.rows_checked
    assert clipper.backward(losses(model, batch_of())).norms.shape == (4,)


def test_rows_that_were_padded_first_are_measured_again_when_packed():
    """Independence of padded rows does not imply independence of packed rows."""
    model = Mixer(TokenConvolution())
    clipper = GhostClipper(model, 1.0)
    clipper.backward(model(torch.randint(4, 17, (3, 5))).square().mean((1, 2)))
    assert clipper.rows_checked
    with pytest.raises(GhostError, match=r"depends on the packed row \d"):
        clipper.backward(losses(model, batch_of()))


def test_a_cache_that_makes_transformers_forget_the_rows_is_found():
    """With use_cache its packed mask is not built, and later rows see all earlier ones."""
    model = build_model(Case("llama"))
    inputs = batch_of(vocabulary=97)
    clipper = GhostClipper(model, 1.0)
    with pytest.raises(GhostError, match=r"depends on the packed row \d"):
        clipper.backward(losses(model, {**inputs, "use_cache": True}))


@kills(
    "values that aren't finite may pass from one packed row to another",
    "dpllm/ghost/clipper.py",
    "            self._check_spread(losses, unit_index, SpreadProbe(torch.stack(finite).all(dim=0)))\n",
    "            pass\n",
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_multiplies_what_it_masks_is_refused_by_measurement(attention):
    """A mask over all pairs of tokens separates finite rows, but a NaN passes through."""
    model = build_model(Case("llama", dtype="float32"))
    model.set_attn_implementation(attention)
    inputs, clipper = batch_of(vocabulary=97), GhostClipper(model, 1.0)
    with pytest.raises(GhostError, match=r"dpllm\.models\.inputs"):
        clipper.check_rows(lambda: losses(model, inputs), torch.arange(4))
    with attention_by_row(model):
        clipper.check_rows(lambda: losses(model, inputs), torch.arange(4))


def test_a_gradient_that_is_not_finite_ends_a_loop_that_did_not_measure():
    """It may have reached other units. If all rows are of one unit, they are lost together in any case."""
    model = Mixer(nn.GELU())
    with torch.no_grad():
        model.embed.weight[16] = float("inf")
    inputs = batch_of(vocabulary=16)
    clipper = GhostClipper(model, 1.0)
    clipper.backward(losses(model, inputs))
    inputs["input_ids"][0, 0] = 16
    with pytest.raises(GhostError, match="check_rows"):
        clipper.backward(losses(model, inputs))
    assert clipper.backward(losses(model, inputs), torch.zeros(4, dtype=torch.int64)).num_nonfinite == 1


def test_a_first_batch_with_a_row_that_is_not_finite():
    """It gives no information, but the others do; if all are lost, nothing was measured, and nothing is released."""
    model = Mixer(nn.GELU())
    with torch.no_grad():
        model.embed.weight[16] = float("inf")
    inputs, units = batch_of(vocabulary=16), torch.arange(4)
    for tokens, finite in (([0], 3), ([0, 5, 8, 10], 0)):
        inputs["input_ids"][0, tokens] = 16
        clipper = GhostClipper(model, 1.0)
        clipper.check_rows(lambda: losses(model, inputs), units)
        if finite:
            assert clipper.backward(losses(model, inputs), units).num_nonfinite == 4 - finite
        else:
            with pytest.raises(GhostError, match="is not finite"):
                clipper.backward(losses(model, inputs), units)
        clipper.remove()


def test_a_parameter_that_each_token_uses_by_itself_is_packed():
    """Its gradient is that of each row alone, summed over the row's tokens."""
    torch.manual_seed(0)
    model = Mixer(Power()).double()
    clipper = GhostClipper(model, 1e9, parameter_norms=True)
    together = clipper.backward(losses(model, batch_of()), torch.arange(4)).parameter_norms["middle.exponent"]
    ids = batch_of()["input_ids"][0].split(LENGTHS)
    for row, tokens in enumerate(ids[:3]):  # the last row has one token, and predicts nothing
        alone = PackedCollator()([{"input_ids": tokens.tolist()}])
        model.zero_grad()
        norm = clipper.backward(losses(model, alone)).parameter_norms["middle.exponent"][0]
        torch.testing.assert_close(together[row], norm, rtol=1e-6, atol=0)
        assert float(norm) > 0
    assert float(together[3]) == 0


class ShortConvolution(nn.Module):
    """Each token sees the one before it, by weights of its own."""

    def __init__(self):
        super().__init__()
        self.taps = nn.Parameter(torch.rand(6, 1, 2))

    def forward(self, h):
        return F.conv1d(F.pad(h.mT, (1, 0)), self.taps, groups=6).mT


def test_a_parameter_of_a_function_over_tokens_can_not_be_packed():
    """By name; with a single row it is accepted."""
    model = Mixer(ShortConvolution())
    clipper = GhostClipper(model, 1.0)
    with pytest.raises(GhostError, match=r"middle\.taps"):
        clipper.backward(losses(model, batch_of()))
    assert clipper.backward(losses(model, batch_of((5,)))).norms.shape == (1,)


def test_as_many_losses_as_packed_rows():
    """A mean over all of them, or a loss per token, is not a loss per row."""
    model = Mixer(nn.GELU())
    clipper = GhostClipper(model, 1.0)
    with pytest.raises(GhostError, match="packed_sequence_loss"):
        clipper.backward(losses(model, batch_of()).mean()[None])
