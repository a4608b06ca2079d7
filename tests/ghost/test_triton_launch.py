"""The fused kernels equal the PyTorch functions and the float64 definition; where they cannot run, PyTorch does.

Without a CUDA device they run in Triton's CPU interpreter (`tests.conftest`).
"""

import importlib.util
import sys
import types
import warnings

import pytest
import torch

from dpllm import GhostClipper
from dpllm.ghost import NormMethod, kernels, triton_launch
from dpllm.ghost.triton_programs import Tile
from tests import children
from tests.mutations import kills

needs_triton = pytest.mark.skipif(
    not triton_launch.available(),
    reason="Triton is not installed, or was imported without TRITON_INTERPRET=1 on a machine without CUDA",
)
of_numpy = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # under the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One token; fewer than a tile; several tiles; widths that divide by nothing, with several gradients at one input.
GRAM_SHAPES = [
    (1, 1, 1, (1,)),
    (3, 1, 48, (80,)),
    (2, 17, 48, (80, 5, 33)),
    (2, 65, 33, (16, 7)),
    (1, 150, 20, (3,)),
]
MATRIX_SHAPES = [(1, 1, 1, 1), (2, 1, 48, 80), (3, 17, 80, 48), (1, 200, 3, 70)]


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def rounding(dtype):
    """Tolerance against float64: inputs are exact, so only the float32 accumulation counts."""
    return 1e-5 if dtype == torch.float32 else 1e-3


def instance_of(a, g):
    """The gradient of each row in float64."""
    return torch.einsum("btd,btp->bdp", a.double(), g.double())


def exact_norms(a, *grads):
    return sum(instance_of(a, g).square().sum((1, 2)) for g in grads)


def gram_norms(a, grads):
    """Norms and masses of layers that read one input."""
    sq_norm, mass = triton_launch.grouped_gram_norms([(a, grads)])
    return sq_norm[0], mass[0]


def assert_close(actual, expected, rtol, atol=0.0):
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


# ----------------------------------------------------------------------- norms


@kills(
    "the kernels read the memory behind a number that was expanded",
    "dpllm/ghost/triton_launch.py",
    "x.stride(-1) != 1",
    "x.stride(-1) > 1",
)
@kills(
    "the last token of a row is counted again for each place that is left in its tile",
    "dpllm/ghost/triton_programs.py",
    "    gram_ST = tl.where((block_T[:, None] < tokens - s) & (block_T[None, :] < tokens - t), gram_ST, 0.0)\n",
    "",
)
@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "tokens", "width", "grad_widths"), GRAM_SHAPES)
def test_gram_norms_equal_definition_and_pytorch_form(dtype, rows, tokens, width, grad_widths):
    """Norm and mass, of any number of layers on one input."""
    a = randn(rows, tokens, width, dtype=dtype)
    grads = [randn(rows, tokens, p, dtype=dtype) for p in grad_widths]
    sq_norm, mass = gram_norms(a, grads)
    assert_close(sq_norm, exact_norms(a, *grads), rounding(dtype))
    assert_close(mass, kernels.gram_norms(a, grads)[1], rounding(dtype))
    assert sq_norm.shape == mass.shape == (rows,)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "tokens", "left", "right"), MATRIX_SHAPES)
def test_instance_norms_equal_the_definition(dtype, rows, tokens, left, right):
    """The squared norm of the gradient, of which no entry is written."""
    x, y = randn(rows, tokens, left, dtype=dtype), randn(rows, tokens, right, dtype=dtype)
    assert_close(triton_launch.instance_norms(x, y), exact_norms(x, y), rounding(dtype))


@needs_triton
def test_groups_in_one_launch_equal_single_launches():
    """Groups of different widths, numbers of gradients and layouts, each in its place of the result, bit by bit."""
    groups = [
        (randn(2, 70, 24), [randn(2, 70, 8)]),
        (randn(2, 70, 48), [randn(2, 70, 80), randn(2, 70, 33)]),
        (randn(70, 2, 16).transpose(0, 1), [randn(2, 90, 70).mT, randn(2, 70, 5), randn(2, 70, 1)]),
        (randn(2, 9, 16), [randn(2, 9, 16)]),
        (randn(2, 70, 16), [randn(2, 70, 16)]),
    ]
    sq_norm, mass = triton_launch.grouped_gram_norms(groups)
    assert sq_norm.shape == mass.shape == (5, 2)
    for i, (a, grads) in enumerate(groups):
        assert_close(sq_norm[i], exact_norms(a, *grads), 1e-5)
        for together, single in zip((sq_norm[i], mass[i]), gram_norms(a, grads), strict=True):
            assert torch.equal(together, single)


@needs_triton
@pytest.mark.parametrize("block", [None, 16, 32])
def test_norms_depend_neither_on_chunks_nor_on_tiles(monkeypatch, block):
    """Long sums are split, also with a short last part; every pair of tiles is visited once."""
    a, g = randn(2, 83, 150), randn(2, 83, 130)
    mass = kernels.gram_norms(a, [g])[1]
    monkeypatch.setattr(triton_launch, "CHUNK", 64)
    if block:
        monkeypatch.setattr(triton_launch, "tile_of", lambda *_: Tile(block, 16, 4, 1))
    for actual, expected in zip(gram_norms(a, [g]), (exact_norms(a, g), mass), strict=True):
        assert_close(actual, expected, 1e-5)
    assert_close(triton_launch.instance_norms(a, g), exact_norms(a, g), 1e-5)


@needs_triton
def test_mass_bounds_the_rounding_of_cancelling_tokens():
    """Two tokens that cancel: the norm is tiny, the mass is not, and the error stays within the slack it scales."""
    a, g = randn(1, 1, 40).expand(1, 2, 40), randn(1, 1, 30)
    g = torch.cat([g, -g * (1 + 1e-4)], 1)
    sq_norm, mass = gram_norms(a, [g])
    exact = float(exact_norms(a, g))
    assert float(mass) > 1e6 * exact
    assert abs(float(sq_norm) - exact) <= kernels.rounding_slack(torch.float32) * float(mass)


@needs_triton
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mass_covers_products_that_underflow(dtype, tokens):
    """Squares of short inputs are 0 in float32; the output gradients are long, and so is the gradient."""
    a, g = (1e-24 * torch.rand(1, tokens, 40)).to(DEVICE, dtype), (1e18 * torch.rand(1, tokens, 30)).to(DEVICE, dtype)
    for norms in (gram_norms, kernels.gram_norms):
        for factors in ((a, g), (g, a)):
            sq_norm, mass = norms(factors[0], [factors[1]])
            assert float(exact_norms(a, g)) - float(sq_norm) <= kernels.rounding_slack(dtype) * float(mass)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_has_norm_zero(dtype):
    """A row of zero gradients gives exactly zero in every kernel, next to a row that does not."""
    a, g = randn(2, 17, 48, dtype=dtype), randn(2, 17, 80, dtype=dtype)
    g[0] = 0
    sq_norm, mass = gram_norms(a, [g, g])
    index, unit = torch.zeros(2, 17, dtype=torch.long, device=DEVICE), torch.arange(2, device=DEVICE)
    assert mass[0] < 1e-18 < mass[1]
    looked_up = triton_launch.lookup_norms(index, g, unit, 2, 3)
    for value in (sq_norm, triton_launch.instance_norms(a, g), looked_up):
        assert value[0] == 0 < value[1]


@needs_triton
@of_numpy
def test_a_row_that_is_not_finite_stays_by_itself():
    """Infinity or NaN appears only in the norm of its own row, which is then dropped."""
    a, g = randn(3, 20, 10), randn(3, 20, 12)
    g[1, 19, 3], g[2, 0, 0] = float("inf"), float("nan")
    sq_norm, mass = gram_norms(a, [g])
    assert not mass[1:].isfinite().any()
    for norms in (sq_norm, triton_launch.instance_norms(a, g)):
        assert norms.isfinite().tolist() == [True, False, False]


@needs_triton
def test_gram_and_instance_agree_on_mixed_dtypes():
    """Input and output gradient may differ in dtype, as under autocast."""
    a, g = randn(2, 17, 10, dtype=torch.bfloat16), randn(2, 17, 12)
    assert_close(gram_norms(a, [g])[0], exact_norms(a, g), 1e-5)
    assert_close(triton_launch.instance_norms(a, g), exact_norms(a, g), 1e-5)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("units", "tokens", "width", "entries"),
    [
        ([0], 1, 1, 1),
        ([0, 1], 17, 80, 5),
        ([2, 0, 2], 9, 48, 7),  # several rows of a unit, and a unit without rows
        ([1, -1, 0, -1], 6, 10, 3),  # padding rows
        ([-1, -1], 4, 3, 3),
        ([0, 0], 30, 4, 1),  # one token throughout
        ([0, 1], 3, 600, 1000),  # wider than one tile
    ],
)
def test_lookup_norms_equal_the_definition(dtype, units, tokens, width, entries):
    """Equal tokens of a unit add up before they are squared, over all of its rows."""
    unit, num_units = torch.tensor(units, device=DEVICE), max(3, max(units) + 1)
    index = torch.randint(0, entries, (len(units), tokens), device=DEVICE)
    right = randn(len(units), tokens, width, dtype=dtype)
    table = torch.zeros(num_units + 1, entries, width, dtype=torch.float64, device=DEVICE)  # the last unit: padding
    table.index_put_((unit[:, None].expand_as(index), index), right.double(), accumulate=True)
    actual = triton_launch.lookup_norms(index, right, unit, num_units, entries)
    assert_close(actual, table[:-1].square().sum((1, 2)), rounding(dtype))


# ---------------------------------------------------------------- weighted sum


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "tokens", "left", "right"), [*MATRIX_SHAPES, (2, 33, 150, 140), (3, 5, 600, 20), (0, 9, 70, 40)]
)
def test_weighted_sums_equal_the_definition(dtype, rows, tokens, left, right):
    """The factor is not rounded to the inputs' 16 bits, and the earlier value of the total is kept."""
    x, y = randn(rows, tokens, left, dtype=dtype), randn(rows, tokens, right, dtype=dtype)
    factor, start = torch.rand(rows, device=DEVICE), randn(left, right)
    sums = torch.einsum("b,blr->lr", factor.double(), instance_of(x, y))
    total, begun = start.clone(), torch.full_like(start, torch.nan)
    triton_launch.weighted_outer_(total, total, x, y, factor)
    triton_launch.weighted_outer_(begun, None, x, y, factor)
    assert_close(total, start.double() + sums, 1e-5, atol=1e-4)
    assert_close(begun, sums, 1e-5, atol=1e-4)
    # The start is the noise: it is scaled with the sum, in float32, and the result is rounded once.
    gradient, before = torch.full((left, right), torch.nan, device=DEVICE, dtype=dtype), start.clone()
    triton_launch.weighted_outer_(gradient, start, x, y, factor, scale=1 / 7)
    # The interpreter cuts bfloat16 off, a GPU rounds to nearest.
    tolerance = {"rtol": max(torch.finfo(dtype).eps, 1e-5), "atol": 1e-5}
    torch.testing.assert_close(gradient.double(), (start.double() + sums) / 7, **tolerance)
    assert torch.equal(start, before)


@needs_triton
@of_numpy
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_rows_with_factor_0_contribute_nothing(value):
    """Neither 0 * inf nor the rows before and after; the host does not know which they are."""
    x, y = randn(4, 20, 40), randn(4, 20, 33)
    x[0], y[2] = value, -value
    total = torch.zeros(40, 33, device=DEVICE)
    triton_launch.weighted_outer_(total, None, x, y, torch.tensor([0.0, 0.5, 0.0, 2.0], device=DEVICE))
    assert_close(total, 0.5 * instance_of(x, y)[1] + 2 * instance_of(x, y)[3], 1e-5, atol=1e-4)
    triton_launch.weighted_outer_(total, None, x, y, torch.zeros(4, device=DEVICE))
    assert not total.any()


@needs_triton
def test_weighted_sums_take_any_layout(monkeypatch):
    """Transposed inputs and totals are read and written in place; long rows are processed in chunks."""
    monkeypatch.setattr(triton_launch, "CHUNK", 64)
    x, y = randn(20, 150, 2).permute(2, 1, 0), randn(2, 9, 150).mT
    total = torch.ones(9, 20, device=DEVICE).mT
    triton_launch.weighted_outer_(total, total, x, y, torch.tensor([1.0, -2.0], device=DEVICE))
    assert_close(total - 1, instance_of(x, y)[0] - 2 * instance_of(x, y)[1], 1e-5, atol=1e-4)


# --------------------------------------------------------------------- strides


@needs_triton
def test_no_layout_needs_a_copy():
    """Slices of tokens and widths, transposed and expanded tensors give the results of their contiguous copies."""
    a = randn(4, 40, 30)[::2, 3:24, 5:22]
    g = randn(21, 2, 26).transpose(0, 1)
    columns = randn(2, 19, 21).mT  # the last dimension is not the contiguous one
    shared = randn(1, 21, 17).expand(2, -1, -1)
    assert not any(x.is_contiguous() for x in (a, g, columns, shared))
    index, unit = torch.randint(0, 4, (2, 21), device=DEVICE), torch.arange(2, device=DEVICE)
    for x, grads in ((a, [g, columns]), (shared, [g])):
        copies = [grad.contiguous() for grad in grads]
        for actual, expected in zip(gram_norms(x, grads), gram_norms(x.contiguous(), copies), strict=True):
            assert torch.equal(actual, expected)
        for grad, copy in zip(grads, copies, strict=True):
            assert torch.equal(triton_launch.instance_norms(grad, x), triton_launch.instance_norms(copy, x.clone()))
            actual, expected = (triton_launch.lookup_norms(index, y, unit, 2, 4) for y in (grad, copy))
            assert torch.equal(actual, expected)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_nothing_behind_an_expanded_number_is_read(tokens, dtype):
    """As in the gradient of a sum over the features of a single row, or over slices of aligned memory."""
    x = randn(1, tokens, 32, dtype=dtype)
    memory = torch.full((1, tokens, 64), torch.nan, device=DEVICE, dtype=dtype)
    memory[:, :, 0] = 0.5
    for g in (memory[:, :1, :1].expand(1, tokens, 32), memory[:, :, :1].expand(1, tokens, 32)):
        assert g.stride(-1) == 0
        for norms in (gram_norms(x, [g])[0], gram_norms(g, [x])[0]):
            assert_close(norms, exact_norms(x, g), 1e-3)
        assert_close(triton_launch.instance_norms(x, g), exact_norms(x, g), 1e-3)
        total = torch.empty(32, 32, device=DEVICE)
        triton_launch.weighted_outer_(total, None, x, g, torch.ones(1, device=DEVICE))
        assert_close(total, instance_of(x, g)[0], 1e-3, 1e-3)
        index, unit = torch.zeros(1, tokens, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int64)
        looked_up = triton_launch.lookup_norms(index, g, unit.to(DEVICE), 1, 4)
        assert_close(looked_up, g.double().sum(1).square().sum(1), 1e-3)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_over_features_as_a_loss_is_clipped_by_its_norm(dtype):
    """Its gradient is one number, expanded: the norm came from the memory behind it, whatever was there."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 32, bias=False, device=DEVICE).to(dtype)
    clipper = GhostClipper(layer, 1.0, NormMethod("gram", fused=True))
    x = randn(1, 4, 16, dtype=dtype)
    result = clipper.backward(layer(x).sum((1, 2)))
    clipper.remove()
    torch.testing.assert_close(result.norms.double(), 32**0.5 * x.double().sum(1).norm(dim=1), rtol=1e-3, atol=0)
    assert 0.999 <= float(layer.weight.grad.double().norm()) <= 1


@needs_triton
def test_equal_inputs_give_equal_bits():
    """No sum depends on which program finishes first."""
    a, g = randn(2, 70, 20, dtype=torch.bfloat16), randn(2, 70, 24, dtype=torch.bfloat16)
    index, unit = torch.randint(0, 4, (2, 70), device=DEVICE), torch.arange(2, device=DEVICE)
    for run in (
        lambda: gram_norms(a, [g])[0],
        lambda: triton_launch.instance_norms(a, g),
        lambda: triton_launch.lookup_norms(index, g, unit, 2, 4),
    ):
        assert torch.equal(run(), run())


# ------------------------------------------------------------ nothing, refusals


@needs_triton
def test_nothing_has_norm_zero():
    """No rows, no tokens or no width: zeros of the right shape."""
    index, unit = torch.zeros(2, 0, dtype=torch.long, device=DEVICE), torch.arange(2, device=DEVICE)
    for norms in (
        gram_norms(randn(2, 0, 4), [randn(2, 0, 4)])[0],
        triton_launch.instance_norms(randn(2, 3, 0), randn(2, 3, 4)),
        triton_launch.lookup_norms(index, randn(2, 0, 4), unit, 2, 5),
    ):
        assert torch.equal(norms, torch.zeros(2, device=DEVICE))
    assert gram_norms(randn(0, 3, 4), [randn(0, 3, 4)])[0].shape == (0,)
    assert triton_launch.instance_norms(randn(0, 3, 4), randn(0, 3, 4)).shape == (0,)


@needs_triton
@pytest.mark.parametrize(
    "call",
    [
        lambda a, g: gram_norms(a, [g, randn(2, 4, 5)]),
        lambda a, g: gram_norms(a, []),
        lambda a, g: triton_launch.instance_norms(a, randn(1, 3, 5)),
        lambda a, g: triton_launch.instance_norms(a.double(), g.double()),
        lambda a, g: triton_launch.instance_norms(a, g.to("meta")),
        lambda a, g: triton_launch.lookup_norms(torch.zeros(2, 4).long(), g, torch.arange(2), 2, 5),
        lambda a, g: triton_launch.weighted_outer_(randn(4, 5), randn(5, 4), a, g, randn(2)),
        lambda a, g: triton_launch.weighted_outer_(randn(5, 4), randn(4, 5), a, g, randn(2)),
        lambda a, g: triton_launch.weighted_outer_(randn(4, 5), randn(5, 4).mT, a, g, randn(2)),
        lambda a, g: triton_launch.weighted_outer_(randn(4, 5), None, a, g, randn(3)),
    ],
)
def test_what_does_not_fit_is_refused(call):
    """A kernel reads at the addresses given by strides: shapes, dtypes, devices and layouts are checked before."""
    with pytest.raises(ValueError, match=r"_norms|weighted_outer_"):
        call(randn(2, 3, 4), randn(2, 3, 5))


@needs_triton
def test_cpu_tensors_are_refused_where_kernels_run_on_a_device(monkeypatch):
    """Only the interpreter may read host memory."""
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr(triton_launch, "available", lambda: True)
    with pytest.raises(ValueError, match="cpu"):
        triton_launch.instance_norms(torch.ones(1, 1, 1), torch.ones(1, 1, 1))


# --------------------------------------------------- machines without the kernels


def test_the_package_works_without_triton():
    """Triton is optional: with its import blocked, the module loads, and a kernel refuses instead of failing inside."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from dpllm.ghost import triton_launch\n"
        "assert not triton_launch.available() and not triton_launch.INTERPRETED\n"
        "try:\n    triton_launch.instance_norms(torch.ones(1, 1, 1), torch.ones(1, 1, 1))\n"
        "except ValueError as error:\n    assert 'CUDA device' in str(error)\n"
        "else:\n    raise SystemExit('it ran')"
    )
    children.run([sys.executable, "-c", code])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_are_available_in_the_tests():
    """If Triton is installed, no test here is skipped because of the order of imports."""
    assert triton_launch.available()


TENSOR = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda", 0))


def fail(error):
    raise error


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of the present generation, on which no program has been compiled yet."""
    triton_launch.is_usable.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_launch, "available", lambda: True)
    yield monkeypatch
    triton_launch.is_usable.cache_clear()


def test_kernels_are_used_where_one_ran(gpu):
    """It is compiled and run once, not for each layer."""
    runs = []
    gpu.setattr(triton_launch, "probe", lambda device: runs.append(device) or 3.0)
    assert all(NormMethod().fuses(TENSOR, TENSOR) for _ in range(3)) and runs == [TENSOR.device]


@pytest.mark.parametrize("error", [RuntimeError("Failed to find C compiler.\nMore."), OSError("read-only"), None])
def test_a_program_that_fails_is_reported_once(gpu, error):
    """A compiler's error or a wrong result: later layers use the PyTorch functions without a warning."""
    gpu.setattr(triton_launch, "probe", lambda device: fail(error) if error else float("nan"))
    reason = str(error).splitlines()[0] if error else "nan"
    with pytest.warns(UserWarning, match=rf"cuda:0.*{reason}"):
        assert not NormMethod().fuses(TENSOR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not NormMethod().fuses(TENSOR)
        assert NormMethod(fused=True).fuses(TENSOR), "asked for: the error of the compiler is then raised"


def test_an_old_gpu_is_not_compiled_for(gpu):
    """Turing takes up to 43 seconds a program, which then spills kilobytes."""
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    gpu.setattr(triton_launch, "probe", lambda device: pytest.fail("compiled"))
    with pytest.warns(UserWarning, match=r"7\.5"):
        assert not NormMethod().fuses(TENSOR)


def test_a_lack_of_memory_is_no_verdict(gpu):
    """The caller frees memory and tries again, as for any other operation."""
    gpu.setattr(triton_launch, "probe", lambda device: fail(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        NormMethod().fuses(TENSOR)
    gpu.setattr(triton_launch, "probe", lambda device: 3.0)
    assert NormMethod().fuses(TENSOR)


@pytest.mark.skipif(not triton_launch.INTERPRETED, reason="no interpreter")
def test_the_smallest_program_returns_what_is_expected_of_it(gpu):
    """The probe's own program and expectation agree."""
    assert triton_launch.is_usable(torch.device("cpu"))
