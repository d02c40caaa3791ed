"""One HTML page that says what a run or a sweep did: `python -m flowrun.report RUN_OR_SWEEP`. No torch, no server, no other file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowrun.config import ConfigError
from flowrun.files import write_atomic
from flowrun.report.left import Left, is_run, read_run
from flowrun.report.page import run_page, sweep_page
from flowrun.sweep.table import Row, Table

PAGE, TABLE = "report.html", "sweep.csv"


def write(folder: Path, page: Path | None = None) -> Path:
    """The page's path: `page`, else report.html in `folder`, the directory of a run or of a sweep; finished or not.

    Raises ConfigError when it is neither."""
    target = folder / PAGE if page is None else page
    if not folder.is_dir():
        raise ConfigError("RUN_OR_SWEEP", f"{folder} is no directory", "give the directory of a run or of a sweep")
    if (folder / TABLE).is_file():
        rows = Table(folder / TABLE).rows()
        text = sweep_page(folder, rows, _jobs(folder, rows))
    elif is_run(folder):
        text = run_page(read_run(folder))
    else:
        what = f"{folder} holds neither a run's config.yaml nor a sweep's {TABLE}"
        raise ConfigError("RUN_OR_SWEEP", what, "give the directory of a run or of a sweep")
    target.parent.mkdir(parents=True, exist_ok=True)
    return write_atomic(target, text.encode())


def _jobs(folder: Path, rows: Sequence[Row]) -> dict[str, Left]:
    """What the sweep's jobs left, by job number. A sweep that was moved has its jobs beside its table."""
    places = {row["job"]: folder / Path(row["directory"]).name for row in rows if row.get("directory")}
    return {job: read_run(place) for job, place in places.items() if is_run(place)}
