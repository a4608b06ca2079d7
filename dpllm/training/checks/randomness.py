"""Seed the global random generators in a private run, from which dropout, stochastic rounding and other code draw.

A public seed (``set_seed``) would fix the dropout masks of all steps: removing a row shifts the masks of the rows
after it, so their contributions change too, and ε is not true. The state of a generator also reveals how many numbers
were drawn, and so how long the rows were. Therefore, in each private step:

* at the start of the step, each process seeds Python's, NumPy's and PyTorch's global generators from its own secret
  stream, so rows on different processes get independent masks;
* when the private gradient is complete, all processes seed them from one secret stream that they share, so replicas
  make the same update, also with stochastic rounding. The state that a checkpoint could contain from then on is a
  function of this stream and the step number, not of the rows.

Both streams are SHAKE-256 of 256 bits from the operating system and the step's number. They are never stored, and no
data is read from the device.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import random
import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from dpllm.config import ConfigError
from dpllm.engines.processes import Processes

_ENTROPY_BYTES = 32
_MT_WORDS = 624  # words in the state of a Mersenne Twister
_MT_OFFSET = 24  # bytes before these words in the state of PyTorch's CPU generator, each word in 8 bytes
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_GLOBAL: Any = (torch.default_generator, np.random.mtrand._rand, random._inst)  # seeded by `SecretStreams`
OWN_GENERATOR = (
    "{who} has its own random generator ({what}), whose numbers are not secret and shift when a row is removed. Draw "
    "from the global generators (torch.rand without generator), which are seeded from the operating system in every "
    "step"
)


class SecretStreams:
    """Secret streams that seed the global generators of this process.

    Guarantee: the numbers that a process draws in a step are independent of all other steps and processes. After
    `share`, the generators of all processes are in the same state, which depends only on secret entropy and the step's
    number.

    Args:
        processes: the processes of the run; all of them make this object together.
        seed: None takes 256 bits from the operating system. A number is for tests, and then nothing is private.
    """

    def __init__(self, processes: Processes, seed: int | None = None) -> None:
        """Draw the entropy; rank 0's shared entropy is sent to all processes."""
        if seed is None:
            self._own = secrets.token_bytes(_ENTROPY_BYTES)
            self._shared = processes.from_main(lambda: secrets.token_bytes(_ENTROPY_BYTES))
        else:
            self._own = hashlib.sha256(f"own {seed} {processes.rank}".encode()).digest()
            self._shared = hashlib.sha256(f"shared {seed}".encode()).digest()
        self._seeded_with: int | None = None
        self._step = 0

    def separate(self) -> None:
        """Seed from this process's own stream, at the start of a private step."""
        self._step += 1
        self._seeded_with = _seed_all(_stream(self._own, self._step))

    def share(self) -> None:
        """Seed from the stream that all processes share, when the private gradient is complete."""
        self._seeded_with = None
        _seed_all(_stream(self._shared, self._step))

    def check(self) -> None:
        """Check that PyTorch's global generator, which stores its seed, was not seeded since `separate`.

        NumPy's and Python's generators do not store it. With a seed within a step, numbers depend on a row's place in
        its microbatch, which the comparison of rows finds (`dpllm.training.checks.independence`).

        Raises:
            ConfigError: model, loss or collator called ``manual_seed`` or ``set_seed``.
        """
        if self._seeded_with is not None and torch.initial_seed() != self._seeded_with:
            raise ConfigError(
                f"PyTorch's generator was seeded with {torch.initial_seed()} during a private step, by the model, the "
                "loss or the collator (torch.manual_seed, set_seed). Its random numbers are then public and shift when "
                "a row is removed, so epsilon would not be true. Remove the call, or wrap it in "
                "torch.random.fork_rng()"
            )


def refuse_own_generators(
    model: nn.Module, others: Iterable[tuple[str, Any]] = (), sources: Iterable[tuple[str, Any]] = ()
) -> None:
    """Check that no module and no other object has its own random generator as an attribute.

    Such a generator is not seeded with the global ones: its seed is usually public, and the numbers of one row shift
    when another row is removed. Generators in closures and global variables are not found.

    Args:
        model: the model, with all its modules.
        others: names and objects, such as the collator.
        sources: names and objects that read rows, such as the data set. A seed is allowed there, since a row may be
            changed by a seed and its own number.

    Raises:
        ConfigError: an object has a generator (the message gives its path), or a collator has a fixed seed.
    """
    others = list(others)
    modules = [(f"The module {path or type(module).__name__}", module) for path, module in model.named_modules()]
    for name, holder in [*modules, *others, *sources]:
        if (kind := own_generator(holder)) is not None:
            raise ConfigError(OWN_GENERATOR.format(who=name, what=kind))
    for name, part in ((name, part) for name, holder in others for part in _parts(holder)):
        seed = getattr(part, "seed", None)
        if isinstance(seed, int) and not isinstance(seed, bool):
            raise ConfigError(
                f"{name} has seed={seed}: its numbers for one row are public and shift when another row is removed. "
                "Leave the seed out; the global generators are seeded from the operating system in every step"
            )


def own_generator(holder: Any) -> str | None:
    """Return the attribute and the kind of an object's own random generator; None if it has none.

    >>> own_generator(random.Random(0)), own_generator(functools.partial(max, key=random.Random(0)))
    ('Random', 'key: Random')
    """
    for one in _parts(holder):
        held = {"": one, **getattr(one, "__dict__", {})}
        if isinstance(one, functools.partial):
            held |= {**{f"argument {place}": value for place, value in enumerate(one.args)}, **one.keywords}
        for name, value in held.items():
            is_secret = isinstance(value, random.SystemRandom)
            if isinstance(value, _GENERATORS) and not is_secret and all(value is not known for known in _GLOBAL):
                return f"{name}: {type(value).__name__}".removeprefix(": ")
    return None


def _parts(holder: Any) -> list[Any]:
    """Return an object, the function within a partial or decorated one, and the object to which a method is bound."""
    parts = [holder]
    for one in parts:  # the list grows during the loop
        if isinstance(one, functools.partial):
            parts.append(one.func)
        elif inspect.ismethod(one) or inspect.isbuiltin(one):
            parts.append(one.__self__)
        elif "__wrapped__" in getattr(one, "__dict__", {}):
            parts.append(one.__wrapped__)
    return parts


def _stream(entropy: bytes, step: int) -> bytes:
    """Return enough bytes to seed all generators; neither the entropy nor other steps can be computed from them."""
    return hashlib.shake_256(entropy + step.to_bytes(8, "little")).digest(8 + 16 + 32 + 4 * _MT_WORDS)


def _seed_all(stream: bytes) -> int:
    """Seed Python's, NumPy's and PyTorch's generators, on the CPU and on accelerators; return PyTorch's seed."""
    seed = int.from_bytes(stream[:8], "little")
    torch.manual_seed(seed)  # the CPU and every accelerator, including those not in use yet
    words = np.frombuffer(stream[56:], dtype="<u4")
    _fill_cpu_state(words)
    key, offset = (int.from_bytes(stream[at : at + 8], "little") for at in (8, 16))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            _fill_philox_state(generator, key, offset)
    random.seed(stream[24:56])
    np.random.seed(np.frombuffer(stream[24:56], dtype="<u4"))
    return torch.initial_seed()


def _fill_cpu_state(words: np.ndarray) -> None:
    """Replace all words of the CPU generator's state, since ``manual_seed`` uses only 32 bits of a seed.

    After the words, the state stores how many of them are used; right after ``manual_seed``, the next draw mixes all of
    them first.

    Raises:
        ConfigError: the state has a different layout than in PyTorch 2.
    """
    state = torch.get_rng_state()
    held = state.numpy()[_MT_OFFSET : _MT_OFFSET + 8 * _MT_WORDS].view("<u8")
    if int(held[0]) != torch.initial_seed() & 0xFFFFFFFF:
        raise ConfigError(
            f"PyTorch {torch.__version__} stores the state of its CPU generator in an unknown layout, so it could "
            "get only 32 secret bits. Use a version of PyTorch that dpllm supports (pyproject.toml)"
        )
    held[:] = words
    torch.set_rng_state(state)


def _fill_philox_state(generator: torch.Generator, key: int, offset: int) -> None:
    """Set a random offset in addition to the random key: 126 bits in total. ``manual_seed`` sets only the key."""
    signed = int(np.uint64(key).astype(np.int64))
    position = (offset & (2**62 - 1)) & ~3  # a signed 64-bit number, in multiples of four
    generator.set_state(torch.tensor([signed, position], dtype=torch.int64).view(torch.uint8))
