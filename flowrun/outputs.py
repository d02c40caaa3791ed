"""Where results go, and how they are told from data. No torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from flowrun.config import ConfigError
from flowrun.files import obstacle

CONFIG, STAMP = "config.yaml", "identity"  # files of every run's directory; STAMP holds the run's identity


def outputs() -> Path:
    """Where results go: FLOWRUN_OUTPUTS, else `outputs` in the shell's directory. Absolute. Raises ConfigError."""
    name = os.environ.get("FLOWRUN_OUTPUTS", "outputs")
    if why := obstacle(Path(name)) if name else "it is empty":
        raise ConfigError("FLOWRUN_OUTPUTS", f"is {name!r}: {why}", "name a folder that may be written, or leave it unset")
    return Path(name).absolute()


def are_results(folder: str, files: Collection[str]) -> bool:
    """Whether a folder with these files holds results of runs: it is `outputs()`, or a run's directory wherever that lies."""
    return (CONFIG in files and STAMP in files) or os.path.realpath(folder) == os.path.realpath(outputs())
