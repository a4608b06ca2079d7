"""Engines distribute a model over processes; they implement one protocol, `dpllm.engines.base.Engine`."""

from dpllm.engines.base import SingleProcess as SingleProcess
from dpllm.engines.ddp import DataParallel as DataParallel
from dpllm.engines.deepspeed import DeepSpeedZero as DeepSpeedZero
from dpllm.engines.deepspeed import private_config as private_config
from dpllm.engines.engine_for import engine_for as engine_for
from dpllm.engines.engine_for import model_inside as model_inside
from dpllm.engines.fsdp2 import FullySharded as FullySharded
from dpllm.engines.fsdp2 import whole_state as whole_state
from dpllm.engines.guard import EngineError as EngineError
