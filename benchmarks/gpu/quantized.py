"""Step of the second visit: LoRA on weights of four bits (QLoRA, arXiv:2305.14314), given bitsandbytes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from methods import GhostStep
from targets import WIDTHS
from throughput import Step as TimedStep
from throughput import timed

from dpllm import GhostClipper, per_sequence_loss
from dpllm.models.quantization import config_for, make_ready
from gpu.memory_limits import llama
from gpu.record import Figures
from gpu.setting import Setting, free_memory
from tests.ghost.loop import flat, row_gradients
from tests.reference.oracle import relative_error


def quantized(setting: Setting) -> Any:
    """Random weights, written, read as nf4, and LoRA on all linear layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 97}
    if not setting.toy:
        sizes = {**WIDTHS["1B"], "vocab_size": 32_000, "num_attention_heads": 32}
    how = config_for("nf4", torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        llama(setting, torch.bfloat16, **sizes).save_pretrained(Path(folder))
        free_memory()
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=how, dtype=torch.bfloat16, device_map={"": setting.device}
        )
    make_ready(model)
    model.config.use_cache = False
    torch.manual_seed(2)
    lora = LoraConfig(r=2 if setting.toy else 16, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, lora).train()


def nf4(figures: Figures, setting: Setting) -> None:
    """Norms and clipped sum against autograd of single rows on the same weights; then time and memory."""
    setting.needs("bitsandbytes")
    model = quantized(setting)
    kinds = {type(module).__name__ for module in model.modules()}
    figures.require("Linear4bit" in kinds, "no layer has weights of four bits")
    batch, tokens = (3, 12) if setting.toy else (8, 512)
    vocabulary = model.config.vocab_size
    ids_BT = torch.randint(3, vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(1)).to(
        setting.device
    )

    def losses(module: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return per_sequence_loss(module(input_ids=inputs["ids"]).logits, inputs["ids"])

    rows = row_gradients(model, losses, {"ids": ids_BT})
    norms = rows.norm(dim=1)
    clip_norm = float(norms.median())
    clipper = GhostClipper(model, clip_norm)
    result = clipper.backward(losses(model, {"ids": ids_BT}))
    clipper.remove()
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = flat([p.grad for p in parameters], parameters)
    figures["trained entries"] = sum(p.numel() for p in parameters)
    figures.check("norms", float(((result.norms.double() - norms) / norms).abs().max()), at_most=3e-2)
    figures.check("sum", relative_error(total, result.factors.double() @ rows), at_most=6e-2)
    model.zero_grad(set_to_none=True)
    del rows
    free_memory()
    figures |= in_turn(model, ids_BT, setting)
    figures["summary"] = f"speed {figures['speed_ratio']:.3f} of non-private"
    figures.say(figures["summary"])
    del model
    free_memory()


def in_turn(model: Any, ids_BT: torch.Tensor, setting: Setting) -> dict[str, Any]:
    """Time steps without and then with privacy on the same model: two models cannot share weights of four bits."""
    found: dict[str, Any] = {}
    for name, make in (("non-private", TimedStep), ("dpllm", GhostStep)):
        step = make(model)
        times = [timed(step, ids_BT) for _ in range(2 if setting.toy else 9)]
        found[f"{name} ms"] = sorted(times[1:] if setting.toy else times[3:])
        if setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            timed(step, ids_BT)
            found[f"{name} peak_bytes"] = torch.cuda.max_memory_allocated()
    middle = {name: found[f"{name} ms"][len(found[f"{name} ms"]) // 2] for name in ("non-private", "dpllm")}
    found["speed_ratio"] = middle["non-private"] / middle["dpllm"]
    return found
