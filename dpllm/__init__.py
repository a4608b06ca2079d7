"""dpllm: differentially private fine-tuning of large language models.

The names below load on first use, so that the accounting and the command line don't wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpllm.accounting import calibrate_noise_multiplier as calibrate_noise_multiplier
    from dpllm.accounting import epsilon as epsilon
    from dpllm.config import PrivacyConfig as PrivacyConfig
    from dpllm.config import load_recipe as load_recipe
    from dpllm.ghost import ClipResult as ClipResult
    from dpllm.ghost import Forms as Forms
    from dpllm.ghost import GhostClipper as GhostClipper
    from dpllm.ghost import GhostError as GhostError
    from dpllm.losses import classification_loss as classification_loss
    from dpllm.losses import packed_sequence_loss as packed_sequence_loss
    from dpllm.losses import per_sequence_loss as per_sequence_loss
    from dpllm.losses import seq2seq_loss as seq2seq_loss
    from dpllm.plan import PrivacyPlan as PrivacyPlan
    from dpllm.plan import make_plan as make_plan
    from dpllm.run import PrivateRun as PrivateRun
    from dpllm.run import TrainingRows as TrainingRows
    from dpllm.trainer import DPTrainer as DPTrainer

__version__ = "0.1.0"

_HOME = {
    "calibrate_noise_multiplier": "dpllm.accounting",
    "epsilon": "dpllm.accounting",
    "PrivacyConfig": "dpllm.config",
    "load_recipe": "dpllm.config",
    "ClipResult": "dpllm.ghost",
    "Forms": "dpllm.ghost",
    "GhostClipper": "dpllm.ghost",
    "GhostError": "dpllm.ghost",
    "classification_loss": "dpllm.losses",
    "packed_sequence_loss": "dpllm.losses",
    "per_sequence_loss": "dpllm.losses",
    "seq2seq_loss": "dpllm.losses",
    "PrivacyPlan": "dpllm.plan",
    "make_plan": "dpllm.plan",
    "PrivateRun": "dpllm.run",
    "TrainingRows": "dpllm.run",
    "DPTrainer": "dpllm.trainer",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpllm' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
