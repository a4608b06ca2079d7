"""Real records for the benchmarks that train on them, and quiet libraries."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import datasets
import numpy as np
import transformers

from dpllm.config import ConfigError, DataConfig
from dpllm.data.rows import load_records


def section_of(path: str, columns: Sequence[str], max_length: int, split: str = "train") -> DataConfig:
    """Return a recipe's data section for one column, the text, or two, prompt and completion."""
    if len(columns) == 1:
        return DataConfig(path=path, split=split, max_length=max_length, format="text", columns={"text": columns[0]})
    prompt, completion = columns
    return DataConfig(
        path=path,
        split=split,
        max_length=max_length,
        format="prompt_completion",
        columns={"prompt": prompt, "completion": completion},
    )


def records_of(data: DataConfig, most: int, least: int = 1, option: str = "") -> datasets.Dataset:
    """Return at most this many records, taken evenly from the whole file: data sets are often sorted.

    Args:
        data: the section.
        most: the most records.
        least: the fewest records that are enough.
        option: the command's option that asks for ``least`` records, for the message.

    Raises:
        ValueError: the file cannot be loaded, or has too few records.
    """
    records = load_records(data)
    if len(records) < least:
        raise ConfigError(f"{option} is {least}, and {data.path} has {len(records)} records; lower it")
    if len(records) <= most:
        return records
    return records.select(np.linspace(0, len(records) - 1, most, dtype=np.int64))


def quiet() -> None:
    """Silence the libraries' notices and progress bars."""
    for name in ("transformers", "datasets", "dpllm"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")  # of transformers, about peft's call
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
