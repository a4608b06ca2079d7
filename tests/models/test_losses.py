"""One loss per row, only from that row."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dpllm.data.labels import END, START
from dpllm.models.losses import (
    classification_loss,
    multi_label_loss,
    packed_sequence_loss,
    per_sequence_loss,
    regression_loss,
    seq2seq_loss,
    span_loss,
    token_classification_loss,
)
from tests.mutations import kills


@kills(
    "the loss is averaged over the batch's tokens",
    "dpllm/models/losses.py",
    "(target_BT != IGNORE).sum(1).clamp_min(1)",
    "(target_BT != IGNORE).sum().clamp_min(1)",
)
def test_each_row_is_averaged_over_its_own_targets():
    """Not over the batch's tokens: a row's loss must not depend on the lengths of others."""
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    labels[1, 3:] = -100
    labels[2, :4] = -100
    losses = per_sequence_loss(logits, labels)
    for row in range(3):
        expected = F.cross_entropy(logits[row, :-1], labels[row, 1:], ignore_index=-100)
        torch.testing.assert_close(losses[row], expected)


def test_a_row_alone_has_the_loss_it_has_in_the_batch():
    """Padding and other rows change nothing."""
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    labels[0, 3:] = -100
    alone = per_sequence_loss(logits[:1, :3], labels[:1, :3])
    torch.testing.assert_close(per_sequence_loss(logits, labels)[:1], alone)


@kills(
    "a place without a target has a gradient",
    "dpllm/models/losses.py",
    "grad_MV.masked_fill_(~counts_M[:, None], 0)",
    "grad_MV",
)
def test_a_row_without_targets_has_loss_zero_and_no_gradient():
    """A padding row must not turn into NaN."""
    logits = torch.randn(2, 4, 7, requires_grad=True)
    labels = torch.randint(0, 7, (2, 4))
    labels[1] = -100
    losses = per_sequence_loss(logits, labels)
    losses.sum().backward()
    assert float(losses[1].detach()) == 0 and not logits.grad[1].any()


@kills(
    "a packed row's last token predicts the next row's first",
    "dpllm/models/losses.py",
    ".index_fill(1, cu_seq_lens[1:].long() - 1, IGNORE)",
    "",
)
def test_packed_rows_have_the_losses_of_padded_ones():
    """The last token of a row predicts nothing, for every first label of the next row."""
    lengths = [4, 1, 3, 5]
    logits, labels = torch.randn(1, 13, 7, dtype=torch.float64, requires_grad=True), torch.randint(0, 7, (1, 13))
    labels[0, 5:8] = -100
    losses = packed_sequence_loss(logits, labels, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
    pieces = zip(logits.split(lengths, 1), labels.split(lengths, 1), strict=True)
    torch.testing.assert_close(losses, torch.cat([per_sequence_loss(*piece) for piece in pieces]))
    losses.sum().backward()
    assert not logits.grad[0, [3, 4, 5, 6, 7, 12]].any() and logits.grad[0, [0, 1, 2, 8]].any(1).all()


@pytest.mark.parametrize(
    ("labels", "boundaries"),
    [(torch.zeros(1, 4), [0, 3]), (torch.zeros(2, 2), [0, 2]), (torch.zeros(1, 4), [[0, 4]])],
    ids=["end", "two rows", "shape"],
)
def test_boundaries_that_are_not_those_of_the_labels_are_refused(labels, boundaries):
    """A loss would be assigned to another row."""
    with pytest.raises(ValueError, match="cu_seq_lens"):
        packed_sequence_loss(torch.zeros(*labels.shape, 3), labels.long(), torch.tensor(boundaries))


def test_seq2seq_labels_are_not_shifted():
    """An encoder-decoder's labels are aligned with its logits."""
    logits, labels = torch.randn(2, 4, 7), torch.randint(0, 7, (2, 4))
    expected = torch.stack([F.cross_entropy(logits[b], labels[b]) for b in range(2)])
    torch.testing.assert_close(seq2seq_loss(logits, labels), expected)


def test_classification():
    """Cross-entropy per row."""
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    torch.testing.assert_close(classification_loss(logits, labels), F.cross_entropy(logits, labels, reduction="none"))


def test_bfloat16_logits_give_float32_losses():
    """A softmax over a vocabulary in bfloat16 is too inaccurate for the loss."""
    assert (
        per_sequence_loss(torch.randn(2, 4, 7).bfloat16(), torch.zeros(2, 4, dtype=torch.int64)).dtype == torch.float32
    )


@pytest.mark.parametrize(
    ("loss", "logits", "labels"),
    [
        (per_sequence_loss, (2, 4, 7), (2, 5)),
        (per_sequence_loss, (2, 7), (2,)),
        (seq2seq_loss, (2, 4, 7), (2,)),
        (classification_loss, (2, 7), (2, 1)),
        (classification_loss, (2, 4, 7), (2,)),
        # Positions of first and last token, as transformers takes them, are not labels of tokens.
        (lambda logits, labels: span_loss(logits, logits, labels), (2, 3), (2, 2)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(loss, logits, labels):
    """Broadcasting would mix rows."""
    with pytest.raises(ValueError, match=r"labels .*, got"):
        loss(torch.zeros(logits), torch.zeros(labels, dtype=torch.int64))


@pytest.mark.parametrize("chunk", [1, 20, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_in_chunks_is_pytorchs(monkeypatch, dtype, chunk):
    """Loss and gradient equal those of the whole float32 logits, for every chunk size."""
    monkeypatch.setattr("dpllm.models.losses.CHUNK_ENTRIES", chunk)
    labels = torch.randint(0, 7, (3, 6))
    labels[0, 2:4] = labels[2, 1:] = -100
    logits = (3 * torch.randn(3, 6, 7)).to(dtype).requires_grad_()
    factor = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    losses = per_sequence_loss(logits, labels)
    (grad,) = torch.autograd.grad(losses, logits, factor.to(losses.dtype))

    exact = logits.detach().double().requires_grad_()
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    loss_BT = F.cross_entropy(exact.mT, shifted, reduction="none", ignore_index=-100)
    expected = loss_BT.sum(1) / (shifted != -100).sum(1).clamp_min(1)
    (expected_grad,) = torch.autograd.grad(expected, exact, factor)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert grad.dtype == dtype
    rounding = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(grad.double(), expected_grad, rtol=rounding, atol=rounding)


def test_logits_never_stand_whole_in_float32(monkeypatch):
    """Nor their softmax: the largest float32 tensor of forward and backward is a chunk, for bfloat16 logits."""

    class Largest(TorchDispatchMode):
        entries = 0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            result = operation(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                self.entries = max(self.entries, result.numel())
            return result

    monkeypatch.setattr("dpllm.models.losses.CHUNK_ENTRIES", 4 * 50)
    logits = torch.randn(2, 30, 50).bfloat16().requires_grad_()
    with Largest() as largest:
        per_sequence_loss(logits, torch.randint(0, 50, (2, 30))).sum().backward()
    assert 0 < largest.entries <= 4 * 50 < logits.numel()
    assert logits.grad.dtype == torch.bfloat16


def test_a_target_outside_the_vocabulary_is_an_error():
    """As in PyTorch: it is not treated as another token."""
    with pytest.raises((IndexError, RuntimeError), match="index 7"):
        per_sequence_loss(torch.zeros(1, 3, 7), torch.tensor([[1, 7, 2]]))


@pytest.mark.parametrize("label", [-1, -99, -101, 7, 1 << 40])
def test_labels_that_are_no_tokens_are_an_error(label):
    """Only -100 marks a place without a target."""
    with pytest.raises((IndexError, RuntimeError), match=f"index {label} is out of bounds"):
        seq2seq_loss(torch.zeros(1, 3, 7), torch.tensor([[1, label, 2]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_without_a_target_may_be_anything(dtype, value):
    """Their loss and gradient are 0, and those of the other places are as without them."""
    logits, labels = torch.randn(2, 3, 5).to(dtype), torch.randint(0, 5, (2, 3))
    labels[0, 1] = labels[1, 2] = -100
    found = []
    for place in (0.0, value):
        logits[0, 1], logits[1, 2, 3] = place, place
        own = logits.clone().requires_grad_()
        losses = seq2seq_loss(own, labels)
        found.append((losses.detach(), *torch.autograd.grad(losses.sum(), own)))
    assert all(map(torch.equal, *found))
    assert not found[1][1][labels == -100].any()


def test_logits_in_other_strides_have_the_same_losses_and_gradients():
    """Transposed, every second entry, or one row for all."""
    labels = torch.randint(0, 7, (2, 4))
    for logits in (
        torch.randn(7, 4, 2, dtype=torch.float64).permute(2, 1, 0),
        torch.randn(2, 4, 14, dtype=torch.float64)[..., ::2],
        torch.randn(1, 1, 7, dtype=torch.float64).expand(2, 4, 7),
    ):
        found = []
        for own in (logits.detach(), logits.detach().clone(memory_format=torch.contiguous_format)):
            losses = seq2seq_loss(own.requires_grad_(), labels)
            found.append((losses.detach(), *torch.autograd.grad(losses.sum(), own)))
        assert all(map(torch.equal, *found))


def test_no_rows_have_no_losses():
    """Forward and backward."""
    logits = torch.zeros(0, 4, 7, requires_grad=True)
    losses = per_sequence_loss(logits, torch.zeros(0, 4, dtype=torch.int64))
    losses.sum().backward()
    assert losses.shape == (0,) and logits.grad.shape == logits.shape


def test_logits_that_change_before_the_backward_pass_are_an_error():
    """And a derivative of the gradient is one."""
    logits, labels = torch.randn(2, 4, 7, requires_grad=True), torch.randint(0, 7, (2, 4))
    changed = logits * 1
    losses = seq2seq_loss(changed, labels)
    changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        losses.sum().backward()
    (grad,) = torch.autograd.grad(seq2seq_loss(logits, labels).sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match=r"does not require grad|differentiate twice"):
        grad.square().sum().backward()


@kills(
    "the loss of an answer includes padding",
    "dpllm/models/losses.py",
    "logits_BT.masked_fill(~own_BT, torch.finfo(logits_BT.dtype).min).log_softmax(1)",
    "logits_BT.log_softmax(1)",
)
def test_the_loss_of_an_answer_ignores_padding():
    """The softmax of transformers' heads includes it; here a row's loss is that of the row alone."""
    start, end = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    labels = torch.tensor([[0, -100, START, 0, END, 0], [0, START + END, 0, -100, -100, -100], [-100] * 6])
    start.requires_grad_()
    losses = span_loss(start, end, labels)
    expected = []
    for row, (first, last) in enumerate(((2, 4), (1, 1))):
        own = labels[row] != -100
        parts = [(start[row][own], first), (end[row][own], last)]
        places = [int(own[:place].sum()) for _, place in parts]
        pairs = zip([scores for scores, _ in parts], places, strict=True)
        expected.append(sum(-scores.log_softmax(0)[place] for scores, place in pairs) / 2)
    torch.testing.assert_close(losses[:2], torch.stack(expected))
    assert float(losses[2].detach()) == 0
    losses.sum().backward()
    assert not start.grad[labels == -100].any() and start.grad[0, 2] < 0


def test_a_regression_is_averaged_over_its_own_values():
    """One value or several; a label per row may leave the last dimension out."""
    logits, labels = torch.randn(3, 2), torch.randn(3, 2)
    expected = torch.stack([F.mse_loss(*pair) for pair in zip(logits, labels, strict=True)])
    torch.testing.assert_close(regression_loss(logits, labels), expected)
    torch.testing.assert_close(regression_loss(logits[:, :1], labels[:, 0]), (logits[:, 0] - labels[:, 0]) ** 2)


def test_several_classes_of_a_row_are_averaged_within_it():
    """Binary cross-entropy of each class."""
    logits, labels = torch.randn(3, 4), torch.randint(0, 2, (3, 4)).float()
    pairs = zip(logits, labels, strict=True)
    expected = torch.stack([F.binary_cross_entropy_with_logits(*pair) for pair in pairs])
    torch.testing.assert_close(multi_label_loss(logits, labels), expected)


def test_classes_of_tokens_are_averaged_over_the_labelled_tokens_of_a_row():
    """Not shifted, and not over the batch."""
    logits, labels = torch.randn(2, 5, 3), torch.randint(0, 3, (2, 5))
    labels[1, 1:] = -100
    pairs = zip(logits, labels, strict=True)
    torch.testing.assert_close(
        token_classification_loss(logits, labels), torch.stack([F.cross_entropy(*pair) for pair in pairs])
    )


@kills(
    "labels that do not fit the outputs are broadcast over the rows",
    "dpllm/models/losses.py",
    "if logits.ndim != 2 or labels.shape != logits.shape:",
    "if logits.ndim != 2:",
)
@pytest.mark.parametrize("loss", [regression_loss, multi_label_loss])
def test_labels_of_another_shape_than_the_outputs_are_refused(loss):
    """They would be broadcast over the rows."""
    with pytest.raises(ValueError, match="logits and labels"):
        loss(torch.zeros(2, 3), torch.zeros(2, 1))
