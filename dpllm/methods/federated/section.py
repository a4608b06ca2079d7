"""The section ``federated`` of a recipe: the training of a client, and the server's step.

Place in the flow: a part of `dpllm.config.recipe`. Nothing in it changes ε: the guarantee is in ``privacy``, whose
``noise`` says who adds the noise.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dpllm.config.sections import Count, Number, OneOf, Share, section
from dpllm.config.values import ConfigError

OPTIMIZERS = ("sgd", "adam")
LORA = ("freeze_a", "alternate")


@section
class FederatedConfig:
    """How clients train and how the server updates the weights."""

    local_steps: Count = 8
    """Steps of a client in a round, each over train.per_device_train_batch_size of its rows."""
    local_learning_rate: Annotated[Number, Field(gt=0)] = 0.1
    """Learning rate of a client; that of the server is train.learning_rate."""
    local_optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "sgd"
    """sgd or adam; a client begins it again in each round."""
    server_optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "sgd"
    """sgd or adam, on the noisy mean of the updates."""
    server_momentum: Share = 0.0
    """Momentum of the server's sgd."""
    lora: Annotated[str, OneOf(LORA)] = "freeze_a"
    """With an adapter: freeze_a trains its factor B only; alternate trains B in even rounds and A in odd ones. The
    average of both factors is not the average of their products."""
    simulated_dropouts: Share = 0.0
    """Probability with which a simulated client leaves a round before its end."""

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if self.server_momentum and self.server_optimizer != "sgd":
            raise ConfigError(f"server_momentum={self.server_momentum:g} belongs to server_optimizer=sgd: leave it out")
