"""Stage cache: run the cached units once per row, and store what they return. Incremental, resumable, shared by ranks.

Values are made row by row: the size of a batch alone changes a network's last bits, and cached must equal live.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrun.cache.pace import Work
from flowrun.cache.reader import put_record
from flowrun.cache.writer import Writer
from flowrun.config import DataError, Stopped
from flowrun.disk import check_room
from flowrun.dist import Dist
from flowrun.feed import row_inputs, unit_inputs
from flowrun.graph import Draws, Executor, State
from flowrun.graph.draws import FROZEN
from flowrun.graph.state import tensors
from flowrun.library import Library
from flowrun.progress import Progress
from flowrun.shelf import Job
from flowrun.stop import Stop, how_to_go_on

if TYPE_CHECKING:
    from flowrun.run import Assembly

log = logging.getLogger(__name__)

FORECAST_AFTER = 8  # rows from whose real sizes the forecast is made
SPARE = 1.1  # of the bytes forecast, for headers and what else writes to the disk


def fill(assembly: Assembly, jobs: Sequence[Job], dist: Dist) -> dict[str, Any]:
    """Do this process's share of `jobs`. Returns the figures of all of them for result.json.

    Raises Stopped when asked to, Failure when the disk is too small or a value is not finite, DataError naming all rows
    that could not be read; what was made before is stored in every case. What one process alone cannot go on from is
    raised there, and Lost by the others."""
    library, run, own, began = assembly.library, assembly.run, jobs[dist.rank :: dist.world], time.monotonic()
    models = {
        model.partition(".")[0]
        for job in jobs
        for i in job.units
        for model in job.shelf.split.units[i].onload_model_names
    }
    missing = library.missing()

    def load() -> None:
        check_room(library.root, int(library.forecast(jobs).bytes * SPARE), "what the cache lacks")
        assembly.pipeline.load(sorted(models), dist.device, assembly.dtype)

    dist.each(load)
    with Stop() as stop:
        with (
            library.store.writer(run.cache.flush_mb, run.cache.flush_s) as writer,
            Progress("cache", len(own), "row") as bar,
        ):
            filler = _Filler(assembly, missing, writer)
            for job in own:
                filler.make(job)
                bar.advance(lambda: f"{filler.bytes / 1e6:.1f} MB")
                if bar.done == FORECAST_AFTER:
                    _forecast(library, filler.bytes, bar.done, len(own), time.monotonic() - bar.began, dist.world)
                if stop.asked:
                    break
        parts = dist.gather(_Part(bar.done, filler.bytes, filler.faults, stop.asked))
    dist.on_main(lambda: library.pace.save(filler.done))
    rows, size = sum(part.rows for part in parts), sum(part.bytes for part in parts)
    if any(part.stopped for part in parts):
        raise Stopped(f"stopped after {rows} of {len(jobs)} rows, which are stored; {how_to_go_on()}")
    faults = {row: told for part in parts for row, told in part.faults.items()}
    dist.on_main(lambda: _close(library, faults))
    seconds = time.monotonic() - began
    log.info("cache: %d rows, %.1f MB, %.1f rows/s, in %s", rows, size / 1e6, rows / seconds, library.root)
    return {"stage": "cache", "rows": rows, "bytes": size, "seconds": seconds, "rows_per_s": rows / seconds}


@dataclass(frozen=True)
class _Part:
    """What one process did. faults: row id -> what is wrong with it."""

    rows: int
    bytes: int
    faults: dict[str, list[str]]
    stopped: bool


def _close(library: Library, faults: Mapping[str, Sequence[str]]) -> None:
    """Write down what is there now. Raises DataError naming the rows that could not be read."""
    library.store.refresh()
    library.store.merge()
    library.save_manifest({row: "; ".join(told) for row, told in faults.items()})
    if faults:
        raise DataError(
            sorted({fault for told in faults.values() for fault in told}),
            "repair these rows and run the same command again: the others are stored",
        )


class _Filler:
    """Runs a job's units and puts what they return."""

    def __init__(self, assembly: Assembly, missing: set[bytes], writer: Writer) -> None:
        self.library, self.missing, self.writer, self.seed = assembly.library, missing, writer, assembly.run.seed
        pipeline = assembly.pipeline
        configs = {name: component.configure() for name, component in pipeline.components().items()}
        self.executors = {
            shelf: Executor(shelf.split.units, pipeline.models, configs)
            for shelf in (self.library.rows, self.library.prompts)
        }
        self.bytes = 0
        self.done: dict[str, Work] = {}  # kind of work -> what it came to
        self.faults: dict[str, list[str]] = {}  # row id -> what is wrong with it

    def make(self, job: Job) -> None:
        began, before = time.monotonic(), self.bytes
        units, row = job.shelf.split.units, job.row
        wanted = unit_inputs([units[i] for i in job.units], job.shelf.source)
        try:
            inputs = row_inputs(job.shelf.source, row, job.change, wanted)
        except DataError as error:
            self.faults[row.id] = error.faults
            return
        task = (State(shared=inputs), Draws(self.seed, row.id, FROZEN), self.library.stored(job, self.missing))
        made = self.executors[job.shelf].run_recorded(task, job.units)
        keys = job.shelf.keys(job.place)
        for i, record in made.items():
            if put_record(self.writer, keys, i, units[i], record, row.id):
                self.bytes += sum(
                    t.numel() * t.element_size() for value in record.values.values() for t in tensors(value)
                )
        work = self.done.setdefault(self.library.kind(job), Work())
        work.add(time.monotonic() - began, self.bytes - before)


def _forecast(library: Library, made: int, done: int, total: int, seconds: float, world: int) -> None:
    """How much is still to come from `world` processes like this one, by the real sizes so far. Raises Failure when the
    disk cannot hold it."""
    left = made / done * (total - done) * world
    log.info("cache: about %.1f MB and %.0f s to come", left / 1e6, seconds / done * (total - done))
    check_room(library.root, int(left * SPARE), "the rest of the cache")
