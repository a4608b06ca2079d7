"""Examples in each of TRL's shapes, a small model with its tokenizer, and one step of a trainer without noise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaForCausalLM

from dpllm import PrivacyConfig
from dpllm.data.rows import train_tokenizer
from tests.conftest import tiny_llama_config
from tests.small_model import WORDS

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}assistant: "
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['role'] }}: {{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> Any:
    made = train_tokenizer([" ".join(WORDS)] * 3, vocab_size=320, max_length=64)
    made.chat_template = template
    return made


def model(layers: int = 1, **changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        tiny_llama_config(vocab_size=320, max_position_embeddings=64, num_hidden_layers=layers, **changes)
    )


def texts(count: int = 6) -> list[str]:
    """Different texts of different lengths."""
    return [" ".join(WORDS[number % 5 : number % 5 + 2 + number % 7]) for number in range(count)]


def says(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def shapes(count: int = 6) -> dict[str, Dataset]:
    """One data set of each shape."""
    asked, told = texts(count), texts(count)[::-1]
    chats = [says("user", a) + says("assistant", b) for a, b in zip(asked, told, strict=True)]
    old = [[{"from": one["role"], "value": one["content"]} for one in chat] for chat in chats]
    return {
        "text": Dataset.from_dict({"text": told}),
        "prompt_completion": Dataset.from_dict({"prompt": [f"{one} " for one in asked], "completion": told}),
        "messages": Dataset.from_dict({"messages": chats}),
        "conversations": Dataset.from_dict({"conversations": old}),
        "chat_completion": Dataset.from_dict(
            {"prompt": [chat[:1] for chat in chats], "completion": [chat[1:] for chat in chats]}
        ),
    }


def privacy(count: int, **changes: Any) -> PrivacyConfig:
    """Every unit in every step, without noise: what the optimizer gets is the clipped sum."""
    settings = {"noise_multiplier": 0, "clip_norm": 1e-2, "expected_batch_size": count, "delta": 1e-3, "seed": 1}
    return PrivacyConfig(**{**settings, **changes})


def arguments(kind: Any, folder: Any, **changes: Any) -> Any:
    """Arguments of one step of SGD with the learning rate 1, so that the weights move by the sum over their number."""
    settings = {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    return kind(**{**settings, **changes})


def clipped_sum(trainer: Any) -> dict[str, torch.Tensor]:
    """Take the trainer's one step, and return the sum that the optimizer received."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    return {name: (own - after[name].detach()) * trainer.plan.expected_batch_size for name, own in before.items()}


def one_by_one(
    model: Any, losses: Iterable[Callable[[Any], torch.Tensor]], clip_norm: float
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The clipped sum of plain autograd in float64, one unit after the other, and the units' factors."""
    model = copy.deepcopy(model).double()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total, factors = {name: torch.zeros_like(p) for name, p in named.items()}, []
    for loss in losses:
        found = torch.autograd.grad(loss(model), list(named.values()))
        norm = torch.stack([one.square().sum() for one in found]).sum().sqrt()
        factors.append(min(1.0, float(clip_norm / norm)))
        for own, one in zip(total.values(), found, strict=True):
            own += one * factors[-1]
    return total, factors


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of a difference over all parameters."""
    return float(torch.stack([(one[n].double() - other[n].double()).square().sum() for n in one]).sum().sqrt())


def model_and_reference() -> tuple[Any, Any]:
    """A model, and a reference with other weights: with the same ones all log-ratios would be 0."""
    torch.manual_seed(0)
    made, reference = model(), model()
    with torch.no_grad():
        for own, its in zip(made.parameters(), reference.parameters(), strict=True):
            its.copy_(own + 0.02 * torch.randn_like(own))
    return made, reference


def preferences(count: int = 4) -> dict[str, Dataset]:
    """One data set of preferences of each shape; answers differ in length."""
    asked, good = texts(count), texts(count)[::-1]
    bad = [f"{text} under clouds" for text in texts(count)]
    chats = [
        (says("user", a), says("assistant", b), says("assistant", c)) for a, b, c in zip(asked, good, bad, strict=True)
    ]
    return {
        "prompt": Dataset.from_dict({"prompt": [f"{one} " for one in asked], "chosen": good, "rejected": bad}),
        "implicit": Dataset.from_dict(
            {
                "chosen": [f"{a} bridge {b}" for a, b in zip(asked, good, strict=True)],
                "rejected": [f"{a} house {c}" for a, c in zip(asked, bad, strict=True)],
            }
        ),
        "chat": Dataset.from_dict(
            {name: [chat[place] for chat in chats] for place, name in enumerate(("prompt", "chosen", "rejected"))}
        ),
        "implicit_chat": Dataset.from_dict(
            {"chosen": [a + b for a, b, _ in chats], "rejected": [a + c for a, _, c in chats]}
        ),
    }


class Unread:
    """A data set that must not be touched."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the data were read: {name}")
