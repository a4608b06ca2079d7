"""Tests of dpllm.planning.new_recipe: the text is read as the values that were written, with their reasons above."""

from __future__ import annotations

from dpllm.config.yaml12 import read_yaml
from dpllm.planning.new_recipe import recipe_text
from dpllm.training.settings import Setting


def test_the_text_is_read_as_the_values_that_were_written():
    """Also texts that YAML would read as numbers, booleans or comments, and mappings."""
    texts = ["plain", "my notes #1.jsonl", "0123", "yes", "a: b", "- x", "1e-6", "päth", " spaces ", "null", "'q'"]
    settings = [Setting(f"data.key{n}", text, "why", None) for n, text in enumerate(texts)]
    settings += [
        Setting("privacy.noise", {"kind": "banded", "bands": 16}, "", None),
        Setting("privacy.delta", 3.5e-06, "", None),
        Setting("data.class_names", ["no", "yes: 1"], "", None),
        Setting("microbatch_tokens", "auto", "last", None),
    ]
    found = read_yaml(recipe_text(settings, ["head"], {"release": ["data_holder: us"]}))
    assert [found["data"][f"key{n}"] for n in range(len(texts))] == texts
    assert found["data"]["class_names"] == ["no", "yes: 1"] and found["microbatch_tokens"] == "auto"
    assert found["privacy"] == {"noise": {"kind": "banded", "bands": 16}, "delta": 3.5e-06}
    assert found["release"] is None
