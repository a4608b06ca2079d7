"""The texts of canaries, made only from public sources.

A text must be practically unseen, so that a model can have learnt it only from the training data. It must not belong to
any person, since an audit may print it. Private records are therefore never read here. There are three kinds:

* *random tokens*: uniform over the tokens that decode to readable text;
* *rare suffix*: the beginning of a public text, followed by tokens that hardly occur in public text (after Panda et
  al., ICLR 2025, who audit with rare tokens behind a prefix);
* *sampled*: text that a model which never saw the data writes at a high temperature (Mitchell et al.,
  arXiv:2606.10481).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dpllm.audit.bounds import AuditError
from dpllm.models.continuation import cache_of

RANDOM_TOKENS, RARE_SUFFIX, SAMPLED = KINDS = ("random-tokens", "rare-suffix", "sampled")
RARE_SHARE = 0.25
"""Share of the vocabulary that counts as rare: the tokens that occur least often in the public text."""

_ROUNDS = 20
_SAMPLED_TOGETHER = 64
Pair = tuple[str, str]
"""The prefix of a text, or an empty one, and the text."""


def distinct(draw: Callable[[int], Sequence[Pair]], num: int) -> list[Pair]:
    """Return `num` pairs whose texts are all different and not empty.

    Args:
        draw: a function that returns about the requested number of pairs.
        num: number of pairs.

    Raises:
        AuditError: it repeats the same texts.

    >>> import itertools
    >>> numbers = itertools.cycle("abc")
    >>> distinct(lambda num: [("", next(numbers)) for _ in range(num)], 3)
    [('', 'a'), ('', 'b'), ('', 'c')]
    """
    found: dict[str, str] = {}
    for _ in range(_ROUNDS):
        for prefix, text in draw(num - len(found)):
            if text:
                found.setdefault(text, prefix)
        if len(found) >= num:
            return [(prefix, text) for text, prefix in list(found.items())[:num]]
    raise AuditError(
        f"only {len(found)} of {num} canaries could be made without repeating one. Make them longer (--length), use "
        "fewer (--canaries), or a different kind (--kind)"
    )


def readable_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that decode to readable text by themselves, in ascending order.

    Raises:
        AuditError: there are fewer than two.
    """
    special = set(tokenizer.all_special_ids)
    ids = [token for token in range(len(tokenizer)) if token not in special]
    texts = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    found = [
        token
        for token, text in zip(ids, texts, strict=True)
        if text.strip() and text.isprintable() and "\ufffd" not in text
    ]
    if len(found) < 2:
        raise AuditError(
            "the tokenizer has fewer than two tokens that decode to readable text, so it cannot make a canary. Use a "
            "different tokenizer"
        )
    return found


def random_tokens(
    tokenizer: PreTrainedTokenizerBase, lengths: tuple[int, int], rng: np.random.Generator
) -> Callable[[int], list[Pair]]:
    """Return a function that draws texts of uniform tokens.

    When a text is encoded again, neighbouring tokens may merge, so the number of tokens may differ slightly.

    Args:
        tokenizer: tokenizer of the model to audit.
        lengths: tokens of the prefix, 0 for none, and of the text.
        rng: source of the randomness.
    """
    tokens = np.asarray(readable_tokens(tokenizer))

    def draw(num: int) -> list[Pair]:
        return [_decode_pair(tokenizer, rng.choice(tokens, sum(lengths)).tolist(), lengths[0]) for _ in range(num)]

    return draw


def rare_suffix(
    tokenizer: PreTrainedTokenizerBase, lengths: tuple[int, int], public: Sequence[str], rng: np.random.Generator
) -> Callable[[int], list[Pair]]:
    """Return a function that draws beginnings of public texts, followed by rare tokens.

    Args:
        tokenizer: tokenizer of the model to audit.
        lengths: tokens of the prefix and of the rare part.
        public: public texts.
        rng: source of the randomness.

    Raises:
        AuditError: there is no public text.
    """
    beginnings = [text for text in public if text.strip()]
    if not beginnings:
        raise AuditError(
            "a canary with a rare suffix begins with public text, but there is none. Pass a file with one text per "
            "line (--prefixes), a recipe with public_pretrain, or a different kind (--kind)"
        )
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    for ids in _encode(tokenizer, beginnings):
        np.add.at(counts, ids, 1)
    tokens = np.asarray(readable_tokens(tokenizer))
    rare = tokens[np.argsort(counts[tokens], kind="stable")][: max(2, int(RARE_SHARE * len(tokens)))]

    def draw(num: int) -> list[Pair]:
        chosen = [beginnings[int(number)] for number in rng.integers(len(beginnings), size=num)]
        heads = [ids[: lengths[0]] for ids in _encode(tokenizer, chosen)]
        return [_decode_pair(tokenizer, head + rng.choice(rare, lengths[1]).tolist(), len(head)) for head in heads]

    return draw


def sampled(
    model: Any, tokenizer: PreTrainedTokenizerBase, lengths: tuple[int, int], temperature: float, seed: int
) -> Callable[[int], list[Pair]]:
    """Return a function that samples texts from a model that never saw the private data.

    Args:
        model: a causal language model of transformers.
        tokenizer: the model's tokenizer.
        lengths: tokens of the prefix, 0 for none, and of the text.
        temperature: temperature of the sampling; 0.8 or more gives distinctive texts (arXiv:2606.10481).
        seed: seed of the sampling.

    Raises:
        AuditError: the temperature is not above 0, or the tokenizer has no token to begin with.
    """
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if temperature <= 0:
        raise AuditError(f"the temperature must be above 0, got {temperature}; 1 keeps the model's probabilities")
    if begin is None:
        raise AuditError(
            "the tokenizer has no token that begins or ends a text, so the model cannot write without a prompt. Set "
            "its bos_token or eos_token"
        )
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.full((model.get_input_embeddings().weight.shape[0],), -torch.inf)
    allowed[readable_tokens(tokenizer)] = 0.0

    def draw(num: int) -> list[Pair]:
        ids: list[list[int]] = []
        for start in range(0, num, _SAMPLED_TOGETHER):
            size = min(_SAMPLED_TOGETHER, num - start)
            ids += _sample(model, begin, (size, sum(lengths)), allowed, temperature, generator)
        return [_decode_pair(tokenizer, row, lengths[0]) for row in ids]

    return draw


@torch.no_grad()
def _sample(
    model: Any, begin: int, shape: tuple[int, int], allowed_V: torch.Tensor, temperature: float, generator: Any
) -> list[list[int]]:
    """Sample rows of tokens; random numbers come from the CPU on every device."""
    device = next(model.parameters()).device
    model.eval()
    rows_BT = torch.full((shape[0], 1), begin, dtype=torch.long)
    step_BT = rows_BT
    past: dict[str, Any] = {}
    for _ in range(shape[1]):
        out = model(input_ids=step_BT.to(device), use_cache=True, **past)
        past = cache_of(out)
        p_BV = (out.logits[:, -1].float().cpu() / temperature + allowed_V).softmax(-1)
        step_BT = torch.multinomial(p_BV, 1, generator=generator)
        rows_BT = torch.cat([rows_BT, step_BT], dim=1)
    return rows_BT[:, 1:].tolist()


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Iterator[list[int]]:
    yield from tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def _decode_pair(tokenizer: PreTrainedTokenizerBase, ids: list[int], split: int) -> Pair:
    prefix, text = (
        str(tokenizer.decode(part, clean_up_tokenization_spaces=False)).strip() for part in (ids[:split], ids[split:])
    )
    return prefix, text
