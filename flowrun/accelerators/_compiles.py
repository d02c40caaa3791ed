"""What torch compiles meanwhile: graphs, how many of them for a function that had one, seconds; and when it gives up."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch._dynamo.config as dynamo
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.utils import counters

log = logging.getLogger(__name__)

GIVES_UP, REASON = "torch._dynamo hit config.", "last reason: "  # of torch's one warning
RECENT = 20  # calls whose median time counts


class Compiles(logging.Handler):
    """limit: graphs that one function may have, at least. Adapters, gradient and evaluation modes pass torch's 8 easily, and
    past the limit torch runs the function uncompiled after one warning: here that is said again, with what it costs."""

    def __init__(self, limit: int) -> None:
        super().__init__(logging.WARNING)
        self._limit = limit
        self._clear()

    def _clear(self) -> None:
        self._start, self._graphs, self._again, self._seconds, self._gave_up = _graphs(), 0, 0, 0.0, 0
        self._began, self._calm = 0.0, True  # whether the present call has compiled nothing
        self._calls: deque[float] = deque(maxlen=RECENT)
        self._before: float | None = None  # seconds of a call before torch gave up, until those after it are told

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts within the block, with torch's limits raised there."""
        self._clear()
        torch_log, limits = logging.getLogger("torch._dynamo.convert_frame"), (dynamo.recompile_limit, dynamo.accumulated_recompile_limit)
        dynamo.recompile_limit, dynamo.accumulated_recompile_limit = (max(limit, self._limit) for limit in limits)
        torch_log.addHandler(self)
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)
        try:
            yield
        finally:
            callback_handler.remove_end_callback(self._end)
            callback_handler.remove_start_callback(self._begin)
            torch_log.removeHandler(self)
            dynamo.recompile_limit, dynamo.accumulated_recompile_limit = limits
            log.info("torch_compile: %s", ", ".join(f"{name} {value:.4g}" for name, value in self.report().items()))

    def report(self) -> dict[str, float]:
        """graphs; recompiles: those of functions that had one; seconds spent on them; gave_up: functions left uncompiled."""
        return {"graphs": self._graphs, "recompiles": self._again, "compile_seconds": self._seconds, "gave_up": self._gave_up}

    def called(self, seconds: float) -> None:
        """A network was called. On a GPU these are the seconds until its work was begun."""
        if self._calm:
            self._calls.append(seconds)
        self._calm = True
        if self._before is not None and len(self._calls) == RECENT:
            log.warning("torch_compile: a call took %.3g s before torch gave up, and takes %.3g s since", self._before, median(self._calls))
            self._before = None

    def emit(self, record: logging.LogRecord) -> None:
        """torch's own warning."""
        text = record.getMessage()
        if not text.startswith(GIVES_UP):
            return
        self._gave_up += 1
        reason = text.partition(REASON)[2].partition("\n")[0]
        log.warning("torch_compile: a function was compiled %d times and runs uncompiled from now on, because of %s; "
                    "raise recompile_limit, or keep what changes from call to call the same", self._limit, reason)  # fmt: skip
        if self._calls and self._before is None:
            self._before = median(self._calls)
            self._calls.clear()

    def _begin(self, args: CallbackArgs) -> None:
        self._began, self._calm = time.perf_counter(), False

    def _end(self, args: CallbackArgs) -> None:
        self._seconds += time.perf_counter() - self._began
        self._graphs = _graphs() - self._start
        _, _, compiled_before = args.compile_id.partition("/")  # <function>/<how often it was compiled before>
        self._again += args.callback_trigger is CallbackTrigger.DYNAMO and compiled_before != "0"


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]
