"""Recipes and their values, checked by kind and range when they are read. Needs no torch."""

from dpllm.config.data_section import DataConfig as DataConfig
from dpllm.config.data_section import HeldOut as HeldOut
from dpllm.config.formats.record_format import RecordFormat as RecordFormat
from dpllm.config.privacy_section import ROWS_KEPT as ROWS_KEPT
from dpllm.config.privacy_section import SAMPLINGS as SAMPLINGS
from dpllm.config.privacy_section import UNITS as UNITS
from dpllm.config.privacy_section import PrivacyConfig as PrivacyConfig
from dpllm.config.privacy_section import PrivacyUnit as PrivacyUnit
from dpllm.config.recipe import PRETRAINED_FOLDER as PRETRAINED_FOLDER
from dpllm.config.recipe import RECIPE_FILE as RECIPE_FILE
from dpllm.config.recipe import ConfigError as ConfigError
from dpllm.config.recipe import Microbatch as Microbatch
from dpllm.config.recipe import ModelConfig as ModelConfig
from dpllm.config.recipe import PublicPretrainConfig as PublicPretrainConfig
from dpllm.config.recipe import Recipe as Recipe
from dpllm.config.recipe import ReleaseConfig as ReleaseConfig
from dpllm.config.recipe import load_recipe as load_recipe
from dpllm.config.recipe import nearest as nearest
from dpllm.config.recipe import read_section as read_section
from dpllm.config.recipe import recipe_to_dict as recipe_to_dict
from dpllm.config.recipe import refuse_drawn_pieces as refuse_drawn_pieces
from dpllm.config.recipe import save_recipe as save_recipe
from dpllm.config.tasks import TASKS as TASKS
