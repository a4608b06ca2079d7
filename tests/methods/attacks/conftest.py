"""The small model, recipe and prepared folder of the audits."""

from tests.audit.conftest import base_model as base_model
from tests.audit.conftest import prepared as prepared
from tests.audit.conftest import recipe_file as recipe_file
