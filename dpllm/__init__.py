"""dpllm: differentially private fine-tuning of large language models.

The names below load on first use, so that the accounting and the command line don't wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpllm.config import PrivacyConfig as PrivacyConfig
    from dpllm.config import load_recipe as load_recipe
    from dpllm.ghost import ClipResult as ClipResult
    from dpllm.ghost import GhostClipper as GhostClipper
    from dpllm.ghost import GhostError as GhostError
    from dpllm.ghost import NormMethod as NormMethod
    from dpllm.ghost import PerUnitClipper as PerUnitClipper
    from dpllm.mechanism.events import Step as Step
    from dpllm.mechanism.events import dp_sgd as dp_sgd
    from dpllm.mechanism.generators import NoiseSource as NoiseSource
    from dpllm.mechanism.parts import Mechanism as Mechanism
    from dpllm.mechanism.parts import Sampler as Sampler
    from dpllm.mechanism.sampling import secret_rng as secret_rng
    from dpllm.models.losses import classification_loss as classification_loss
    from dpllm.models.losses import packed_sequence_loss as packed_sequence_loss
    from dpllm.models.losses import per_sequence_loss as per_sequence_loss
    from dpllm.models.losses import seq2seq_loss as seq2seq_loss
    from dpllm.privacy.accounting import epsilon as epsilon
    from dpllm.privacy.calibration import calibrate as calibrate
    from dpllm.privacy.calibration import calibrate_noise_multiplier as calibrate_noise_multiplier
    from dpllm.privacy.plan import PrivacyPlan as PrivacyPlan
    from dpllm.privacy.plan import make_plan as make_plan
    from dpllm.privacy.rounding import format_delta as format_delta
    from dpllm.privacy.rounding import format_epsilon as format_epsilon
    from dpllm.training.rows import TrainingRows as TrainingRows
    from dpllm.training.run import PrivateRun as PrivateRun
    from dpllm.training.trainer import DPTrainer as DPTrainer
    from dpllm.training.trl_trainers import DPDPOTrainer as DPDPOTrainer
    from dpllm.training.trl_trainers import DPSFTTrainer as DPSFTTrainer

    __version__: str

_HOME = {
    "Mechanism": "dpllm.mechanism.parts",
    "NoiseSource": "dpllm.mechanism.generators",
    "Sampler": "dpllm.mechanism.parts",
    "Step": "dpllm.mechanism.events",
    "calibrate": "dpllm.privacy.calibration",
    "dp_sgd": "dpllm.mechanism.events",
    "secret_rng": "dpllm.mechanism.sampling",
    "calibrate_noise_multiplier": "dpllm.privacy.calibration",
    "epsilon": "dpllm.privacy.accounting",
    "PrivacyConfig": "dpllm.config",
    "load_recipe": "dpllm.config",
    "ClipResult": "dpllm.ghost",
    "NormMethod": "dpllm.ghost",
    "PerUnitClipper": "dpllm.ghost",
    "GhostClipper": "dpllm.ghost",
    "GhostError": "dpllm.ghost",
    "classification_loss": "dpllm.models.losses",
    "packed_sequence_loss": "dpllm.models.losses",
    "per_sequence_loss": "dpllm.models.losses",
    "seq2seq_loss": "dpllm.models.losses",
    "PrivacyPlan": "dpllm.privacy.plan",
    "format_delta": "dpllm.privacy.rounding",
    "format_epsilon": "dpllm.privacy.rounding",
    "make_plan": "dpllm.privacy.plan",
    "PrivateRun": "dpllm.training.run",
    "TrainingRows": "dpllm.training.rows",
    "DPTrainer": "dpllm.training.trainer",
    "DPDPOTrainer": "dpllm.training.trl_trainers",
    "DPSFTTrainer": "dpllm.training.trl_trainers",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # asks git, so not at import
        return import_module("dpllm.config.versions").code_version().version
    if name not in _HOME:
        raise AttributeError(f"module 'dpllm' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
