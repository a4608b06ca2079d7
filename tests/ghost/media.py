"""Toy models that write text about images or sound, and batches of theirs."""

from __future__ import annotations

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKEN, SIDE = 63, 8  # the token that stands for a patch of an image; pixels of a side
TEXT = {"vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, **SIZES}


def llava():
    vision = CLIPVisionConfig(**SIZES, image_size=SIDE, patch_size=4, projection_dim=16)
    config = LlavaConfig(
        vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_id=TOKEN, image_token_index=TOKEN,
        vision_feature_layer=-1, vision_feature_select_strategy="default",
    )  # fmt: skip
    return LlavaForConditionalGeneration(config)


def gemma3():
    text = Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=16)
    vision = SiglipVisionConfig(**SIZES, image_size=SIDE, patch_size=2)
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=TOKEN, image_token_index=TOKEN,
        boi_token_index=61, eoi_token_index=62,
    )  # fmt: skip
    return Gemma3ForConditionalGeneration(config)


def idefics3():
    vision = {**SIZES, "image_size": SIDE, "patch_size": 2}
    config = Idefics3Config(
        text_config=LlamaConfig(**TEXT), vision_config=vision, image_token_id=TOKEN, scale_factor=2, pad_token_id=0
    )
    return Idefics3ForConditionalGeneration(config)


def whisper():
    config = WhisperConfig(
        vocab_size=64, num_mel_bins=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, d_model=16, max_source_positions=20,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def freeze_tower(model):
    """Freeze what reads the images."""
    for name, parameter in model.named_parameters():
        if "vision" in name:
            parameter.requires_grad_(False)
    return model


def images(model, count):
    """Return pixel values (count, …) in the form that the model takes."""
    shape = (count, *([1] if model.config.model_type == "idefics3" else []), 3, SIDE, SIDE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def batch_of(model, count=5, places=4):
    """Return a batch of rows with an image each, of different lengths."""
    generator = torch.Generator().manual_seed(3)
    longest = places + 2 + 2 * count
    ids = torch.zeros(count, longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row in range(count):
        end = longest - 2 * row
        ids[row, : places + 1] = torch.tensor([1] + [TOKEN] * places)
        ids[row, places + 1 : end] = torch.randint(3, 60, (end - places - 1,), generator=generator)
        labels[row, places + 1 : end] = ids[row, places + 1 : end]
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": labels,
        "pixel_values": images(model, count),
    }
