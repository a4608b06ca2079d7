"""ChaCha20 is the cipher of its standard, and its normal numbers are those of Box and Muller."""

import math

import numpy as np
import pytest
from scipy import stats

from dpllm.mechanism import chacha20
from dpllm.mechanism.chacha20 import ChaCha20Normals, box_muller, keystream
from tests.mutations import kills

KEY = bytes(range(32))


def test_a_block_is_that_of_the_standard():
    """RFC 8439, section 2.3.2."""
    block = keystream(KEY, bytes.fromhex("000000090000004a00000000"), 1, 1)
    assert block.shape == (1, 16)
    assert block.tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_a_text_is_enciphered_as_in_the_standard():
    """RFC 8439, section 2.4.2: two blocks, the counter from 1 on."""
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would "
        b"be it."
    )
    words = keystream(KEY, bytes.fromhex("000000000000004a00000000"), 1, 2)
    found = bytes(a ^ b for a, b in zip(text, words.tobytes(), strict=False))
    assert found.hex() == (
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0b"
        "f91b65c5524733ab8f593dabcd62b3571639d624e65152ab8f530c359f0861d8"
        "07ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
        "5af90bbf74a35be6b40b8eedf2785e42874d"
    )


def test_blocks_are_numbered_up_to_the_last_one():
    """Blocks drawn together are those drawn one by one; after block 2^32 - 1 the stream would repeat."""
    whole = keystream(KEY, bytes(12), 2**32 - 5, 5)
    for block in range(5):
        np.testing.assert_array_equal(whole[block : block + 1], keystream(KEY, bytes(12), 2**32 - 5 + block, 1))
    assert len(np.unique(whole)) == whole.size
    assert keystream(KEY, bytes(12), 2**32, 0).shape == (0, 16)
    with pytest.raises(ValueError, match="repeat"):
        keystream(KEY, bytes(12), 2**32 - 5, 6)


@pytest.mark.parametrize(("key", "nonce"), [(31, 12), (33, 12), (32, 8), (32, 16)])
def test_a_key_or_nonce_of_another_length_is_refused(key, nonce):
    """It would be padded or cut by others."""
    with pytest.raises(ValueError, match=f"got {key} and {nonce}"):
        keystream(bytes(key), bytes(nonce), 0, 1)


def test_the_extremes_of_the_bits_are_finite():
    """All zeros are the largest number, all ones are 0; neither is infinite or undefined."""
    words = np.zeros((2, 16), np.uint32)
    words[1] = 2**32 - 1
    for dtype in (np.float64, np.float32):
        out = np.full((2, 8), np.nan, dtype)
        box_muller(words, out)
        assert np.isfinite(out).all()
        np.testing.assert_allclose(out[0, :4], math.sqrt(2 * 65 * math.log(2)), rtol=1e-6)  # 9.49
        np.testing.assert_allclose(out[0, 4:], 0, atol=1e-30)
        np.testing.assert_allclose(out[1], 0, atol=1e-30)


def test_numbers_are_those_of_box_and_muller():
    """From 64 bits for the radius and 64 for the angle, against the formula in whole numbers and float64."""
    words = np.random.default_rng(0).integers(0, 2**32, (200, 16), dtype=np.uint32)
    words[0, :8] = [1, 0, 2, 0, 0, 1, 0, 2**31]  # small radii's bits: the tail
    out = np.empty((200, 8))
    box_muller(words, out)
    for block, row in zip(words.tolist(), out, strict=True):
        for pair in range(4):
            low = sum(block[2 * pair + i] << (32 * i) for i in (0, 1))
            turn = sum(block[8 + 2 * pair + i] << (32 * i) for i in (0, 1))
            radius = math.sqrt(-2 * (math.log(2 * low + 1) - 65 * math.log(2)))
            angle = 2 * math.pi * (turn / 2**64)
            assert row[pair] == pytest.approx(radius * math.cos(angle), rel=1e-9, abs=1e-12)
            assert row[4 + pair] == pytest.approx(radius * math.sin(angle), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_numbers_are_normal_and_independent(dtype):
    """Kolmogorov-Smirnov, squares' chi-square, tails, and no correlation with the next 16 numbers or their squares."""
    drawn = ChaCha20Normals(KEY).standard_normal(400_000, dtype)
    assert drawn.dtype == dtype and drawn.shape == (400_000,)
    drawn = drawn.astype(np.float64)
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert stats.kstest(drawn * 1.02, "norm").pvalue < 1e-3  # the test sees two percent
    assert stats.kstest(drawn.reshape(-1, 8)[:, 5], "norm").pvalue > 1e-3  # a place within the block
    assert 1e-3 < stats.chi2.cdf((drawn**2).sum(), drawn.size) < 1 - 1e-3
    beyond = (np.abs(drawn) > 4).sum()
    assert 5 < beyond < 60  # 25.3 are expected
    for lag in (*range(1, 17), 32, 4096):
        for values in (drawn, drawn**2 - 1):
            z = (values[lag:] * values[:-lag]).mean() / (values.var() / math.sqrt(len(values) - lag))
            assert abs(z) < 4.5, (lag, z)


@kills(
    "ChaCha20 draws the same blocks again", "dpllm/mechanism/chacha20.py", "            self._block += len(part)\n", ""
)
def test_a_stream_goes_on_where_it_was_and_keys_are_independent():
    """Two draws of one key share no number; the numbers of two keys do not correlate."""
    stream = ChaCha20Normals(KEY)
    first, second = stream.standard_normal(13), stream.standard_normal(40_000)
    again = ChaCha20Normals(KEY).standard_normal(40_016)
    np.testing.assert_array_equal(first, again[:13])
    np.testing.assert_array_equal(second, again[16:])
    assert not set(first) & set(second[:20])
    other = ChaCha20Normals(bytes([1, *KEY[1:]])).standard_normal(40_000)
    assert abs(np.corrcoef(second, other)[0, 1]) < 5 / 200
    assert ChaCha20Normals(KEY).standard_normal(0).size == 0


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_draw_in_parts_is_the_same(blocks, monkeypatch):
    """The size of the parts is a matter of speed."""
    whole = ChaCha20Normals(KEY).standard_normal(100)
    monkeypatch.setattr(chacha20, "_BLOCKS_AT_A_TIME", blocks)
    np.testing.assert_allclose(ChaCha20Normals(KEY).standard_normal(100), whole, rtol=1e-6)
