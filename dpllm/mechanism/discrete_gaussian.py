"""Discrete Gaussian numbers, drawn exactly: every probability is the stated one, without rounding.

This is the level "discrete" of `privacy.randomness`.

The discrete Gaussian of parameter s gives each whole number x a probability proportional to exp(-x²/(2s²)) (Canonne,
Kamath, Steinke 2020, arXiv:2004.00010). Floating-point Gaussian numbers have gaps that depend on the underlying value,
through which an output can reveal its input (Mironov 2012, "On significance of the least significant bits for
differential privacy"). Whole numbers have no gaps.

**Algorithm.** Canonne, Kamath and Steinke's, with t = s = 2^k, for many numbers at once. All comparisons are between
whole numbers, so each coin has exactly its probability:

* Discrete Laplace of scale t (their Algorithm 2): U uniform on 0, ..., t - 1, kept with probability exp(-U/t); V
    geometric, P[V >= v] = exp(-v); |Y| = U + tV with a random sign, where "minus 0" is discarded.
* Rejection (their Algorithm 3): Y is kept with probability exp(-(|Y| - t)²/(2t²)). With | |Y| - t | = t a + F, where a
  is whole and 0 <= F <= t, this is exp(-a²/2) exp(-a F/t) exp(-F²/(2t²)): a product of independent coins.
* A coin of probability exp(-p), 0 <= p <= 1 (their Algorithm 1): toss coins of probability p/K for K = 1, 2, ... up to
  the first failure, and succeed if that K is odd. Here p is U/t, F/t or (F/t)²/2, and p/K is a product of coins: one
  of probability F/t is "a uniform k-bit number is less than F", one of probability 1/K is "a uniform number below K is
  0".
* exp(-v) and exp(-1/2) have no algorithm of their own: a uniform number of 64 bits is compared with the first 64 bits
  of the constant. If all 64 bits agree, as happens with probability 2^-64, the next bits decide; the constants are
  computed with whole numbers to as many bits as are needed.

The bits are the key stream of ChaCha20, so the numbers are exact if the cipher's bits are indistinguishable from random
ones. The time of a draw depends on the number of rejections, that is on the noise and not on the data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.chacha20 import keystream

DEVIATION_BITS = 40
"""The standard deviation of the noise is 2^k grid steps."""

_WORDS_OF_A_BLOCK = 8  # of 64 bits
_CANDIDATES_AT_A_TIME = 1 << 15  # whose arrays stay in a processor's cache
_BLOCKS_AT_A_TIME = 4096
_MOST_BITS = 40  # 24 bits of a word are left for a second coin
_SPARE = np.uint64((1 << 24) - 1)
_Words = NDArray[np.uint64]
_Mask = NDArray[np.bool_]


class DiscreteGaussians:
    """Draws discrete Gaussian numbers of parameter 2^k from one key.

    Guarantee: independent, and each x has a probability proportional to exp(-x²/2^(2k+1)), if the key is uniform and
    the cipher's bits are random.

    Args:
        key: 32 secret bytes that no other object uses.
        bits: k, from 0 to 40.

    Raises:
        ValueError: k is out of range.

    >>> drawn = DiscreteGaussians(bytes(32), bits=2).draw(5)
    >>> drawn.shape, drawn.dtype
    ((5,), dtype('int64'))
    """

    def __init__(self, key: bytes, bits: int = DEVIATION_BITS) -> None:
        """Begin with the first word of the key stream."""
        if not 0 <= bits <= _MOST_BITS:
            raise ValueError(
                f"the standard deviation is 2^k grid steps, and k is {bits}; k must be from 0 to {_MOST_BITS}"
            )
        self._bits, self._stream = bits, _Stream(key)

    def draw(self, size: int) -> NDArray[np.int64]:
        """Return (size,) numbers, independent of all numbers returned before.

        Raises:
            ValueError: the 2^35 words of the key are used up: after about 3 thousand million numbers.
        """
        drawn, done = np.empty(size, np.int64), 0
        while done < size:
            # A candidate is kept with probability 0.48.
            found = self._candidates(min(_CANDIDATES_AT_A_TIME, 16 + 9 * (size - done) // 4))[: size - done]
            drawn[done : done + len(found)] = found
            done += len(found)
        return drawn

    def _candidates(self, count: int) -> NDArray[np.int64]:
        """Return the accepted ones of ``count`` candidates."""
        stream, width = self._stream, np.uint64(1 << self._bits)
        words = stream.take(count)
        part = _upper(words, self._bits)  # U
        negative = (words & np.uint64(1)).astype(np.bool_)  # a bit that U does not have
        kept = _exp_coins(stream, self._bits, part)
        part, negative = part[kept], negative[kept]
        whole = _geometric(stream, len(part))  # V
        away = np.where(whole == 0, width - part, part)  # F
        times = np.maximum(whole, 1) - 1  # a
        kept = ~(negative & (whole == 0) & (part == 0))
        kept &= _half_square_coins(stream, self._bits, away)
        several = np.flatnonzero(times)
        kept[several] &= _far_coins(stream, self._bits, times[several], away[several])
        size = (part + width * whole.astype(np.uint64)).astype(np.int64)[kept]
        return np.where(negative[kept], -size, size)


class _Stream:
    """The words of a key, each returned once."""

    def __init__(self, key: bytes) -> None:
        self._key, self._block = key, 0
        self._words, self._used = np.empty(0, np.uint64), 0

    def take(self, count: int) -> _Words:
        """Return (count,) uniform numbers of 64 bits."""
        if self._used + count > len(self._words):  # the remaining words are not used
            blocks = max(_BLOCKS_AT_A_TIME, -(-count // _WORDS_OF_A_BLOCK))
            words = keystream(self._key, bytes(12), self._block, blocks)
            self._words, self._used, self._block = words.view(np.uint64).reshape(-1), 0, self._block + blocks
        self._used += count
        return self._words[self._used - count : self._used]

    def below(self, limit: int, words: _Words) -> _Mask:
        """Return coins of probability 1/limit from the low 24 bits of words, redrawn if they are inconclusive."""
        spare = words & _SPARE
        even = np.uint64((1 << 24) // limit * limit)
        again = np.flatnonzero(spare >= even)
        while len(again):
            spare[again] = self.take(len(again)) & _SPARE
            again = again[spare[again] >= even]
        coins: _Mask = spare % np.uint64(limit) == 0
        return coins


def _upper(words: _Words, bits: int) -> _Words:
    """Return the uniform numbers of k bits in the upper bits of words; the low 24 bits are not used."""
    return words >> np.uint64(64 - bits) if bits else np.zeros_like(words)


def _exp_coins(stream: _Stream, bits: int, part: _Words) -> _Mask:
    """Return (n,) coins of probability exp(-p) with p = part / 2^k <= 1 (Algorithm 1 of arXiv:2004.00010)."""

    def tossed(limit: int, at: NDArray[np.int64]) -> _Mask:
        words = stream.take(len(at))
        return (_upper(words, bits) < part[at]) & stream.below(limit, words)

    return _until_failure(len(part), tossed)


def _half_square_coins(stream: _Stream, bits: int, part: _Words) -> _Mask:
    """Return (n,) coins of probability exp(-p) with p = (part / 2^k)² / 2."""

    def tossed(limit: int, at: NDArray[np.int64]) -> _Mask:
        words = stream.take(len(at))
        coins = (_upper(words, bits) < part[at]) & stream.below(2 * limit, words)
        more = np.flatnonzero(coins)
        coins[more] = _upper(stream.take(len(more)), bits) < part[at[more]]
        return coins

    return _until_failure(len(part), tossed)


def _until_failure(count: int, tossed: Callable[[int, NDArray[np.int64]], _Mask]) -> _Mask:
    """Return for each of ``count`` series of coins whether the number of its first failure is odd.

    Args:
        count: the number of series.
        tossed: maps K and the series without a failure, (m,), to their K-th coins, (m,).
    """
    odd = np.zeros(count, np.bool_)
    going = np.arange(count)
    number = 1
    while len(going):
        coins = tossed(number, going)
        odd[going[~coins]] = number % 2 == 1
        going, number = going[coins], number + 1
    return odd


def _far_coins(stream: _Stream, bits: int, times: NDArray[np.int64], part: _Words) -> _Mask:
    """Return (n,) coins of probability exp(-a²/2) exp(-a F/t), with a = times >= 1 and F/t = part / 2^k."""
    kept = np.ones(len(times), np.bool_)
    for number in range(int(times.max(initial=0)) ** 2):
        left = np.flatnonzero(kept & (number < times**2))
        kept[left] = _constant_coins(stream, len(left), 1)
    for number in range(int(times.max(initial=0))):
        left = np.flatnonzero(kept & (number < times))
        kept[left] = _exp_coins(stream, bits, part[left])
    return kept


def _constant_coins(stream: _Stream, count: int, halves: int) -> _Mask:
    """Return (count,) coins of probability exp(-halves/2)."""
    words = stream.take(count)
    limit = np.uint64(leading_bits(halves, 64))
    coins: _Mask = words < limit
    for at in np.flatnonzero(words == limit):
        coins[at] = _decided_later(stream, halves)
    return coins


def _geometric(stream: _Stream, count: int) -> NDArray[np.int64]:
    """Return (count,) numbers V with P[V >= v] = exp(-v): the largest v for which a uniform number is below exp(-v)."""
    words, limits = stream.take(count), _limits()
    places = np.searchsorted(limits, words, side="right")
    numbers: NDArray[np.int64] = (len(limits) - places).astype(np.int64)
    for at in np.flatnonzero((places > 0) & (limits[places - 1] == words)):  # the first 64 bits do not determine V
        numbers[at] = _geometric_of(stream, int(words[at]))
    return numbers


def _geometric_of(stream: _Stream, value: int) -> int:
    """Return V of a uniform number that begins with these 64 bits."""
    number, bits = 0, 64
    while True:
        while value < leading_bits(2 * (number + 1), bits):
            number += 1
        if value > leading_bits(2 * (number + 1), bits):
            return number
        value, bits = (value << 64) | int(stream.take(1)[0]), bits + 64


def _decided_later(stream: _Stream, halves: int) -> bool:
    """Return whether a uniform number that begins with the first 64 bits of exp(-halves/2) is less than that."""
    bits, value = 64, leading_bits(halves, 64)
    while True:
        bits, value = bits + 64, (value << 64) | int(stream.take(1)[0])
        limit = leading_bits(halves, bits)
        if value != limit:
            return value < limit


_FIRST_WITHOUT_BITS = 45  # exp(-45) < 2^-64


@cache
def _limits() -> _Words:
    """Return the first 64 bits of exp(-v), v = 45, 44, ..., 1, in ascending order."""
    return np.array([leading_bits(2 * v, 64) for v in range(_FIRST_WITHOUT_BITS, 0, -1)], np.uint64)


@cache
def leading_bits(halves: int, bits: int) -> int:
    """Return floor(2^bits exp(-halves/2)), with whole numbers.

    exp(-1/2) is between two partial sums of its alternating series. Its powers are bounded from both sides, with more
    and more bits until both bounds have the same floor. They have, since exp(-halves/2) is irrational.

    >>> leading_bits(2, 10), leading_bits(90, 64)  # 1024/e = 376.7
    (376, 0)
    """
    extra = 64
    while True:
        total = bits + extra
        low = high = 1 << total
        least, most = _root_bounds(total)
        for _ in range(halves):
            low, high = (low * least) >> total, -((-high * most) >> total)
        if low >> extra == high >> extra:
            return low >> extra
        extra *= 2


@cache
def _root_bounds(bits: int) -> tuple[int, int]:
    """Return whole numbers below and above 2^bits exp(-1/2), by its alternating series."""
    # Terms 1/(2^n n!), each rounded down by less than 1; the first left out is less than 1.
    total, term, number = 0, 1 << bits, 0
    while term:
        total += -term if number % 2 else term
        number += 1
        term //= 2 * number
    return total - number - 1, total + number + 1
