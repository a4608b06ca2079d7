"""Ghost norms and the clipped sum in one backward pass."""

from dpllm.ghost.clipper import ClipResult as ClipResult
from dpllm.ghost.clipper import GhostClipper as GhostClipper
from dpllm.ghost.errors import GhostError as GhostError
from dpllm.ghost.norm_method import NormMethod as NormMethod
