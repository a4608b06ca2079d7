"""Clipping of each unit's gradient: ghost norms in one backward pass, or one unit at a time."""

from dpllm.ghost.clipper import GhostClipper as GhostClipper
from dpllm.ghost.errors import CoupledError as CoupledError
from dpllm.ghost.errors import GhostError as GhostError
from dpllm.ghost.errors import NoRuleError as NoRuleError
from dpllm.ghost.errors import UnreachedError as UnreachedError
from dpllm.ghost.norm_method import NormMethod as NormMethod
from dpllm.ghost.per_unit import PerUnitClipper as PerUnitClipper
from dpllm.ghost.unit_clipper import ClipResult as ClipResult
from dpllm.ghost.unit_clipper import UnitClipper as UnitClipper
