import numpy as np


def points(step: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """x and y of a step, (B,) each, drawn from the step only: a resumed run sees what it would have seen."""
    x_B = np.random.default_rng(step).uniform(-3, 3, count).astype(np.float32)
    return x_B, np.sin(x_B)
