"""What modules store next to their tensors is given back to a model that dpllm loaded, before its next training."""

import torch
from torch import nn
from transformers import ReformerConfig

from dpllm.models.load import StartingValues


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.size, self.cache, self.late, self.config = None, {}, None, ReformerConfig(num_buckets=None)


def test_values_are_given_back():
    """Also entries of containers, and settings; what is new goes, and buffers stay."""
    model = nn.Sequential(Module())
    module = model[0]
    start, cache = StartingValues(model), module.cache
    for _ in range(2):
        del module.late
        module.register_buffer("late", torch.ones(2))
        module.size, module.cache["a"], module.new = 3, 1, [1]
        module.config.num_buckets = 8
        start.restore()
        assert module.size is None and module.cache is cache == {} and not hasattr(module, "new")
        assert module.config.num_buckets is None and module.late.tolist() == [1, 1]
    assert module.training and list(model.children()) == [module]
