"""Ctrl-C and SIGTERM: kept for the work to look at when it is ready to. No torch."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType, TracebackType

log = logging.getLogger(__name__)


class Signals:
    """`with Signals() as signals:` - SIGINT and SIGTERM are kept in `signals.came`, in order, instead of acting here.

    The handlers before are put back at the end. Outside the main thread (notebook servers) signals cannot be handled;
    `came` then stays empty."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.came.append(number)


class Stop(Signals):
    """The first signal asks the work to stop at the next safe place, `stop.asked`; the second ends it at once."""

    @property
    def asked(self) -> bool:
        return bool(self.came)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        # A launcher sends SIGTERM to the ranks that are left when one has ended: this one is ending already, and the first
        # has results to write. Ctrl-C still ends it at once.
        if error is not None and self._before and "WORLD_SIZE" in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        super()._handle(number, frame)
        log.info("%s: finishing this step and saving; once more ends at once", signal.Signals(number).name)


def how_to_go_on() -> str:
    """For whoever stopped a run."""
    sweep = os.environ.get("FLOWRUN_SWEEP")
    return f"the same command {f'with run_id={sweep} ' if sweep else ''}goes on from there"
