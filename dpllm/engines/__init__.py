"""How a model is spread over processes: functions over the one protocol `dpllm.step.Engine`."""

from dpllm.engines.single import SingleProcess as SingleProcess
