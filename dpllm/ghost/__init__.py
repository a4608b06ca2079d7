"""Clipping of each unit's gradient: ghost norms in one backward pass, or one unit at a time."""

from dpllm.ghost.clipper import GhostClipper as GhostClipper
from dpllm.ghost.norm_method import NormMethod as NormMethod
from dpllm.ghost.refusals import CoupledError as CoupledError
from dpllm.ghost.refusals import GhostError as GhostError
from dpllm.ghost.refusals import NoRuleError as NoRuleError
from dpllm.ghost.refusals import UnreachedError as UnreachedError
from dpllm.ghost.unit_clipper import ClipResult as ClipResult
from dpllm.ghost.unit_clipper import PerUnitClipper as PerUnitClipper
from dpllm.ghost.unit_clipper import UnitClipper as UnitClipper
