"""Gaussian noise and the source of its randomness.

Every tensor of every step gets its noise from a new generator, seeded from the operating system's entropy. The noise is
drawn in the gradient's float32 and never in the parameter's dtype. No random state is stored, so a resumed run cannot
repeat the noise.

`privacy.randomness` names the generator, which expands the operating system's entropy to the noise of a whole tensor:

* "os": NumPy's PCG64DXSM on the CPU, with 256 bits of entropy; PyTorch's Philox on a GPU, with 126 bits (its key and
    offset). Both pass statistical tests, but neither was designed to withstand an attacker who computes the key.
  * "chacha20": ChaCha20 with a key of 256 bits (`dpllm.mechanism.chacha20`). Distinguishing this noise from noise made
    of true random bits would mean breaking the cipher. A GPU computes the same words
    (`dpllm.mechanism.chacha20`).
  * "discrete": whole numbers with an exact discrete Gaussian distribution, from ChaCha20, on a grid of 2^-40 standard
    deviations to which the sum is rounded first (`dpllm.mechanism.discrete`). It is drawn on the CPU and copied to a
    GPU, which is slower. ε is larger, since its accounting uses Rényi divergences.

Known limit of the first two: floating-point Gaussian samples are not exactly Gaussian (Mironov 2012); no attack on the
gradients of large models is known, and other libraries have the same limit. The third has no such limit.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dpllm.mechanism.chacha20 import KEY_BYTES, ChaCha20Normals, DeviceNormals, SecretKey
from dpllm.mechanism.discrete_gaussian import DEVIATION_BITS, DiscreteGaussians
from dpllm.mechanism.limits import RANDOMNESS

ENTRIES_AT_A_TIME = 1 << 22
"""Noise drawn at once: 16 MiB, which a GPU's cache holds until it is added."""


_FURTHEST = 2.0**61
"""The largest multiple of the grid: 2^21 standard deviations."""


class NoiseSource:
    """Draws N(0, noise_stddev^2) per entry.

    Args:
        seed: None takes fresh entropy from the operating system for each tensor. A number gives the same noise in every
            run: only for tests, and such a run is not private.
        stream: the index of the sequence that the seed starts; a process's rank.
        randomness: the generator, "os", "chacha20" or "discrete".

    Raises:
        ValueError: the generator is unknown.
    """

    def __init__(self, seed: int | None = None, stream: int = 0, randomness: str = "os") -> None:
        """Set the source of the entropy."""
        if randomness not in RANDOMNESS:
            raise ValueError(f"randomness must be one of {', '.join(RANDOMNESS)}, got {randomness!r}")
        self._children = None if seed is None else np.random.SeedSequence([seed, stream])
        self._randomness = randomness

    @property
    def randomness(self) -> str:
        """The generator."""
        return self._randomness

    def add_(self, grad: Tensor, noise_stddev: float) -> None:
        """Add independent noise to every entry, in place; discrete noise to the entry rounded to the grid.

        Args:
            grad: the clipped sum, float32 or float64, contiguous.
            noise_stddev: σ·C, in units of the gradient; 0 adds nothing.

        Raises:
            ValueError: a tensor of lower precision (its rounding would undo part of the noise), or a negative
                deviation.

        >>> grad = torch.zeros(10_000)
        >>> NoiseSource().add_(grad, 2.0)
        >>> bool(1.9 < grad.std() < 2.1)
        True
        """
        _require_sum(grad, noise_stddev)
        if noise_stddev == 0:
            return
        if self._randomness == "discrete":
            for block in grad.view(-1).split(ENTRIES_AT_A_TIME):
                round_and_add_(block, noise_stddev, DiscreteGaussians(self._entropy()))
            return
        draw = normals_from(self._entropy(), self._randomness, grad)
        for block in grad.view(-1).split(ENTRIES_AT_A_TIME):  # no second tensor of the gradient's size
            block.add_(draw(block), alpha=noise_stddev)

    def write_(self, grad: Tensor, noise_stddev: float) -> None:
        """Write the noise that `add_` would add to zeros, with the same bits, without reading the tensor's entries.

        >>> grad = torch.full((10_000,), torch.nan)
        >>> NoiseSource().write_(grad, 2.0)
        >>> bool(1.9 < grad.std() < 2.1)
        True
        """
        _require_sum(grad, noise_stddev)
        own = type(self) is not NoiseSource  # a subclass may add something else
        if own or noise_stddev == 0 or self._randomness == "discrete":
            self.add_(grad.zero_(), noise_stddev)
            return
        draw = normals_from(self._entropy(), self._randomness, grad)
        for block in grad.view(-1).split(ENTRIES_AT_A_TIME):
            torch.mul(draw(block), noise_stddev, out=block)

    def normal_like(self, total: Tensor) -> Tensor:
        """Return independent N(0, 1) of the shape, dtype and device of a contiguous tensor.

        Raises:
            ValueError: the noise is discrete, and not a multiple of normal numbers.
        """
        self._refuse_discrete()
        draw = normals_from(self._entropy(), self._randomness, total)
        return torch.cat([draw(block) for block in total.view(-1).split(ENTRIES_AT_A_TIME)]).view_as(total)

    def numbers(self) -> Addressed:
        """Return numbers that can be redrawn, from a key that nothing else has.

        Raises:
            ValueError: the noise is discrete.
        """
        self._refuse_discrete()
        return Addressed(SecretKey(self._entropy()), self._randomness)

    def _refuse_discrete(self) -> None:
        if self._randomness == "discrete":
            raise ValueError(
                "discrete noise is added to a rounded sum in each step, but correlated noise needs normal numbers. "
                "Use noise='independent', or randomness='chacha20'"
            )

    def _entropy(self) -> bytes:
        """Return 256 bits that no other call returns."""
        if self._children is None:
            return secrets.token_bytes(KEY_BYTES)
        (child,) = self._children.spawn(1)
        return child.generate_state(KEY_BYTES // 4).tobytes()


class Addressed:
    """Standard normal numbers at addresses: equal each time they are drawn. For noise that is recomputed.

    Args:
        key: determines the numbers; created for this object.
        randomness: the generator.
    """

    def __init__(self, key: SecretKey, randomness: str) -> None:
        """Store the key."""
        self._key, self._randomness = key, randomness

    def at(self, *address: int | str) -> NumbersAt:
        """Return the numbers at an address, from their beginning."""
        return NumbersAt(self._key, self._randomness, address)


class NumbersAt:
    """The sequence of draws at one address. Each draw has its own key, derived from its address and index.

    Args:
        key: the key of all addresses.
        randomness: the generator.
        address: the address of this sequence.
    """

    def __init__(self, key: SecretKey, randomness: str, address: tuple[int | str, ...]) -> None:
        """Begin with draw 0."""
        self._key, self._randomness, self._address = key, randomness, address
        self._draw = 0

    def skip(self, draws: int) -> None:
        """Skip the next draws, at no cost."""
        self._draw += draws

    def add_(self, grad: Tensor, noise_stddev: float) -> None:
        """Add the next draw, multiplied by a standard deviation, in place."""
        grad.add_(self.normal_like(grad), alpha=noise_stddev)

    def normal_like(self, total: Tensor) -> Tensor:
        """Return the next draw, N(0, 1), of the shape, dtype and device of a contiguous tensor of one block."""
        secret = self._key.derive(*self._address, self._draw)
        self._draw += 1
        return normals_from(secret, self._randomness, total)(total.view(-1)).view_as(total)


def _require_sum(grad: Tensor, noise_stddev: float) -> None:
    if grad.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"Noise is added in float32 or float64, but the gradient is {grad.dtype}. Keep the clipped sum in "
            "float32 until the noise is added."
        )
    if not noise_stddev >= 0:
        raise ValueError(f"noise_stddev is {noise_stddev}; it must be at least 0.")


def normals_from(entropy: bytes, randomness: str, like: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that draws N(0, 1) of the shape, dtype and device of a block, from one new generator.

    Args:
        entropy: 32 secret bytes. The same bytes give the same numbers again, on the same kind of device.
        randomness: the generator.
        like: float32 or float64, on the device of the blocks.
    """
    if like.is_cuda and randomness == "os":
        on_device = philox(entropy, like.device)
        return lambda block: torch.empty_like(block).normal_(generator=on_device)
    if like.is_cuda and randomness == "chacha20":
        normals = DeviceNormals(entropy, like.device)
        return lambda block: normals.standard_normal(block.numel(), block.dtype)
    generator = ChaCha20Normals(entropy) if randomness == "chacha20" else _pcg64dxsm(entropy)
    dtype = np.float64 if like.dtype == torch.float64 else np.float32
    return lambda block: torch.from_numpy(generator.standard_normal(block.numel(), dtype=dtype)).to(block.device)


def round_and_add_(block: Tensor, noise_stddev: float, numbers: DiscreteGaussians) -> None:
    """Round the entries to multiples of γ = noise_stddev / 2^40, and add whole multiples of it, in place.

    Guarantee: the rounded sum and the noise are added as whole numbers. The product with γ, rounded to the block's
    dtype, is computed only from their sum.

    Args:
        block: (n,), float32 or float64, contiguous.
        noise_stddev: σC > 0.
        numbers: of parameter 2^40.

    >>> block = torch.full((3,), 0.1)
    >>> round_and_add_(block, 1e-6, DiscreteGaussians(bytes(32)))
    >>> bool(((block - 0.1).abs() < 1e-5).all())
    True
    """
    step = noise_stddev / 2**DEVIATION_BITS
    # A sum of clipped contributions is finite. If it were not, a zero would reveal nothing about the sum.
    rounded = np.rint(np.nan_to_num(block.detach().cpu().double().numpy() / step, nan=0.0))
    whole = np.clip(rounded, -_FURTHEST, _FURTHEST).astype(np.int64) + numbers.draw(block.numel())
    block.copy_(torch.from_numpy(whole * step))


def _pcg64dxsm(entropy: bytes) -> np.random.Generator:
    seed = int.from_bytes(entropy, "little")
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(seed, pool_size=8)))


def philox(entropy: bytes, device: torch.device) -> torch.Generator:
    """Return PyTorch's generator with a random key and offset; ``manual_seed`` would set only the key."""
    number = int.from_bytes(entropy, "little")
    key = np.uint64(number & (2**64 - 1)).astype(np.int64)
    offset = ((number >> 64) & (2**62 - 1)) & ~3  # a signed 64-bit number, in multiples of four
    generator = torch.Generator(device)
    generator.set_state(torch.tensor([int(key), offset], dtype=torch.int64).view(torch.uint8))
    return generator
