"""The exception of the ghost package."""


class GhostError(ValueError):
    """A model, a module, a loss or a call for which exact per-unit clipping cannot be guaranteed.

    The message names the module or parameter by its path, the reason, and the remedy.
    """
