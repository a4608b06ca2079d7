"""Models that write text about images: exact rows, and no row takes another's image."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from dpllm import GhostClipper, GhostError, per_sequence_loss
from dpllm.ghost.model_calls import refuse_shared_media
from tests.ghost.loop import assert_is_the_loop, perturbed
from tests.ghost.media import TOKEN, batch_of, freeze_tower, gemma3, idefics3, llava
from tests.mutations import kills


def losses(model, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if "emma3" in type(model).__name__:
        inputs["token_type_ids"] = (batch["input_ids"] == TOKEN).long()
    return per_sequence_loss(model(**inputs, use_cache=False).logits, batch["labels"])


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("make", [llava, gemma3, idefics3])
def test_the_text_part_is_clipped_as_by_a_loop(make, lora):
    torch.manual_seed(0)
    model = make()
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=r".*(language|text)_model.*(q_proj|down_proj)"))
    model = perturbed(freeze_tower(model))
    assert_is_the_loop(model, losses, batch_of(model))


@kills(
    "rows may take each other's images",
    "dpllm/ghost/model_calls.py",
    "        refuse_shared_media(kwargs, self._placeholders)\n",
    "",
)
def test_rows_with_other_numbers_of_placeholders_are_refused():
    """The first row's image went on to the second: with an image of other pixels its loss was another."""
    torch.manual_seed(0)
    model = perturbed(freeze_tower(llava()))
    batch = batch_of(model, 2)
    first, second = batch["input_ids"]
    first[1:5], first[-1] = 5, 7
    second[5:9] = TOKEN
    with torch.no_grad():
        before = losses(model, batch)[1]
        batch["pixel_values"][0] += 1
        assert float((losses(model, batch)[1] - before).abs()) > 1e-6  # the refused dependence is real
    clipper = GhostClipper(model, 1.0)
    with pytest.raises(GhostError, match="images"):
        losses(model, batch)
    clipper.remove()


def test_rows_with_other_numbers_of_images_are_refused():
    """Idefics leaves out images of zeros, so that a row with two would give one of them to a row with none."""
    model = perturbed(freeze_tower(idefics3()))
    batch = batch_of(model, 2)
    two = torch.cat([batch["pixel_values"], batch["pixel_values"] + 1], dim=1)
    two[1] = 0
    clipper = GhostClipper(model, 1.0)
    with pytest.raises(GhostError, match="different numbers"):
        losses(model, {**batch, "pixel_values": two})
    clipper.remove()


@pytest.mark.parametrize(
    "pixels", [torch.ones(8, 48), torch.ones(2, 3, 8, 8, dtype=torch.uint8)], ids=["flat", "bytes"]
)
def test_images_in_another_form_are_images(pixels):
    """Patches of all rows in one matrix, as Qwen-VL takes them, and pixels that are not scaled yet."""
    ids = torch.tensor([[TOKEN, TOKEN, 5], [TOKEN, 6, 7]])
    with pytest.raises(GhostError, match="2 tokens"):
        refuse_shared_media({"input_ids": ids, "pixel_values": pixels}, (TOKEN,))
    refuse_shared_media({"input_ids": ids[:1].expand(2, -1), "pixel_values": pixels}, (TOKEN,))
