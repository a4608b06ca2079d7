"""Checksums of tensors: every bit counts, wherever it is."""

import itertools

import pytest
import torch

from dpllm.engines.checksums import Checksum, placed_sum, values


def test_every_bit_counts_in_a_checksum():
    """Of all dtypes, of large tensors, in any position; equal tensors have equal checksums."""
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.complex64):
        tensor = (100 * torch.randn(5, 7, generator=generator)).clamp(min=0).to(dtype)
        first = Checksum([tensor]).value()
        assert first == Checksum([tensor.clone()]).value() and 0 <= first < 2**64
        for at in range(35):
            raw = tensor.clone()
            raw.view(-1)[at : at + 1].view(torch.uint8)[0] ^= 1
            assert Checksum([raw]).value() != first
        assert Checksum([tensor.flip(0)]).value() != first
    long = torch.zeros((1 << 22) + 5)
    sums = {Checksum([long]).value()}
    for at in (0, 1, (1 << 22) - 1, 1 << 22, (1 << 22) + 4):
        long.zero_()[at] = 1e-30
        sums.add(Checksum([long]).value())
    assert len(sums) == 6
    halves = [torch.ones(3), torch.zeros(3)]
    assert Checksum(halves).value() != Checksum(halves[::-1]).value()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("every", [1, 2, 4, 7])
def test_signs_that_change_in_several_places_count(dtype, every):
    """Highest bits of machine words cancel each other in pairs, for all odd multipliers."""
    tensor = torch.randn(56, generator=torch.Generator().manual_seed(1)).to(dtype)
    for first in range(every):
        changed = tensor.clone()
        changed[first::every] *= -1
        one, other = values([Checksum([tensor]), Checksum([changed])])
        assert one != other


def test_position_in_memory_and_strides_do_not_count():
    """A view of the same values has the same checksum; fewer values of the same kind have another one."""
    whole = torch.arange(41, dtype=torch.float16)
    part = whole[1:]  # 2 bytes off the words of 4
    assert Checksum([part]).value() == Checksum([part.clone()]).value()
    square = torch.arange(36.0).view(6, 6)
    assert Checksum([square.T]).value() == Checksum([square.T.contiguous()]).value() != Checksum([square]).value()
    assert Checksum([torch.zeros(3)]).value() != Checksum([torch.zeros(4)]).value()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_placed_sums_of_fragments_add_up_to_that_of_the_whole(dtype):
    """However the entries are divided, also within a block; each entry, bit and order counts."""
    whole = torch.randn(70_001, dtype=dtype, generator=torch.Generator().manual_seed(0))
    due = placed_sum(whole, 0)
    for cuts in ([0, 70_001], [0, 1, 32_768, 32_769, 70_001], [0, 12_345, 70_001]):
        parts = [placed_sum(whole[first:last], first) for first, last in itertools.pairwise(cuts)]
        assert sum(parts) % 2**64 == due
    assert placed_sum(whole[:0], 5) == 0 and placed_sum(whole[1:], 0) != placed_sum(whole[1:], 1)
    found = {due}
    for at in (0, 1, 40_000, 70_000):
        for bit in (0, 31):
            changed = whole.clone()
            changed.view(torch.int32)[at * dtype.itemsize // 4] ^= -(2**31) if bit == 31 else 1
            found.add(placed_sum(changed, 0))
        swapped = whole.clone()
        swapped[at], swapped[(at + 7) % 70_001] = whole[(at + 7) % 70_001], whole[at]
        found.add(placed_sum(swapped, 0))
    assert len(found) == 1 + 4 * 3
