"""A sweep that is asked to stop: known to the processes that run its jobs side by side, though only this one may be told. No torch."""

from __future__ import annotations

from pathlib import Path
from types import FrameType

from flowrun.stop import Signals

FILE = ".stop"  # in the sweep's folder; as many bytes as it was asked


class Asked(Signals):
    """`with Asked(folder) as asked:` - nothing is interrupted here, jobs look at `times(folder)`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def _handle(self, number: int, frame: FrameType | None) -> None:
        super()._handle(number, frame)
        if self._folder.is_dir():
            with open(self._folder / FILE, "ab") as file:
                file.write(b".")


def times(folder: Path) -> int:
    """How often the sweep was asked to stop."""
    try:
        return (folder / FILE).stat().st_size
    except FileNotFoundError:
        return 0
