"""What a person watching sees: a bar on a terminal, a line now and then in the log. And how much memory is in use."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from flowrun import launch

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0
PROCESS = Path("/proc/self/status")  # on Linux


class Progress:
    """`with Progress("train", total, "step", start) as bar: bar.advance(lambda: "loss 0.1")`.

    On a terminal a tqdm bar with rate and time left, the first process's; elsewhere, and in the run's log, a line every
    10 s and at the end."""

    def __init__(self, what: str, total: int, unit: str, start: int = 0) -> None:
        self.what, self.total, self.done, self.start = what, total, start, start
        self.unit = unit
        self.began = self._said = time.monotonic()
        hidden = launch.rank() > 0 or not sys.stderr.isatty()
        self.bar = tqdm(desc=what, total=total, initial=start, unit=unit, disable=hidden, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.close()

    def advance(self, note: Callable[[], str] = str, count: int = 1) -> None:
        """note: makes the words beside the rate; asked only when they are shown."""
        self.done += count
        if self.bar.update(count):
            self.bar.set_postfix_str(note(), refresh=False)
        now = time.monotonic()
        if now - self._said >= LINE_EVERY_S or self.done == self.total:
            self._said = now
            log.info(
                "%s %d/%d: %s", self.what, self.done, self.total, ", ".join(filter(None, (note(), self._pace(now))))
            )

    def _pace(self, now: float) -> str:
        done = max(1, self.done - self.start)
        each = (now - self.began) / done
        left = each * (self.total - self.done)
        pace = f"{each:.3f} s/{self.unit}" if each > 0.1 else f"{1 / max(each, 1e-9):.1f} {self.unit}/s"
        return f"{pace}, {left:.0f} s left" if self.done < self.total else f"{pace}, {now - self.began:.1f} s"


def peak_memory_gb() -> float:
    """Most memory this process has held so far: of the GPU where one is used, else resident memory. GB (1e9 bytes)."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    # getrusage also counts what the parent held when it started this process; the kernel's own mark does not.
    if PROCESS.exists():
        mark = next(line for line in PROCESS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(mark.split()[1]) * 1024 / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
