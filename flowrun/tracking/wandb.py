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
from flowrun.tracking import Swept, Tracked, Tracker

log = logging.getLogger(__name__)

ID = "wandb_id"  # file that holds the run's
INIT_TIMEOUT_S = 30  # a machine with a key but no network waits this long at the start, then trains without wandb


class Mode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


class Wandb(Tracker):
    @dataclass(kw_only=True, slots=True)
    class Config:
        mode: Mode  # auto: WANDB_MODE if set, else online with a key, offline without | online | offline | disabled
        project: str  # created on the first run

    def __init__(self, config: Config, run: Tracked) -> None:
        import wandb

        self._image = wandb.Image
        again = (run.directory / ID).exists()
        # A resumed run logs the steps since its checkpoint again, with equal values; wandb keeps each step's first.
        self._run = _opened(config, run.directory, run.config, group=os.environ.get("FLOWRUN_SWEEP"), job_type=run.stage)
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

    @classmethod
    def gather(cls, config: Config, sweep: Swept) -> None:
        """A run of the jobs' group with the table and the picture; one and the same when the sweep goes on later."""
        import wandb

        run = _opened(config, sweep.directory, sweep.config, group=sweep.name, job_type="sweep")
        try:
            picture = {} if sweep.picture is None else {"picture": wandb.Image(str(sweep.picture))}
            run.log(
                {"table": wandb.Table(columns=list(sweep.columns), data=[list(row) for row in sweep.rows]), **picture}
            )
            run.summary.update({"conclusion": sweep.conclusion})
        finally:
            run.finish(exit_code=0)


def _opened(
    config: Wandb.Config, directory: Path, settings: Mapping[str, Any], group: str | None, job_type: str
) -> Any:
    """wandb's run; the same again for the same directory."""
    import wandb  # here, so that a missing or broken installation turns the tracker off like any other fault of it

    stored = directory / ID
    if not stored.exists():
        write_atomic(stored, secrets.token_hex(4).encode())
    mode = _auto() if config.mode is Mode.auto else config.mode.value
    run = wandb.init(
        project=config.project,
        id=stored.read_text(),
        resume="allow",
        mode=mode,
        dir=str(directory),
        name=directory.name,
        group=group,
        job_type=job_type,
        config=dict(settings),
        allow_val_change=True,
        settings=wandb.Settings(console="off", silent=True, init_timeout=INIT_TIMEOUT_S),
    )
    log.info("wandb: %s, project %s, run %s", mode, config.project, stored.read_text())
    return run


def _auto() -> str:
    if given := os.environ.get("WANDB_MODE"):
        return given
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return "online" if file.exists() and netrc.netrc(str(file)).authenticators(host) else "offline"
