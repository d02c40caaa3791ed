"""Weights & Biases: configuration, curves, sample grids, plan. Online with a key, else offline (`wandb sync` later)."""

from __future__ import annotations

import html
import logging
import netrc
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowrun.files import write_atomic
from flowrun.tracking import Tracked, Tracker

log = logging.getLogger(__name__)

INIT_TIMEOUT_S = 30  # a machine with a key but no network waits this long at the start, then trains without wandb


class Mode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


class Wandb(Tracker):
    @dataclass(kw_only=True, slots=True)
    class Config:
        mode: Mode      # auto: WANDB_MODE if set, else online with a key, offline without | online | offline | disabled
        project: str    # created on the first run

    def __init__(self, config: Config, run: Tracked) -> None:
        import wandb  # here, so that a missing or broken installation turns the tracker off like any other fault of it

        self._image = wandb.Image
        stored = run.directory / "wandb_id"
        again = stored.exists()
        if not again:
            write_atomic(stored, secrets.token_hex(4).encode())
        mode = _auto() if config.mode is Mode.auto else config.mode.value
        # A resumed run logs the steps since its checkpoint again, with equal values; wandb keeps each step's first.
        self._run = wandb.init(
            project=config.project,
            id=stored.read_text(),
            resume="allow",
            mode=mode,
            dir=str(run.directory),
            name=run.directory.name,
            group=os.environ.get("FLOWRUN_SWEEP"),
            config=dict(run.config),
            allow_val_change=True,
            settings=wandb.Settings(console="off", silent=True, init_timeout=INIT_TIMEOUT_S),
        )
        log.info("wandb: %s, project %s, run %s", mode, config.project, stored.read_text())
        if not again:
            self._run.log({"plan": wandb.Html(f"<pre>{html.escape(run.plan)}</pre>", inject=False)}, step=run.start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def pictures(self, step: int, grid: Path) -> None:
        self._run.log({"samples": self._image(str(grid))}, step=step)

    def summary(self, result: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(result))

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _auto() -> str:
    if given := os.environ.get("WANDB_MODE"):
        return given
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return "online" if file.exists() and netrc.netrc(str(file)).authenticators(host) else "offline"
