"""Records with many keys have parts, one for each topic."""

import dataclasses

import pytest

from dpllm.config import DataConfig, PrivacyConfig
from dpllm.privacy.plan import PrivacyPlan
from dpllm.report.models import Accounting, Parameters, Part, Plan


@pytest.mark.parametrize("record", [PrivacyConfig, DataConfig, PrivacyPlan, Plan, Parameters, Accounting])
def test_each_key_belongs_to_one_part(record):
    """If two parts declared the same key, one declaration would silently replace the other."""
    parts = [kind for kind in record.__mro__ if issubclass(kind, Part) or dataclasses.is_dataclass(kind)]
    declared = [name for kind in parts for name in vars(kind).get("__annotations__", {}) if name != "model_config"]
    keys = record.model_fields if issubclass(record, Part) else {item.name for item in dataclasses.fields(record)}
    assert sorted(declared) == sorted(keys)
