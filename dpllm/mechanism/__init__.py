"""The parts of the private mechanism: sampler, clipping and noise."""
