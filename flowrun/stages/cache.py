"""Stage cache: run the cached units once per row, and store what they return. Incremental, resumable, shared by ranks.

Values are made row by row: the size of a batch alone changes a network's last bits, and cached must equal live.
cache.batch > 1 gives that up for speed: its values have keys of their own, and the difference is measured and said.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flowrun.cache.pace import Work
from flowrun.cache.reader import put_record
from flowrun.cache.writer import Writer
from flowrun.config import DataError, Failure, Stopped
from flowrun.data import Source
from flowrun.disk import check_room
from flowrun.dist import Dist
from flowrun.feed import row_inputs, unit_inputs
from flowrun.graph import Draws, Executor, Record, State
from flowrun.graph.draws import FROZEN
from flowrun.graph.execute import Job as Task
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
        assembly.pipeline.settle(dist.device)

    dist.each(load)
    dist.on_main(lambda: library.save_manifest({}, begun=True))  # what is made from now on is needed, however this ends
    with Stop() as stop:
        with (
            library.store.writer(run.cache.flush_mb, run.cache.flush_s) as writer,
            Progress("cache", len(own), "row") as bar,
        ):
            filler = _Filler(assembly, missing, writer)
            for group in _groups(own, run.cache.batch):
                filler.make(group)
                bar.advance(lambda: f"{filler.bytes / 1e6:.1f} MB", len(group))
                if bar.done - len(group) < FORECAST_AFTER <= bar.done:
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


def _groups(jobs: Sequence[Job], most: int) -> Iterator[list[Job]]:
    """Jobs that can be done at once, at most so many: the same units on pictures of one size."""
    waiting: dict[object, list[Job]] = {}
    for job in jobs:
        alike = job.shelf, job.units, job.shape
        waiting.setdefault(alike, []).append(job)
        if len(waiting[alike]) == most:
            yield waiting.pop(alike)
    yield from waiting.values()


class _Filler:
    """Runs units for jobs, and puts what they return."""

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
        self._compared = False

    def make(self, jobs: Sequence[Job]) -> None:
        """jobs: of the same units; in halves where memory does not suffice for all at once.

        Raises Failure when it does not even for one row."""
        began, before = time.monotonic(), self.bytes
        tasks = {job: task for job in jobs if (task := self._task(job)) is not None}
        for job in set(jobs) - set(tasks):
            self._make_rest(job)
        if not tasks:
            return
        found = self._run(list(tasks), list(tasks.values()))
        if found is None:
            middle = len(jobs) // 2
            self.make(jobs[:middle])
            self.make(jobs[middle:])
            return
        for job, made in zip(tasks, found, strict=True):
            self._put(job, made)
        work = self.done.setdefault(self.library.kind(jobs[0]), Work())
        for _ in tasks:
            work.add((time.monotonic() - began) / len(tasks), (self.bytes - before) / len(tasks))

    def _task(self, job: Job) -> Task | None:
        """None when the row's data cannot be read, which `faults` then says."""
        wanted = unit_inputs([job.shelf.split.units[i] for i in job.units], job.shelf.source)
        try:
            inputs = row_inputs(job.shelf.source, job.row, job.change, wanted)
        except DataError as error:
            self.faults[job.row.id] = error.faults
            return None
        return State(shared=inputs), Draws(self.seed, job.row.id, FROZEN), self.library.stored(job, self.missing)

    def _make_rest(self, job: Job) -> None:
        """What a row with a fault can still give: its caption may be that of many rows."""
        units, source = job.shelf.split.units, job.shelf.source
        lost = {name for name in unit_inputs([units[i] for i in job.units], source) if not _loads(source, job, name)}
        kept = []
        for i in job.units:
            if units[i].is_barrier or lost & {name for _, name in units[i].reads}:
                lost |= {name for _, name in units[i].writes}
            else:
                kept.append(i)
        if kept and lost:
            self.make([replace(job, units=tuple(kept))])

    def _run(self, jobs: Sequence[Job], tasks: Sequence[Task]) -> list[dict[int, Record]] | None:
        """What each job's units return; None when memory does not suffice for several at once."""
        executor, units = self.executors[jobs[0].shelf], jobs[0].units
        try:
            if len(tasks) == 1:
                return [executor.run_recorded(tasks[0], units)]
            made = executor.run_rows(tasks, units)
        except torch.OutOfMemoryError as error:
            if len(tasks) == 1:
                fix = "use a smaller picture size or a GPU with more memory; what was made before is stored"
                raise Failure(f"memory does not suffice to encode row {jobs[0].row.id} alone", fix) from error
            log.warning("cache: memory does not suffice for %d rows at once; going on with halves", len(tasks))
            return None
        if not self._compared:
            self._compared = True
            _compare(executor.run_recorded(tasks[0], units), made[0], len(tasks))
        return made

    def _put(self, job: Job, made: Mapping[int, Record]) -> None:
        units, keys = job.shelf.split.units, job.shelf.keys(job.place)
        for i, record in made.items():
            if put_record(self.writer, keys, i, units[i], record, job.row.id):
                self.bytes += sum(
                    t.numel() * t.element_size() for value in record.values.values() for t in tensors(value)
                )


def _loads(source: Source, job: Job, name: str) -> bool:
    try:
        row_inputs(source, job.row, job.change, frozenset({name}))
    except DataError:
        return False
    return True


def _compare(alone: Mapping[int, Record], together: Mapping[int, Record], rows: int) -> None:
    """Say by how much a row's values differ when it is encoded with others."""
    pairs = [
        (param[1], one.float(), other.float())
        for i in alone
        for param in alone[i].values
        for one, other in zip(tensors(alone[i].values[param]), tensors(together[i].values[param]), strict=True)
    ]
    differences = {name: (one - other).abs().max().item() for name, one, other in pairs if one.numel()}
    said = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    log.info("cache: encoding %d rows at once changes a row's values by at most: %s", rows, said)


def _forecast(library: Library, made: int, done: int, total: int, seconds: float, world: int) -> None:
    """How much is still to come from `world` processes like this one, by the real sizes so far. Raises Failure when the
    disk cannot hold it."""
    left = made / done * (total - done) * world
    log.info("cache: about %.1f MB and %.0f s to come", left / 1e6, seconds / done * (total - done))
    check_room(library.root, int(left * SPARE), "the rest of the cache")
