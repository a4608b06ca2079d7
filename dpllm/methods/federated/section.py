"""The section ``federate`` of a recipe: the training of a client, and the server's step.

Place in the flow: a part of `dpllm.config.recipe`. Nothing in it changes ε: the guarantee is in ``privacy``, whose
``noise`` says who adds the noise.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpllm.config import values

OPTIMIZERS = ("sgd", "adam")
LORA = ("freeze_a", "alternate")


@dataclass(frozen=True, kw_only=True)
class FederateConfig:
    """How clients train and how the server updates the weights."""

    local_steps: int = 8
    """Steps of a client in a round, each over ``train.per_device_train_batch_size`` of its rows."""
    local_learning_rate: float = 0.1
    """Learning rate of a client; that of the server is ``train.learning_rate``."""
    local_optimizer: str = "sgd"
    """"sgd" or "adam"; a client begins it again in each round."""
    server_optimizer: str = "sgd"
    """"sgd" or "adam", on the noisy mean of the updates."""
    server_momentum: float = 0.0
    """Momentum of the server's "sgd"."""
    lora: str = "freeze_a"
    """With an adapter: "freeze_a" trains its factor B only; "alternate" trains B in even rounds and A in odd ones.
    The average of both factors is not the average of their products."""
    simulated_dropouts: float = 0.0
    """Probability with which a simulated client leaves a round before its end."""

    def __post_init__(self) -> None:
        """Check every value."""
        values.integer("local_steps", self.local_steps, 1)
        values.between("local_learning_rate", self.local_learning_rate, 0, above=True)
        values.choice("local_optimizer", self.local_optimizer, OPTIMIZERS)
        values.choice("server_optimizer", self.server_optimizer, OPTIMIZERS)
        values.between("server_momentum", self.server_momentum, 0, 1, below=True)
        values.choice("lora", self.lora, LORA)
        values.between("simulated_dropouts", self.simulated_dropouts, 0, 1, below=True)
        if self.server_momentum and self.server_optimizer != "sgd":
            raise values.ConfigError(
                f"server_momentum={self.server_momentum:g} belongs to server_optimizer=sgd: leave it out"
            )
