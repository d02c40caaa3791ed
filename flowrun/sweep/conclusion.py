"""The end of a sweep, also of a stopped one: picture and conclusion of the jobs that have ended well, for people and trackers.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flowrun import tracking
from flowrun.config import Best
from flowrun.files import write_atomic
from flowrun.outputs import CONFIG
from flowrun.sweep import recommend
from flowrun.sweep.settings import OK, compared, figure_of, is_acceleration
from flowrun.sweep.table import Row, columns


def conclude(run_id: str, root: Path, rows: Sequence[Row]) -> tuple[list[str], Path | None]:
    """(lines that say it, the picture's path; None when there is nothing to draw)."""
    config = _config(rows)
    asked = config.get("multirun") or {}
    figure = figure_of(
        [row for row in rows if row["status"] == OK],
        asked.get("figure"),
        Best[asked["best"]] if asked.get("best") else None,
    )
    settings = compared(rows)
    lines = recommend.of_accelerations(settings) if is_acceleration(rows) else recommend.of_figure(settings, figure)
    missing = [row for row in rows if row["status"] != OK]
    if missing:
        lines = [
            *lines,
            f"{len(missing)} of {len(rows)} jobs have not ended well and do not count: {', '.join(row['job'] for row in missing)}",
        ]
    from flowrun.sweep.picture import draw  # matplotlib takes its time to import

    picture = draw(rows, figure, root / "sweep.png")
    write_atomic(root / "conclusion.txt", "".join(f"{line}\n" for line in lines).encode())
    if config:
        table = columns(rows)
        cells = [[row.get(name) or "" for name in table] for row in rows]
        swept = tracking.Swept(directory=root, name=run_id, config=config, columns=table, rows=cells, picture=picture,
                               conclusion="\n".join(lines))  # fmt: skip
        tracking.gather(tracking.choose(config.get("tracker")), swept)
    return lines, picture


def _config(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Of the first job that has one: what all jobs share is in it. Empty when none came so far."""
    files = (Path(row["directory"]) / CONFIG for row in rows if row.get("directory"))
    first = next((file for file in files if file.is_file()), None)
    return yaml.safe_load(first.read_text(encoding="utf-8")) if first is not None else {}
