"""Recipes and their values, checked by kind and range when they are read. Needs no torch.

The names are imported when they are used: the command line's help does not wait for pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpllm.config.data_section import DataConfig as DataConfig
    from dpllm.config.data_section import HeldOut as HeldOut
    from dpllm.config.formats.record_format import RecordFormat as RecordFormat
    from dpllm.config.privacy_section import ROWS_KEPT as ROWS_KEPT
    from dpllm.config.privacy_section import SAMPLINGS as SAMPLINGS
    from dpllm.config.privacy_section import UNITS as UNITS
    from dpllm.config.privacy_section import PrivacyConfig as PrivacyConfig
    from dpllm.config.privacy_section import PrivacyUnit as PrivacyUnit
    from dpllm.config.recipe import PRETRAINED_FOLDER as PRETRAINED_FOLDER
    from dpllm.config.recipe import Microbatch as Microbatch
    from dpllm.config.recipe import ModelConfig as ModelConfig
    from dpllm.config.recipe import PublicPretrainConfig as PublicPretrainConfig
    from dpllm.config.recipe import Recipe as Recipe
    from dpllm.config.recipe import ReleaseConfig as ReleaseConfig
    from dpllm.config.recipe import refuse_drawn_pieces as refuse_drawn_pieces
    from dpllm.config.recipe_file import RECIPE_FILE as RECIPE_FILE
    from dpllm.config.recipe_file import load_recipe as load_recipe
    from dpllm.config.recipe_file import read_section as read_section
    from dpllm.config.recipe_file import recipe_to_dict as recipe_to_dict
    from dpllm.config.recipe_file import save_recipe as save_recipe
    from dpllm.config.tasks import TASKS as TASKS
    from dpllm.config.values import ConfigError as ConfigError
    from dpllm.config.values import nearest as nearest

_PLACES = {
    "data_section": ("DataConfig", "HeldOut"),
    "formats.record_format": ("RecordFormat",),
    "privacy_section": ("ROWS_KEPT", "SAMPLINGS", "UNITS", "PrivacyConfig", "PrivacyUnit"),
    "recipe": (
        *("PRETRAINED_FOLDER", "Microbatch", "ModelConfig", "PublicPretrainConfig", "Recipe", "ReleaseConfig"),
        "refuse_drawn_pieces",
    ),
    "recipe_file": ("RECIPE_FILE", "load_recipe", "read_section", "recipe_to_dict", "save_recipe"),
    "tasks": ("TASKS",),
    "values": ("ConfigError", "nearest"),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Return a name of one of the modules."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
