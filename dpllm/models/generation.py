"""Generate text from a released model, sampled in batches or token by token.

Sampling is post-processing of the released weights, so it costs no ε, however much is generated. A prompt is not
covered by the guarantee: whoever prompts with private text can get it back.

Left padding puts the last token of each prompt next to the first new one; the attention masks the padding, and
transformers derives the positions from the mask. Prompts are encoded as in training: with the tokenizer's beginning
token, and without an end token (`dpllm.data.tokenization`); chats by the template with its fixed date
(`dpllm.data.chat`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from dpllm.config import PRETRAINED_FOLDER, RECIPE_FILE, TASKS, ConfigError, ModelConfig, load_recipe
from dpllm.config.values import between, integer
from dpllm.data.chat import prompt_of_chat
from dpllm.models.load import NO_CODE, load_adapter, load_pretrained, load_tokenizer, not_loaded
from dpllm.models.tasks import task_of_class
from dpllm.models.writing import also_end_with, saved_ends
from dpllm.privacy.ledger import LEDGER_FILE

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or messages with role and content."""

ADAPTER_FILE = "adapter_config.json"
_CONFIG = "config.json"
_MOST_TOKENS = 1_000_000
_WRITERS = ("CAUSAL_LM", "SEQ_2_SEQ_LM")
"""PEFT's names of the tasks whose models write text."""
_ADAPTER_TASKS = {
    "SEQ_CLS": "text classification or scoring",
    "TOKEN_CLS": "token classification",
    "QUESTION_ANS": "extractive question answering",
    "FEATURE_EXTRACTION": "embeddings",
}
_OTHER_HEADS = ("Classification", "QuestionAnswering", "MultipleChoice", "MaskedLM", "NextSentencePrediction")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn from the model's distribution.

    Raises:
        ConfigError: a number is out of range.
    """

    max_new_tokens: int = 128
    """The largest number of tokens of a text."""
    temperature: float = 1.0
    """1 draws from the model's own distribution; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw from the most likely tokens whose probabilities sum to this; 1 keeps all."""
    seed: int | None = None
    """Seed of the draws; None: from the operating system."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        integer("max_new_tokens", self.max_new_tokens, 1, _MOST_TOKENS)
        between("temperature", self.temperature, 0, 100)
        between("top_p", self.top_p, 0, 1, above=True)
        if self.seed is not None:
            integer("seed", self.seed, 0, 2**63 - 1)


class TextGenerator:
    """A model with its tokenizer, ready to continue prompts.

    Attributes:
        model: model in evaluation mode, on the accelerator if there is one.
        tokenizer: its tokenizer.
        sees: the largest number of tokens of prompt and new text together; None: no limit.
        ends: tokens that end a text.
        options: variables of the chat template, as in the training.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None
    ) -> None:
        """Store a loaded model."""
        self.model, self.tokenizer, self.options = model, tokenizer, dict(options or {})
        self.has_decoder = bool(model.config.is_encoder_decoder)
        self.sees = _positions(model, self.has_decoder)
        ends = model.generation_config.eos_token_id
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.ends = sorted({*own, *(ends if isinstance(ends, list) else [] if ends is None else [ends])})
        around = tokenizer("a")["input_ids"]
        special = set(tokenizer.all_special_ids)
        self._tail = 1 if len(around) > 1 and around[-1] in special and not self.has_decoder else 0

    @property
    def has_template(self) -> bool:
        """Return whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt; for an empty one, the token that begins or ends a text."""
        if not isinstance(prompt, str):
            text = prompt_of_chat(prompt, self.tokenizer, self.options)
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        ids = list(self.tokenizer(prompt, verbose=False)["input_ids"])
        ids = ids[: len(ids) - self._tail] if self._tail else ids
        if ids:
            return ids
        first = self.tokenizer.bos_token_id
        first = first if first is not None else self.tokenizer.eos_token_id
        if first is None:
            raise ConfigError(
                "the tokenizer has no token that begins or ends a text, so an empty prompt cannot be continued: give "
                "a prompt"
            )
        return [first]

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, batch_size: int = 16) -> Iterator[list[str]]:
        """Yield the new texts of each batch of prompts, in their order.

        Args:
            prompts: one prompt for each text.
            sampling: how to draw. The seed is set once, before the first batch.
            batch_size: the largest number of prompts in one batch.

        Raises:
            ConfigError: a prompt leaves no room for a new token.
        """
        _seed(sampling)
        for start in range(0, len(prompts), batch_size):
            rows = [self.encode(prompt) for prompt in prompts[start : start + batch_size]]
            # The longest row of a batch limits all, so a row with little room gets its own batch.
            together = [n for n, row in enumerate(rows) if self._room(row) >= sampling.max_new_tokens]
            batches = [together] if together else []
            batches += [[number] for number in range(len(rows)) if number not in together]
            found: dict[int, str] = {}
            for numbers in batches:
                found.update(zip(numbers, self._of_batch([rows[n] for n in numbers], sampling), strict=True))
            yield [found[number] for number in range(len(rows))]

    def stream(self, prompt: Prompt, sampling: Sampling, streamer: Any) -> str:
        """Return the new text of one prompt; a streamer of transformers receives its words as they are generated."""
        _seed(sampling)
        return self._of_batch([self.encode(prompt)], sampling, streamer)[0]

    def room_for(self, prompt: Prompt) -> int:
        """Return the number of tokens that may follow a prompt."""
        return self._room(self.encode(prompt))

    def _room(self, row: Sequence[int]) -> int:
        return _MOST_TOKENS if self.sees is None else self.sees - len(row)

    @torch.no_grad()
    def _of_batch(self, rows: list[list[int]], sampling: Sampling, streamer: Any = None) -> list[str]:
        longest = max(map(len, rows))
        new = min([sampling.max_new_tokens, *map(self._room, rows)])
        if new < 1:
            raise ConfigError(
                f"a prompt has {longest} tokens, and the model's context has {self.sees}: shorten the prompt, so that "
                "there is room for a new token"
            )
        pad = self.tokenizer.pad_token_id
        device = next(self.model.parameters()).device
        ids_BT = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
        mask_BT = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        made = self.model.generate(
            input_ids=ids_BT, attention_mask=mask_BT, generation_config=self._config(sampling, new), streamer=streamer
        )
        tokens = made if self.has_decoder else made[:, longest:]
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _config(self, sampling: Sampling, new: int) -> GenerationConfig:
        drawn = {"do_sample": True, "temperature": float(sampling.temperature), "top_p": float(sampling.top_p)}
        return GenerationConfig(
            max_new_tokens=new,
            num_beams=1,
            top_k=0 if sampling.temperature else None,  # transformers' default is 50
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.ends or None,
            **(drawn if sampling.temperature else {"do_sample": False}),
        )


def load_generator(folder: str | Path, device: str | torch.device | None = None) -> TextGenerator:
    """Load a model folder: a whole model, an adapter with its base, or a merged one.

    Args:
        folder: folder in the format of transformers or peft, with its tokenizer.
        device: device for the model; None: the accelerator, if there is one.

    Raises:
        ConfigError: it contains no language model, such as the folder of a stopped run, or one of its files is
            missing or damaged.
    """
    folder = Path(folder)
    if (folder / LEDGER_FILE).is_file() and not any((folder / name).is_file() for name in (_CONFIG, ADAPTER_FILE)):
        raise ConfigError(
            f"{folder} holds no model: its run has not ended, or its model was not saved. Continue the run (dpllm "
            "train with train.resume_from_checkpoint=auto), or name the folder of one of its checkpoints"
        )
    tokenizer = load_tokenizer(ModelConfig(name=str(folder)))
    adapter = (folder / ADAPTER_FILE).is_file()
    base = _base_of(folder) if adapter else str(folder)
    try:
        config: Any = AutoConfig.from_pretrained(base, **NO_CODE)
        _refuse_heads(config, folder)
        auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = load_pretrained(auto, base, new_head=False, dtype="auto")
        if adapter:
            model = load_adapter(model, folder)
    except ConfigError:
        raise
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # any: damage raises SafetensorError, UnpicklingError, ...
        raise not_loaded("model", base, error) from error
    if adapter:
        also_end_with(model, saved_ends(folder))
    recipe = folder / RECIPE_FILE
    options = load_recipe(recipe).data.chat_template_kwargs if recipe.is_file() else {}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return TextGenerator(model.to(device or accelerator or "cpu").eval(), tokenizer, options)


def _base_of(folder: Path) -> str:
    """Return the model below an adapter; one that the run itself pretrained is in its folder."""
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / ADAPTER_FILE} cannot be read ({error}): restore it") from error
    named, kind = str(config.base_model_name_or_path), config.task_type
    trained = (config.auto_mapping or {}).get("base_model_class")
    if kind is not None and str(getattr(kind, "value", kind)) not in _WRITERS:
        raise _no_text(folder, f"an adapter for {_ADAPTER_TASKS.get(kind, kind)}")
    if kind is None and trained is not None and not _writes(str(trained), None):
        raise _no_text(folder, f"an adapter of a {trained}")
    beside = folder / PRETRAINED_FOLDER
    return str(beside) if not Path(named).is_dir() and (beside / "config.json").is_file() else named


def _refuse_heads(config: Any, folder: Path) -> None:
    other = [str(name) for name in config.architectures or () if not _writes(str(name), config)]
    if other:
        raise _no_text(folder, f"a {other[0]}")


def _writes(name: str, config: Any) -> bool:
    """Return whether a class, by its name, can generate text; a user's class is given the benefit of the doubt."""
    task = task_of_class(name, config)
    return not name.endswith(_OTHER_HEADS) if task is None else TASKS[task].peft in _WRITERS


def _no_text(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{folder} holds {what}, which cannot generate text. Load it as its model card says, or name a language model"
    )


def _positions(model: Any, has_decoder: bool) -> int | None:
    if has_decoder:
        return None
    stated = getattr(model.config, "max_position_embeddings", None)
    return int(stated) if isinstance(stated, int) and stated > 0 else None


def _seed(sampling: Sampling) -> None:
    if sampling.seed is None:
        torch.seed()
    else:
        torch.manual_seed(sampling.seed)
