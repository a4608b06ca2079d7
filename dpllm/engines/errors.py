"""The error of the engines."""


class EngineError(ValueError):
    """An engine, or an option of one, under which the guarantee would not hold."""
