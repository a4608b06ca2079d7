"""Gaussian noise and the source of its randomness.

Every tensor of every step gets its noise from a new generator, seeded from the operating system's entropy. The noise is
drawn in the gradient's float32 and never in the parameter's dtype. No random state is stored, so a resumed run cannot
repeat the noise.

Known limit: floating-point Gaussian samples are not exactly Gaussian (Mironov 2012); no attack on the gradients of
large models is known, and other libraries have the same limit.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

ENTRIES_AT_A_TIME = 1 << 22
"""Noise drawn at a time: 16 MiB, which a GPU's cache holds until it is added."""


class NoiseSource:
    """Draws N(0, noise_stddev^2) per entry.

    Args:
        seed: None takes fresh entropy from the operating system for each tensor: 256 bits on the CPU (NumPy's
            PCG64DXSM); 126 bits on a GPU (key and offset of PyTorch's Philox). A number gives the same noise in every
            run: only for tests, and such a run is not private.
        stream: the number of the sequence that the seed starts; the rank of a process.
    """

    def __init__(self, seed: int | None = None, stream: int = 0) -> None:
        """Set the source of the entropy."""
        self._children = None if seed is None else np.random.SeedSequence([seed, stream])

    def add_(self, grad: Tensor, noise_stddev: float) -> None:
        """Add independent noise to every entry, in place.

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
        if grad.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"Noise is added in float32 or float64, but the gradient is {grad.dtype}. Keep the clipped sum in "
                "float32 until the noise is added."
            )
        if not noise_stddev >= 0:
            raise ValueError(f"noise_stddev is {noise_stddev}; a number of at least 0 is needed.")
        if noise_stddev == 0:
            return
        draw = self._normal_of(grad)
        for block in grad.view(-1).split(ENTRIES_AT_A_TIME):  # no second tensor of the gradient's size
            block.add_(draw(block), alpha=noise_stddev)

    def normal_like(self, total: Tensor) -> Tensor:
        """Return independent N(0, 1) of the shape, dtype and device of a contiguous tensor."""
        draw = self._normal_of(total)
        return torch.cat([draw(block) for block in total.view(-1).split(ENTRIES_AT_A_TIME)]).view_as(total)

    def _normal_of(self, grad: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that draws N(0, 1) like a block of the gradient, from one new generator."""
        if grad.is_cuda:
            on_device = self._cuda_generator(grad.device)
            return lambda block: torch.empty_like(block).normal_(generator=on_device)
        generator = self._numpy_generator()
        dtype = np.float64 if grad.dtype == torch.float64 else np.float32
        return lambda block: torch.from_numpy(generator.standard_normal(block.numel(), dtype=dtype)).to(block.device)

    def _entropy(self) -> int:
        """Return 256 bits."""
        if self._children is None:
            return int.from_bytes(secrets.token_bytes(32), "little")
        (child,) = self._children.spawn(1)
        return int.from_bytes(child.generate_state(8).tobytes(), "little")

    def _numpy_generator(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(self._entropy(), pool_size=8)))

    def _cuda_generator(self, device: torch.device) -> torch.Generator:
        """Return PyTorch's Philox generator with a random key and offset; ``manual_seed`` would set only the key."""
        entropy = self._entropy()
        key = np.uint64(entropy & (2**64 - 1)).astype(np.int64)
        offset = ((entropy >> 64) & (2**62 - 1)) & ~3  # a signed 64-bit number, in multiples of four
        generator = torch.Generator(device)
        generator.set_state(torch.tensor([int(key), offset], dtype=torch.int64).view(torch.uint8))
        return generator
