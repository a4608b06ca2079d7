"""On any device, the words are those of the standard and the numbers those of the CPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpllm.mechanism import chacha20
from dpllm.mechanism.chacha20 import (
    ChaCha20Normals,
    DeviceNormals,
    box_muller,
    device_box_muller,
    device_keystream,
    keystream,
    require_known_words,
)
from dpllm.mechanism.generators import normals_from

CPU = torch.device("cpu")
KEY = bytes(range(32))
STATE = bytes.fromhex("000000090000004a00000000")


def bytes_of(words):
    """The bytes of blocks (16, n), each block's words together."""
    return words.T.contiguous().numpy().tobytes()


def test_a_block_is_that_of_the_standard():
    """RFC 8439, section 2.3.2."""
    assert bytes_of(device_keystream(KEY, STATE, 1, 1, CPU)).hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@pytest.mark.parametrize(("counter", "blocks"), [(0, 1000), (2**31 - 2, 5), (2**32 - 3, 3), (7, 0)])
def test_words_are_those_of_the_cpu(counter, blocks):
    """With random keys, also where a signed counter would overflow and at the last block."""
    random = np.random.default_rng(counter)
    key, nonce = random.bytes(32), random.bytes(12)
    expected = keystream(key, nonce, counter, blocks)
    assert bytes_of(device_keystream(key, nonce, counter, blocks, CPU)) == expected.tobytes()


def test_the_counter_does_not_begin_again():
    """The same refusals as on the CPU."""
    with pytest.raises(ValueError, match="repeat"):
        device_keystream(KEY, STATE, 2**32 - 5, 6, CPU)
    with pytest.raises(ValueError, match="got 31 and 12"):
        device_keystream(KEY[1:], STATE, 0, 1, CPU)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_numbers_are_those_of_the_cpu(dtype, bound, monkeypatch):
    """In the same order, from the same words, in parts of any size; a second draw goes on after the first."""
    monkeypatch.setattr(chacha20, "_DEVICE_BLOCKS_AT_A_TIME", 7)
    device, cpu = DeviceNormals(KEY, CPU), ChaCha20Normals(KEY)
    for size in (13, 0, 1000):
        found = device.standard_normal(size, dtype)
        assert found.dtype == dtype and found.shape == (size,)
        expected = cpu.standard_normal(size, np.float64)
        np.testing.assert_allclose(found.double().numpy(), expected, rtol=bound, atol=bound)


def test_the_extremes_of_the_bits_are_those_of_the_cpu():
    """All zeros, all ones, and only the sign's bit, in every word: no overflow, and no sign where there is none."""
    words = np.stack([np.full(16, word, np.uint32) for word in (0, 2**32 - 1, 2**31, 2**31 - 1)])
    words[2:, ::2] = 0
    expected = np.empty((4, 8))
    box_muller(words, expected)
    found = torch.empty(4, 8, dtype=torch.float64)
    device_box_muller(torch.from_numpy(words.view(np.int32).T.copy()), found)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-14, atol=1e-14)


def test_a_gradient_on_a_gpu_gets_its_numbers_there():
    """And they are those that the CPU would draw from the same entropy."""
    on_device = SimpleNamespace(is_cuda=True, device=CPU, dtype=torch.float32)
    draw = normals_from(KEY, "chacha20", on_device)
    expected = ChaCha20Normals(KEY).standard_normal(116)
    first, second = draw(torch.zeros(10, 10)), draw(torch.zeros(4))
    torch.testing.assert_close(first, torch.from_numpy(expected[:100]))
    torch.testing.assert_close(second, torch.from_numpy(expected[104:108]))


def test_a_device_that_computes_other_words_is_refused(monkeypatch):
    """A wrong shift would be noise that nobody has examined."""
    require_known_words.cache_clear()
    require_known_words(CPU)
    require_known_words.cache_clear()
    monkeypatch.setattr(chacha20, "_shift", lambda rows, direction: None)
    with pytest.raises(RuntimeError, match="ChaCha20"):
        DeviceNormals(KEY, CPU)
    monkeypatch.undo()
    require_known_words(CPU)
