"""One process's work on a run: its log, its directories, and the stages in order."""

from __future__ import annotations

import csv
import io
import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from flowrun import launch, rundir
from flowrun.config import ConfigError, Failure, Lost, Run, Stage, Stopped
from flowrun.contact import contact_sheet
from flowrun.disk import saving
from flowrun.dist import Dist, make_dist
from flowrun.files import write_atomic
from flowrun.outputs import outputs
from flowrun.rundir import RunDir

if TYPE_CHECKING:
    from flowrun.run import Assembly

log = logging.getLogger("flowrun")


class Console(logging.Handler):
    """Lines on the terminal that do not tear a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


class LogFile(logging.FileHandler):
    """A full disk costs the run its further lines here, which the terminal shows too, and nothing else."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self._full = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(error := sys.exc_info()[1], OSError):
            super().handleError(record)
        elif not self._full:
            self._full = True
            log.warning("%s cannot be written: %s", self.baseFilename, error.strerror)

    def close(self) -> None:
        with suppress(OSError):  # of lines that have been said to be lost
            super().close()


class Session:
    """`with Session(run) as session:` - logging to the terminal is on inside, on the first process."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._dist: Dist | None = None
        self._exit = ExitStack()

    def __enter__(self) -> Session:
        console = Console()
        console.setFormatter(logging.Formatter("%(message)s"))
        console.addFilter(_said_here)
        before = log.level
        log.setLevel(logging.INFO)
        log.addHandler(console)
        self._exit.callback(log.setLevel, before)
        self._exit.callback(log.removeHandler, console)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Leaving the others takes their consent; a process that fails alone, or has lost one, just ends.
        alone = error is not None and (isinstance(error, Lost) or not getattr(error, "by_all", False))
        if self._dist is not None and (self._dist.world == 1 or not alone):
            self._dist.close()
        self._exit.close()

    @property
    def dist(self) -> Dist:
        """The processes, joined at first use."""
        if self._dist is None:
            self._dist = make_dist(self.run.precision, self.run.processes)
        return self._dist

    def show(self, assembly: Assembly) -> None:
        """The plan: what a dry run gives out, and the first lines of a run's log on the terminal."""
        if self.run.dry_run and launch.rank() == 0:
            sys.stdout.write(f"{assembly.plan}\n")
        else:
            log.info("%s", assembly.plan)
        for warning in assembly.warnings:
            log.warning("%s", warning)
        if self.run.dry_run and launch.rank() == 0 and "FLOWRUN_SWEEP" not in os.environ:
            name = f"{self.run.task['name']}-{self.run.model['name']}-{self.run.run_id}.png"
            if (path := _save_sheet(assembly, outputs() / "plans" / name)) is not None:
                sys.stdout.write(f"pictures    {path}\n")

    def do(self, stage: Stage, assembly: Assembly) -> None:
        """One stage in a directory of its own. Raises UserError subclasses."""
        if assembly.source.looks is not None:
            self.dist.on_main(assembly.source.looks.save)
        if stage is Stage.cache:
            self._cache(assembly)
        else:
            self._learn(stage, assembly)

    def _cache(self, assembly: Assembly) -> None:
        from flowrun.stages.cache import fill

        # One list for all processes: another run may be filling the same cache.
        work = assembly.library.work(self.dist.on_main(assembly.library.missing))
        if self.run.stage is None and not work:
            self.dist.on_main(assembly.library.keep_manifest)
            return  # nothing to do for this command: the plan has said so
        with self._open(Stage.cache, None, assembly) as folder:
            self._finish(folder, fill(assembly, work, self.dist))

    def _learn(self, stage: Stage, assembly: Assembly) -> None:
        from flowrun.stages.build import build_learning, build_training

        if assembly.library is not None:
            self.dist.on_main(lambda: assembly.library.require(self._command(Stage.cache)))
            assembly.library.store.refresh()
        resume_from = self.dist.on_main(lambda: self._resumed(stage, assembly))
        with self._open(stage, resume_from, assembly) as folder:
            path = self.dist.share(folder.path if folder else None)
            build = build_training if stage is Stage.train else build_learning
            self._finish(folder, build(assembly, self.dist, path, resume_from).run())

    def _resumed(self, stage: Stage, assembly: Assembly) -> Path | None:
        """The directory to go on with. Raises ConfigError for one in which nothing is left to do."""
        found = rundir.find(self.run, stage.value, assembly.data_stamp)
        done = rundir.read_result(found) if found is not None else {}
        if done.get("status") == "finished" and done.get("steps", 0) >= assembly.steps:
            what = f"{found} is finished after {done['steps']} steps, and {assembly.steps} are asked for"
            raise ConfigError("resume", what, "ask for more train.steps, or start anew with resume=none")
        return found

    @contextmanager
    def _open(self, stage: Stage, resume_from: Path | None, assembly: Assembly) -> Any:
        """The stage's directory on the first process, None on the others; what goes wrong inside is logged there."""
        opened: list[RunDir] = []

        def make() -> Path:
            opened.append(rundir.open_run(self.run, stage.value, resume_from, assembly.data_stamp))
            return opened[0].path

        path = self.dist.on_main(make)
        if not self.dist.is_main:
            with _logged(path / "flowrun.log"):
                yield None
            return
        folder, began = opened[0], time.monotonic()
        folder.save_text("plan.txt", f"{assembly.plan}\n")
        if stage is assembly.stages[0] and not folder.resumed:
            _save_sheet(assembly, folder.path / "data.png")
        if assembly.source.skipped:
            folder.save_text("skipped.csv", _table(("row", "reason"), assembly.source.skipped))
        try:
            with _logged(folder.path / "flowrun.log"):
                log.info("%s in %s", "going on" if folder.resumed else stage.value, folder.path)
                yield folder
        except BaseException as error:
            stopped = isinstance(error, Stopped | KeyboardInterrupt)
            if folder.resumed and isinstance(error, ConfigError):
                folder.undo()
                raise
            with _told(Failure):  # a full disk must not hide what went wrong before
                folder.save_result(
                    {
                        "status": "stopped" if stopped else "failed",
                        "stage": stage.value,
                        "reason": str(error),
                        "seconds": time.monotonic() - began,
                    }
                )
            raise
        finally:
            folder.close()

    def _finish(self, folder: RunDir | None, result: dict[str, Any]) -> None:
        if folder is not None:
            path = folder.save_result(
                {"status": "finished", "task": self.run.task["name"], "model": self.run.model["name"], **result}
            )
            log.info("result: %s", path)

    def _command(self, stage: Stage) -> str:
        words = [word for word in sys.argv[1:] if not word.startswith(("stage=", "dry_run="))]
        return shlex.join(["python", "-m", "flowrun", *words, f"stage={stage.value}"])


def _save_sheet(assembly: Assembly, path: Path) -> Path | None:
    sheet = contact_sheet(assembly.variants, assembly.rows, _consequence(assembly) if assembly.run.dry_run else "")
    if sheet is None:
        return None
    png = io.BytesIO()
    sheet.save(png, format="PNG")
    with saving(path.parent, path.name):
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_atomic(path, png.getvalue())


def _consequence(assembly: Assembly) -> str:
    """What a run does about a picture of which only the header is sound."""
    if assembly.cached_first:
        return "a run stores the rest of the cache, then ends with a list of all such rows"
    late = assembly.run.data.get("check") == "headers"
    return "a run ends when it comes to this row" if late else "a run ends before it starts, with a list of all such rows"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    return text.getvalue()


@contextmanager
def _told(kind: type[Exception]) -> Any:
    """An error of this kind becomes a line."""
    try:
        yield
    except kind as error:
        log.warning("%s", error)


def _said_here(record: logging.LogRecord) -> bool:
    """All processes of a run log alike: the first one's records count, and those of what another met alone."""
    return launch.rank() == 0 or getattr(record, "own", False)


@contextmanager
def _logged(path: Path) -> Any:
    """Everything that is logged also goes to the file, with times; so does the traceback of what ends the block.

    The first process's; of the others what they met alone."""
    handler = LogFile(path)
    where = f"rank {launch.rank()} " if launch.rank() else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s {where}%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(_said_here)
    log.addHandler(handler)
    try:
        yield
    except BaseException as error:
        last = log.makeRecord(log.name, logging.ERROR, __file__, 0, "the run ended here", (), sys.exc_info())
        last.own = not getattr(error, "by_all", False)
        handler.handle(last)
        raise
    finally:
        log.removeHandler(handler)
        handler.close()
