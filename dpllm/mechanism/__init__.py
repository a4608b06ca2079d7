"""The parts of the private mechanism: who is drawn, how contributions are bounded, the noise."""
