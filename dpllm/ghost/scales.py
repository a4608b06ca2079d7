"""Modules whose arithmetic on one row depends on the other rows, or on the padded length: refused by name.

Their libraries need not be installed, so classes are recognised by name and module. The independence of rows is
measured as well (`dpllm.training.checks.independence`); the modules here are refused before anything is computed.
"""

from __future__ import annotations

from torch import nn

_FP8 = ("transformer_engine", "msamp")


def coupling(module: nn.Module) -> str | None:
    """Return the reason why a module couples rows by its scales or its noise, with the remedy; None if it does not.

    >>> coupling(nn.Linear(2, 2)) is None
    True
    """
    kind = type(module).__name__
    threshold = getattr(getattr(module, "state", None), "threshold", 0)
    if kind == "Linear8bitLt" and threshold:
        return (
            f"LLM.int8 chooses outlier columns over all rows of the batch (llm_int8_threshold={threshold}). Load the "
            "model with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits"
        )
    if is_fp8(module):
        return (
            "fp8 products are scaled by the largest activation of the whole batch. Train in bf16 (mixed_precision: "
            "bf16, without fp8 recipes)"
        )
    if getattr(module, "neftune_noise_alpha", None):
        return (
            f"NEFTune (neftune_noise_alpha={module.neftune_noise_alpha}) scales its noise by the padded length, which "
            "other rows decide. Leave it out; DP-SGD already adds noise"
        )
    return None


def is_fp8(module: nn.Module) -> bool:
    """Whether a module forms products in 8 bits, scaled by the largest activations that it has seen."""
    kind, library = type(module).__name__, type(module).__module__.partition(".")[0]
    return kind == "Float8Linear" or (library in _FP8 and ("Linear" in kind or "MLP" in kind))
