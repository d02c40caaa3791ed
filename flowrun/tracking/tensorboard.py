"""TensorBoard: curves, sample grids, plan and result, in `tensorboard/` of the run directory. metrics.csv has the exact
numbers; event files hold them in single precision."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from flowrun.config import Failure
from flowrun.tracking import Tracked, Tracker


class TensorBoard(Tracker):
    def __init__(self, config: Tracker.Config, run: Tracked) -> None:
        try:  # here, so that a missing or broken installation turns the tracker off like any other fault of it
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise Failure(f"the package {error.name} is missing", "pip install 'flowrun[tensorboard]'") from error

        folder = run.directory / "tensorboard"
        again = folder.exists()
        # What was logged after the checkpoint that the run goes on from comes again: readers drop it from this step on.
        self._writer = SummaryWriter(str(folder), purge_step=run.start + 1 if run.start else 0)
        self._step = run.start
        if not again:  # readers keep texts
            self._writer.add_text("plan", _verbatim(run.plan), run.start)
            self._writer.add_text("config", _verbatim(_yaml(run.config)), run.start)
            self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._step = step
        self._writer.flush()  # a killed run must not lack what was logged before its newest checkpoint

    def pictures(self, step: int, grid: Path) -> None:
        with Image.open(grid) as image:
            self._writer.add_image("samples", np.asarray(image.convert("RGB")), step, dataformats="HWC")
        self._writer.flush()

    def summary(self, result: Mapping[str, Any]) -> None:
        self._writer.add_text("result", _verbatim(_yaml(result)), self._step)

    def close(self, failed: bool) -> None:
        self._writer.close()


def _yaml(data: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)


def _verbatim(text: str) -> str:
    """As a block of code in Markdown, which TensorBoard shows texts as."""
    return textwrap.indent(text, "    ", lambda line: True)
