"""The arithmetic: every product equals its float64 definition, and accumulates in float32."""

import pytest
import torch

from dpllm import GhostClipper
from dpllm.ghost import NormMethod, kernels
from tests.mutations import kills


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gram_norms_equal_the_norm_of_the_instance(dtype):
    """Several layers on one input: the sum of their squared gradient norms."""
    a = torch.randn(3, 7, 5).to(dtype)
    grads = [torch.randn(3, 7, 4).to(dtype), torch.randn(3, 7, 6).to(dtype)]
    sq_norm, mass = kernels.gram_norms(a, grads)
    expected = sum(torch.einsum("btd,btp->bdp", a.double(), g.double()).square().sum((1, 2)) for g in grads)
    torch.testing.assert_close(sq_norm.double(), expected, rtol=1e-5 if dtype != torch.float64 else 1e-12, atol=0)
    exact_mass = sum((a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1).square() for g in grads)
    assert (mass.double() >= exact_mass * (1 - 1e-5)).all()
    assert sq_norm.dtype == kernels.accumulation_dtype(dtype)


def test_gram_norms_do_not_depend_on_the_chunking(monkeypatch):
    """Rows are processed in chunks to bound memory."""
    a, g = torch.randn(5, 4, 3), torch.randn(5, 4, 2)
    whole = kernels.gram_norms(a, [g])
    monkeypatch.setattr(kernels, "_MAX_GRAM_ENTRIES", 16)
    for part, all_at_once in zip(kernels.gram_norms(a, [g]), whole, strict=True):
        torch.testing.assert_close(part, all_at_once)


def test_lookup_outer_inner_is_the_inner_product_of_the_gradients():
    """The tied head's cross term."""
    index, right = torch.randint(0, 9, (2, 5)), torch.randn(2, 5, 3, dtype=torch.float64)
    left2, right2 = torch.randn(2, 4, 9, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(index, 9).double()
    first = torch.einsum("btv,btr->bvr", one_hot, right)
    second = torch.einsum("btv,btr->bvr", left2, right2)
    torch.testing.assert_close(kernels.lookup_outer_inner(index, right, left2, right2), (first * second).sum((1, 2)))


@pytest.mark.parametrize("widths", [(3, 8), (8, 3)])
def test_weighted_outer_scales_in_the_accumulator(widths):
    """bfloat16 factors are scaled after their conversion: the sum equals the float64 one to float32 rounding."""
    left, right = torch.randn(4, 6, widths[0]).bfloat16(), torch.randn(4, 6, widths[1]).bfloat16()
    factor = torch.rand(4)
    total = torch.zeros(*widths)
    kernels.add_weighted_outer_(total, left, right, factor)
    expected = torch.einsum("b,btl,btr->lr", factor.double(), left.double(), right.double())
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_exact_matmul_overrides_and_restores_the_process_setting():
    """A user's TF32 or bfloat16 setting must not reach norms and sums."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with kernels.exact_matmul():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def through_the_newer_interface(precision):
    """As transformers' ``enable_tf32`` does, which ``TrainingArguments(tf32=True)`` calls."""
    torch.backends.fp32_precision = precision


def through_its_matmul_flags(precision):
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.mkldnn.matmul.fp32_precision = precision


def through_the_older_interface(precision):
    torch.set_float32_matmul_precision({"tf32": "high", "bf16": "medium", "ieee": "highest"}[precision])


def through_allow_tf32(precision):
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


WAYS = {
    "newer": [through_the_newer_interface],
    "flags": [through_its_matmul_flags],
    "older": [through_the_older_interface],
    "allow_tf32": [through_allow_tf32],
    "older, newer": [through_the_older_interface, through_the_newer_interface],
    "newer, older": [through_the_newer_interface, through_the_older_interface],
    "flags, allow_tf32": [through_its_matmul_flags, through_allow_tf32],
    "allow_tf32, flags": [through_allow_tf32, through_its_matmul_flags],
}


def flags():
    """Return all settings of float32 products; None where PyTorch raises an error."""
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = None
    backends = torch.backends
    newer = (backends, backends.cuda.matmul, backends.cudnn, backends.mkldnn, backends.mkldnn.matmul)
    return older, [flag.fp32_precision for flag in newer]


def reset_matmul_settings():
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for flag in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        flag.fp32_precision = "none"


@pytest.fixture
def matmul_settings():
    """The settings of a new process, before and after."""
    reset_matmul_settings()
    yield
    reset_matmul_settings()


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS.keys())
def test_a_step_works_after_tf32_was_set_by_any_interface(ways, matmul_settings):
    """Norms and sums are computed in float32, and afterwards every setting is restored."""
    net, x = torch.nn.Linear(300, 200), torch.randn(3, 5, 300)
    inside = []

    class Watching(NormMethod):
        def stacks(self, *args):
            inside.append([f.fp32_precision for f in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)])
            return super().stacks(*args)

    clipper = GhostClipper(net, 1e-3, Watching("gram"))
    norms = []
    for precision in ("ieee", "tf32"):
        for way in ways:
            way(precision)
        before = flags()
        norms.append(clipper.backward(net(x).sum((1, 2))).norms)
        assert flags() == before
    assert all(precision in ("ieee", "none") for pair in inside for precision in pair) and len(inside) == 3
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", ["cuda", "mkldnn"])
def test_the_setting_of_one_backend_is_overridden(backend, matmul_settings):
    """Each device reads its own setting, so one that rounds is enough."""
    setting = getattr(torch.backends, backend).matmul
    setting.fp32_precision = "tf32"
    with kernels.exact_matmul():
        assert setting.fp32_precision == "ieee"
    assert setting.fp32_precision == "tf32"


def test_a_setting_that_follows_the_general_one_still_does(matmul_settings):
    """If TF32 is switched off globally after a step, it is off for products, too."""
    torch.backends.fp32_precision = "tf32"
    with kernels.exact_matmul():
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


@kills(
    "norms and sums are rounded under autocast",
    "dpllm/ghost/kernels.py",
    "changed.enter_context(torch.autocast(device, enabled=False))",
    "pass",
)
def test_products_stay_in_float32_under_an_active_autocast():
    """A loop that clips inside torch.autocast must not round norms and sums to bfloat16."""
    left, right = torch.randn(3, 9, 8), torch.randn(3, 9, 5)
    expected = torch.bmm(left.double().mT, right.double()).square().sum((1, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16), kernels.exact_matmul():
        norms, _ = kernels.gram_norms(left, [right])
        total = torch.zeros(8, 5)
        kernels.add_weighted_outer_(total, left, right, torch.ones(3))
    torch.testing.assert_close(norms.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        total.double(), torch.einsum("btl,btr->lr", left.double(), right.double()), rtol=1e-4, atol=1e-5
    )


@kills("long norms are added up entry by entry", "dpllm/ghost/kernels.py", "    if whole == 0:", "    if True:")
@pytest.mark.parametrize("fill", ["constant", "normal", "sparse"])
@pytest.mark.parametrize("shape", [(1, 2048, 2048), (3, 517), (2, 64), (4, 1), (2, 0)], ids=str)
def test_squared_norms_of_long_rows(shape, fill):
    """In float32 they equal those of float64 to a millionth, for rows of any length."""
    x = torch.full(shape, 0.1) if fill == "constant" else torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if fill == "sparse":
        x = x * (x > 2)
    exact = x.double().flatten(1).square().sum(1)
    torch.testing.assert_close(kernels.squared_norms(x).double(), exact, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(4, 8, 14336, 4096), (8, 1, 14336, 4096), (8, 1, 300, 200), (2, 3, 513, 1025)], ids=str
)
def test_norms_of_numbers_of_one_sign_are_within_the_allowance(shape, dtype):
    """If all rounding errors have one sign, the norm with its slack and the factor's margin is still not too small."""
    rows, tokens, inputs, outputs = shape
    generator = torch.Generator().manual_seed(3)
    a = torch.rand(rows, tokens, inputs, generator=generator).to(dtype)
    g = torch.rand(rows, tokens, outputs, generator=generator).to(dtype)
    sq_norm_B, mass_B = kernels.gram_norms(a, [g])
    exact_B = (torch.bmm(a.double(), a.double().mT) * torch.bmm(g.double(), g.double().mT)).sum((1, 2))
    margin = 16 * torch.finfo(torch.float32).eps  # of `FlatClipping.factors`, squared
    upper_B = (sq_norm_B + kernels.rounding_slack(torch.float32) * mass_B).double() * (1 + margin)
    assert bool((upper_B >= exact_B).all())
    torch.testing.assert_close(sq_norm_B.double(), exact_B, rtol=3e-6, atol=0)
