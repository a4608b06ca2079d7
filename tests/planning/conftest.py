"""The small model of the tuning's tests."""

from tests.methods.tune.conftest import base_model as base_model
