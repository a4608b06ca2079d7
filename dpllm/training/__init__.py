"""A private run: from microbatches to a step, a run, and the Trainer around it."""
