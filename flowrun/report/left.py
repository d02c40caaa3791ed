"""What a run left in its directory, as far as it came."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrun.outputs import CONFIG

FOLDERS = ("samples", "rollouts")  # of grids, one for a step or an epoch


@dataclass(frozen=True)
class Left:
    """result: empty for a run that did not end. curves: by name, (step, value) of each logged number. grids: files by kind."""

    folder: Path
    config: str
    plan: str
    log: str
    result: Mapping[str, Any]
    curves: Mapping[str, Sequence[tuple[float, float]]]
    grids: Mapping[str, Sequence[Path]]

    @property
    def status(self) -> str:
        return str(self.result.get("status", "not finished"))

    @property
    def once(self) -> dict[str, float]:
        """Numbers that were logged a single time."""
        return {name: points[0][1] for name, points in self.curves.items() if len(points) == 1}


def is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_run(folder: Path) -> Left:
    texts = {name: text_of(folder / name) for name in (CONFIG, "plan.txt", "flowrun.log", "result.json", "metrics.csv")}
    return Left(
        folder.absolute(),
        texts[CONFIG],
        texts["plan.txt"],
        texts["flowrun.log"],
        json.loads(texts["result.json"] or "{}"),
        _curves(texts["metrics.csv"]),
        {kind: sorted((folder / kind).glob("*.png")) for kind in FOLDERS if (folder / kind).is_dir()},
    )


def text_of(file: Path) -> str:
    """Empty when the run did not come so far."""
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _curves(text: str) -> dict[str, list[tuple[float, float]]]:
    """Of metrics.csv; a last line that a kill has cut is left out, and what is no finite number."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline="")):
        for name, value in line.items():
            if name != "step" and value and math.isfinite(number := float(value)):
                found.setdefault(name, []).append((float(line["step"]), number))
    return found
