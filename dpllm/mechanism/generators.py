"""Gaussian noise and the source of its randomness, and noise of earlier steps that is stored or drawn again.

Every tensor of every step gets its noise from a new generator, seeded from the operating system's entropy. The noise is
drawn in the gradient's float32 and never in the parameter's dtype. No random state is stored, so a resumed run cannot
repeat the noise.

`privacy.randomness` names the generator, which expands the operating system's entropy to the noise of a whole tensor:

* "os": NumPy's PCG64DXSM on the CPU, with 256 bits of entropy; PyTorch's Philox on a GPU, with 126 bits (its key and
  offset). Both pass statistical tests, but neither was designed to withstand an attacker who computes the key.
* "chacha20": ChaCha20 with a key of 256 bits (`dpllm.mechanism.chacha20`). Distinguishing this noise from noise made
  of true random bits would mean breaking the cipher. A GPU computes the same words.
* "discrete": whole numbers with an exact discrete Gaussian distribution, from ChaCha20, on a grid of 2^-40 standard
  deviations to which the sum is rounded first (`dpllm.mechanism.discrete`). It is drawn on the CPU and copied to a
  GPU, which is slower. ε is larger, since its accounting uses Rényi divergences.

Known limit of the first two: floating-point Gaussian samples are not exactly Gaussian (Mironov 2012); no attack on the
gradients of large models is known, and other libraries have the same limit. The third has no such limit.

**Noise of earlier steps.** Banded noise needs the noise of the last b - 1 steps, each a tensor of the gradient's size.
If these do not fit, the noise of a block of entries is *regenerated* in each step: all its independent numbers are
drawn again, from the first step on, and go through the same code. This needs memory for one block only, and time: t
draws per entry in step t instead of one, and about 2 t / b with the geometric strategy (`SingleStep`).

The numbers of a block are a function of a secret key and an address: the parameter's name, this process's slice, the
block and the step. Stored noise is made from the same numbers, block by block, so both give the same noise, bit by bit,
and a run may store only part of it. The key is taken from the operating system at each start and resume. It stays in
this process's memory (`dpllm.mechanism.chacha20`): anyone who has it can subtract all noise of the run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dpllm.mechanism.chacha20 import KEY_BYTES, ChaCha20Normals, DeviceNormals, SecretKey
from dpllm.mechanism.discrete_gaussian import DEVIATION_BITS, DiscreteGaussians
from dpllm.mechanism.limits import NOISE_MEMORIES, RANDOMNESS
from dpllm.mechanism.noise import StepOrder, slice_of
from dpllm.mechanism.parts import Noise, NoiseStream, Normals, SingleStep

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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


STORED_SHARE = 1 / 4
"""The share of a device's memory that "auto" fills with noise of earlier steps; the rest is regenerated."""


def stream_of(noise: Noise, source: NoiseSource, num_steps: int, memory: str = "auto") -> NoiseStream:
    """Return the noise of a run, or of a resume, stored or regenerated.

    Args:
        noise: the plan's noise.
        source: this process's source.
        num_steps: T of the plan.
        memory: "stored", "regenerated", or "auto": stored as far as `STORED_SHARE` of the device's memory allows. The
            noise is the same.

    Raises:
        ValueError: the choice is unknown.
    """
    limit = NoiseMemory(memory, noise.tensors_kept)
    if not noise.tensors_kept:
        return noise.stream(source, num_steps)
    return BlockStream(lambda numbers: noise.stream(numbers, num_steps), source, limit)


class NoiseMemory:
    """Decides for each block of entries whether its noise is stored.

    Args:
        choice: "stored", "regenerated" or "auto".
        num_tensors: the number of tensors kept per block.

    Raises:
        ValueError: the choice is unknown.
    """

    def __init__(self, choice: str, num_tensors: int) -> None:
        """Begin with nothing stored."""
        if choice not in NOISE_MEMORIES:
            raise ValueError(f"noise_memory must be one of {', '.join(NOISE_MEMORIES)}, got {choice!r}")
        self._choice, self._num_tensors = choice, num_tensors
        self._bytes: dict[torch.device, int] = {}

    def stores(self, block: Tensor) -> bool:
        """Return whether a block's noise is stored, and if so count its bytes."""
        if self._choice != "auto":
            return self._choice == "stored"
        stored = self._bytes.get(block.device, 0) + self._num_tensors * block.numel() * block.element_size()
        if stored > STORED_SHARE * memory_of(block.device):
            return False
        self._bytes[block.device] = stored
        return True


def memory_of(device: torch.device) -> int:
    """Return a device's memory in bytes; for a CPU, this process's share of its container's limit."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [2**63]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class BlockStream:
    """The noise of a run, made by a separate stream for each block of entries from addressed numbers.

    Args:
        make: returns a new stream that draws from these numbers. Made twice from the same numbers, it must give the
            same noise.
        source: gives the secret key.
        memory: decides which streams are stored.
    """

    def __init__(self, make: Callable[[Normals], NoiseStream], source: NoiseSource, memory: NoiseMemory) -> None:
        """Begin without noise, with a fresh key."""
        self._make, self._numbers, self._memory = make, source.numbers(), memory
        self._stored: dict[tuple[str, int], NoiseStream | None] = {}  # None: regenerated
        self._places: dict[str, tuple[object, ...]] = {}
        self._order = StepOrder()

    def begin(self, step: int) -> None:
        """Begin a step. Skipped steps still draw their noise, since the groups advance with every draw.

        Raises:
            ValueError: the step does not follow the last one, or a parameter received no noise in the previous step, or
                only part of it because of an error.
        """
        self._order.begin(step)

    def add_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        """Add the noise of this step to one process's slice of the entries, in place.

        Raises:
            ValueError: the parameter already received its noise of this step; its shape, dtype or processes changed;
                the dtype is neither float32 nor float64; or this process is a fork.
        """
        if self._order.step < 0:
            raise ValueError(f"{name} has no noise before the first step: call begin first")
        self._order.require_first(name)
        share = slice_of(total, rank, size)
        place = (share.numel(), share.dtype, rank, size)
        if self._places.setdefault(name, place) != place:
            raise ValueError(
                f"{name} has {_words(place)}, but had {_words(self._places[name])} in the previous steps, with whose "
                "noise it is correlated. Keep the model's shapes, or start a new run"
            )
        with self._order.adding(name):
            for number, block in enumerate(share.split(ENTRIES_AT_A_TIME)):
                self._add_block_(name, number, (rank, size), block, stddev)

    def _add_block_(self, name: str, number: int, of: tuple[int, int], block: Tensor, stddev: float) -> None:
        where = (name, number)
        stream = self._stored.get(where)
        if stream is None:
            numbers = self._numbers.at(name, *of, number)
            stream = self._make(numbers)
            if where not in self._stored:
                self._stored[where] = stream if self._memory.stores(block) else None
            if self._stored[where] is None and isinstance(stream, SingleStep):
                stream.add_once_(self._order.step, block, stddev, numbers)
                return
            if self._order.step:
                stream.begin(0)
                stream.add_share_(name, block.new_zeros(block.shape), 0.0, 0, 1)
        stream.begin(self._order.step)
        stream.add_share_(name, block, stddev, 0, 1)


def _words(place: tuple[object, ...]) -> str:
    entries, dtype, rank, size = place
    return f"{entries} entries on this process ({dtype}, process {rank} of {size})"
