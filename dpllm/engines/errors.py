"""The error of the engines."""


class EngineError(ValueError):
    """An engine, or an option of one, under which the guarantee would not hold."""


def no_totals(engine: str) -> EngineError:
    """Return the error of an engine that never has a complete sum, for noise that is added to complete sums."""
    return EngineError(
        f"privacy.randomness='discrete' adds noise to complete sums, but {engine} never has one: its library sums the "
        "processes' shares within its own update. Use a single process, DDP or FSDP2 (dpllm train --config fsdp2)"
    )
