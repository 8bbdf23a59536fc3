import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Fit a sine with a network of one hidden layer."""

    steps: int = 1000
    """Training steps."""
    batch_size: int = 64
    """Points of a step, over all hosts together."""
    save_every: int = 200
    """Steps between two checkpoints."""


def problems(config: Config, *, devices: int) -> list[str]:
    messages = [f"--{name} {n}: must be at least 1" for name, n in vars(config).items() if n < 1]
    if config.batch_size % devices:
        messages += [f"--batch-size {config.batch_size}: must be a multiple of the {devices} devices"]
    return messages
