"""Continue prompts with a model: in batches of texts, or token by token over many growing rows.

The metrics of held-out text (`dpllm.training.evaluation`) and audits use it.

`Continuation` computes next-token logits of many growing rows, with a cache of keys and values. In private prediction
each row is a private record, or none, followed by the same public prompt, and every drawn token
is appended to all rows. Where groups answer questions (`dpllm.methods.aggregate.aggregate`), each row is a group and
continues with its own tokens. Where teachers write public texts (`dpllm.methods.pate.teach`), each row is a text.
Rows are padded on the left to one public length, and each unit or group has a public number of them, so the shapes of a
computation reveal nothing about a record, and a row's rounding depends neither on the length of another row nor on a
user's number of records.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, logging

from dpllm.config import ConfigError
from dpllm.engines.processes import Processes
from dpllm.models.inputs import num_positions

BATCH = 50
"""Number of prompts that are continued together."""
LIKELIEST: Mapping[str, Any] = {"do_sample": False, "num_beams": 1}
"""Always the likeliest token."""
_SAMPLING: Mapping[str, Any] = {
    **{"temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0},
    **{"min_p": None, "top_h": None},
}
_BEAMS: Mapping[str, Any] = {"early_stopping": False, "length_penalty": 1.0}
"""Settings of a generation configuration that apply to samples and to beams, with their neutral values."""
_COMPLETED = "The model's generation configuration was changed so that it can be saved: %s"
logger = logging.get_logger(__name__)


def complete_generation_config(model: Any) -> None:
    """Change a model's generation configuration so that ``save_pretrained`` can write it, and log the changes.

    Llama 2, Vicuna and others were published with a temperature and without ``do_sample``. transformers reads such a
    configuration, but refuses to write it once a token in it was changed. Their authors meant sampling, as later
    versions of these models state, so ``do_sample`` becomes true where it is missing. Where it is false, or the model
    searches with beams, settings that have no effect are removed. Nothing else is changed.

    Args:
        model: any model; one without a generation configuration is not changed.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(inner, "generation_config", None)
    if not isinstance(config, GenerationConfig):
        return

    def stated(neutral: Mapping[str, Any]) -> list[str]:
        return [name for name, value in neutral.items() if getattr(config, name, None) not in (None, value)]

    one_beam = config.num_beams in (None, 1)
    samples = [] if config.do_sample else stated(_SAMPLING)
    if samples and config.do_sample is None and one_beam:
        config.do_sample = True
        logger.warning_once(_COMPLETED, f"do_sample is true, because {', '.join(samples)} need it")
        return
    removed = samples + (stated(_BEAMS) if one_beam else [])
    if not config.return_dict_in_generate:
        removed += [name for name in config.extra_output_flags if getattr(config, name, None) is True]
    if isinstance(config.pad_token_id, int) and config.pad_token_id < 0:
        removed.append("pad_token_id")
    for name in removed:
        setattr(config, name, None)
    if removed:
        logger.warning_once(_COMPLETED, f"{', '.join(removed)} had no effect and are removed")


@torch.no_grad()
def continuations(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    new_tokens: int | Sequence[int],
    choose: Mapping[str, Any] = LIKELIEST,
    seed: int = 0,
    processes: Processes | None = None,
    moved: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Return the continuation of each prompt up to its end-of-sequence token, which is kept.

    The text of an encoder-decoder is its answer to the prompt, without the token with which its decoder begins. The
    program's random state and the model's training or evaluation mode are restored.

    Args:
        model: a transformers model with ``generate``, on its device.
        tokenizer: its tokenizer.
        prompts: token ids, at least one for each prompt. The longest must leave room for a token in the model.
        new_tokens: largest number of tokens of a continuation, one for all or one for each prompt. In a batch with a
            longer prompt there may be room for fewer.
        choose: how a token is chosen, as arguments of ``transformers.GenerationConfig``.
        seed: seed of the samples.
        processes: divide the prompts over these; all call this function together, with the same prompts, and each gets
            every continuation.
        moved: called after each batch with its number of prompts, over all processes.
    """
    limits = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
    settings = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "repetition_penalty": 1.0,  # the model's own setting would change its text
        **choose,
    }
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    rank, size = (processes.rank, processes.size) if processes else (0, 1)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    found: dict[int, list[int]] = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for turn in range(-(-len(batches) // size)):
            # A sharded model runs on all processes or on none: one without prompts generates text that is not used.
            mine = turn * size + rank
            numbers = batches[mine] if mine < len(batches) else batches[0]
            heads, most = [list(prompts[number]) for number in numbers], [limits[number] for number in numbers]
            texts = _continue(model, settings, heads, most, together=size > 1)
            if mine < len(batches):
                found |= dict(zip(numbers, texts, strict=True))
            if moved is not None:
                moved(min(BATCH * size, len(order) - turn * size * BATCH))
    model.train(was_training)
    for others in processes.gather(found) if processes else []:
        found |= others
    return [found[number] for number in range(len(prompts))]


def _continue(
    model: Any, settings: Mapping[str, Any], prompts: Sequence[list[int]], limits: Sequence[int], together: bool
) -> list[list[int]]:
    """Continue a batch; an encoder reads it padded on the right, a decoder on the left."""
    width, encodes = max(map(len, prompts)), bool(model.config.is_encoder_decoder)
    positions = None if encodes else num_positions(model)
    room = max(limits) if positions is None else min(max(limits), positions - width)
    config = GenerationConfig(max_new_tokens=room, **settings)
    ids, mask = [], []
    for prompt in prompts:
        padding = [config.pad_token_id] * (width - len(prompt))
        ids.append(prompt + padding if encodes else padding + prompt)
        mask.append([int(place < len(prompt)) for place in range(width)][:: 1 if encodes else -1])
    device = next(model.parameters()).device
    written = model.generate(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=torch.tensor(mask, device=device),
        generation_config=config,
        synced_gpus=together,
    )
    end = config.eos_token_id
    texts = [row[:limit] for row, limit in zip(written[:, 1 if encodes else width :].tolist(), limits, strict=True)]
    return [text[: text.index(end) + 1] if end in text else text for text in texts]


def also_end_with(model: Any, tokens: Sequence[int]) -> list[int]:
    """Make a model end its texts with these tokens too; return all tokens that end one.

    Args:
        model: model whose generation configuration is saved with it; one without is not changed.
        tokens: tokens such as the one that closes an assistant's turn (`dpllm.data.chat.ChatTemplate.turn_end`).
    """
    config = getattr(model, "generation_config", None)
    known = getattr(config, "eos_token_id", None)
    ends = list(dict.fromkeys([*(known if isinstance(known, list) else [] if known is None else [known]), *tokens]))
    if config is not None and ends != known and ends != [known]:
        config.eos_token_id = ends
    return ends


def saved_ends(folder: Path) -> list[int]:
    """Return the tokens that end a text according to a folder's generation configuration; none if it has none."""
    if not (folder / GENERATION_CONFIG_NAME).is_file():
        return []
    ends = GenerationConfig.from_pretrained(str(folder)).eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


class Continuation:
    """Rows that grow token by token.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        rows: token ids of each row; the last token is the last of the prompt.
        length: public length to which the rows are padded.
        rows_per_pass: the largest number of rows of one forward pass.
        cached: keep keys and values of earlier tokens, which needs memory for all rows. False: recompute them for
            every token.

    Raises:
        ConfigError: a row is empty, or longer than ``length``.
    """

    def __init__(
        self, model: Any, rows: Sequence[Sequence[int]], length: int, rows_per_pass: int, cached: bool = True
    ) -> None:
        """Pad the rows."""
        longest = max(map(len, rows))
        if longest > length or not all(rows):
            raise ConfigError(
                f"Every row needs 1 to {length} tokens, but the longest has {longest} or a row is empty. "
                "Correct the prompts"
            )
        device = next(model.parameters()).device
        ids_RP = torch.tensor([[0] * (length - len(row)) + list(row) for row in rows], device=device)
        mask_RP = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
        self._model, self._cached = model, cached
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._passes = [_Pass(*part) for part in zip(*(t.split(rows_per_pass) for t in (ids_RP, mask_RP)), strict=True)]

    @torch.inference_mode()
    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield, pass by pass, the rows' numbers and their logits of the next token, (rows, V)."""
        first = 0
        for part in self._passes:
            yield slice(first, first + len(part.ids_RT)), self._of_pass(part)
            first += len(part.ids_RT)

    def append(self, tokens: int | Tensor) -> None:
        """Append a token to every row: the same one, or each row's own, (rows,)."""
        first = 0
        for part in self._passes:
            end = first + len(part.ids_RT)
            part.append(tokens if isinstance(tokens, int) else tokens[first:end, None])
            first = end

    def _of_pass(self, part: _Pass) -> Tensor:
        position_RT = (part.mask_RT.cumsum(dim=1) - 1).clamp(min=0)
        seen = part.seen if self._cached else 0
        found = self._model(
            input_ids=part.ids_RT[:, seen:],
            attention_mask=part.mask_RT,
            position_ids=position_RT[:, seen:],
            use_cache=self._cached,
            **part.cache,
            **({"logits_to_keep": 1} if self._keeps else {}),
        )
        if self._cached:
            part.cache, part.seen = cache_of(found), part.ids_RT.shape[1]
        logits_RV: Tensor = found.logits[:, -1]
        return logits_RV


def cache_of(output: Any) -> dict[str, Any]:
    """Return the argument with which the next forward pass continues from this one.

    Args:
        output: output of a transformers model called with ``use_cache=True``.

    Returns:
        keys and values under the name that this version of transformers uses: ``cache``, and before 5.24
        ``past_key_values``.
    """
    name = "cache" if "cache" in output else "past_key_values"
    return {name: output[name]}


class _Pass:
    """The rows of one forward pass, and the cache of earlier passes."""

    def __init__(self, ids_RT: Tensor, mask_RT: Tensor) -> None:
        self.ids_RT, self.mask_RT = ids_RT, mask_RT
        self.cache: dict[str, Any] = {}
        self.seen = 0

    def append(self, token: int | Tensor) -> None:
        """Add a column: one token for all rows, or (R, 1)."""
        column_R1 = torch.ones_like(self.ids_RT[:, :1])
        self.ids_RT = torch.cat((self.ids_RT, column_R1 * token), dim=1)
        self.mask_RT = torch.cat((self.mask_RT, column_R1), dim=1)
