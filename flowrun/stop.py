"""Ctrl-C and SIGTERM: the first asks the work to stop at the next safe place, the second ends it at once."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType

log = logging.getLogger(__name__)


class Stop:
    """`with Stop() as stop:` - `stop.asked` turns true at the first signal; the handlers before are put back at the end.

    Outside the main thread (notebook servers) signals cannot be handled; `asked` then stays false."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        log.warning("%s: finishing this step and saving; once more ends at once", signal.Signals(number).name)
