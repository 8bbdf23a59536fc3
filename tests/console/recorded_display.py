"""A display that tests look at instead of a terminal."""

from console.display import Progress


class Recorded:
    """A display that keeps what it is shown."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.waited: list[str] = []
        self.steps: list[Progress] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def waiting(self, text: str) -> None:
        self.waited.append(text)

    def progress(self, progress: Progress) -> None:
        self.steps.append(progress)

    def close(self) -> None:
        pass
