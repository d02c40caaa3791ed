"""The page: sections of tables, curves and pictures, all inside one HTML file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from flowrun.report.curves import Points, draw, panels, steady, styles
from flowrun.report.left import Left, text_of
from flowrun.report.probe import probe_section
from flowrun.report.section import Folded, Picture, Section
from flowrun.sweep.printed import telling, told
from flowrun.sweep.settings import OK, short, swept
from flowrun.sweep.table import Row

SHOWN = 5  # grids of a kind: the first, the last, and some between
LOG_LINES = 200  # of flowrun.log, the last ones


@dataclass(frozen=True)
class Head:
    """status: empty for a sweep."""

    title: str
    folder: Path
    status: str = ""


def run_page(left: Left) -> str:
    result = left.result
    title = " ".join(str(result[name]) for name in ("task", "model", "stage") if name in result) or left.folder.name
    sections = [
        Section("Curves", _steady(left.curves), drawings=[draw(title, lines) for title, lines in panels(left.curves).items()]),
        probe_section(left.once),
        *(Section(kind.capitalize(), pictures=_grids(grids)) for kind, grids in left.grids.items() if grids),
        Section("Results", rows=_result(result), note="" if result else "The run has not ended, so there is no result.json."),
        Section("Plan", text=left.plan.rstrip(), folded=[Folded("configuration", left.config), Folded("log", _last(left.log))]),
    ]
    return _page(Head(title, left.folder, left.status), sections)


def sweep_page(folder: Path, rows: Sequence[Row], jobs: Mapping[str, Left]) -> str:
    """jobs: what each left, by its number; jobs that were refused have left nothing."""
    names = {row["job"]: " ".join([row["job"], *(f"{short(key)}={told(row, key)}" for key in swept(rows) if row[key])]) for row in rows}
    ended = sum(row["status"] == OK for row in rows)
    sections = [
        Section("Conclusion", text=text_of(folder / "conclusion.txt").rstrip(),
                pictures=_of(folder / "sweep.png", "of jobs that ended well")),
        Section("Jobs", f"{ended} of {len(rows)} ended well.", [[_cell(cell) for cell in line] for line in telling(rows)]),
        _together({names[job]: left.curves for job, left in jobs.items()}),
        Section("Last samples", pictures=[picture for job, left in jobs.items() if left.grids.get("samples")
                                          for picture in _of(left.grids["samples"][-1], names[job])]),
        Section("Plans", folded=[Folded(names[job], left.plan) for job, left in jobs.items()]),
    ]  # fmt: skip
    return _page(Head(f"sweep {folder.absolute().name}", folder.absolute()), sections)


def _page(head: Head, sections: Sequence[Section | None]) -> str:
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
        files("flowrun.report").joinpath("page.html").read_text(encoding="utf-8")
    )
    shown = [section for section in sections if section is not None and section.holds]
    return template.render(title=head.title, folder=str(head.folder), status=head.status, sections=shown)


def _result(result: Mapping[str, Any]) -> list[list[str]]:
    if not result:
        return []
    return [["name", "value"], *([name, _cell(str(value)) if not isinstance(value, list) else ", ".join(map(str, value))]
                                 for name, value in result.items() if value != "")]  # fmt: skip


def _cell(text: str) -> str:
    """Four digits of a long decimal number; other text as it is."""
    try:
        number = float(text)
    except ValueError:
        return text
    return f"{number:.4g}" if "." in text or "e" in text else text


def _steady(curves: Mapping[str, Points]) -> str:
    """Names the numbers that have no curve since they never changed."""
    if not curves:
        return "Nothing was logged to metrics.csv."
    names = [f"{name} {points[0][1]:.4g}" for name, points in curves.items() if len(points) > 1 and steady(points)]
    return f"The same at every step: {', '.join(names)}." if names else ""


def _together(by_job: Mapping[str, Mapping[str, Points]]) -> Section:
    """A panel for each number that changes, a line for each job."""
    style = styles(list(by_job))
    found: dict[str, dict[str, Points]] = {}
    for job, curves in by_job.items():
        for title, lines in panels(curves).items():
            for line, points in lines.items():
                found.setdefault(title if line == title else f"{title}: {line}", {})[job] = points
    drawings = [draw(title, lines, style) for title, lines in found.items()]
    return Section("Curves", legend=[(colour, job) for job, (colour, _) in style.items()] if drawings else (), drawings=drawings)


def _grids(grids: Sequence[Path]) -> list[Picture]:
    last = len(grids) - 1
    places = sorted({round(last * i / (SHOWN - 1)) for i in range(SHOWN)})
    return [picture for place in places for picture in _of(grids[place], _when(grids[place]))]


def _when(grid: Path) -> str:
    """step-000250.png -> step 250."""
    unit, number = grid.stem.split("-")
    return f"{unit} {int(number)}"


def _of(file: Path, caption: str) -> list[Picture]:
    """None of a file that is not there."""
    if not file.is_file():
        return []
    return [Picture(f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}", caption)]


def _last(log: str) -> str:
    return "\n".join(log.splitlines()[-LOG_LINES:])
