"""Checksums of tensors: every bit counts, wherever it is."""

import pytest
import torch

from dpllm.engines.checksums import Checksum, values


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
