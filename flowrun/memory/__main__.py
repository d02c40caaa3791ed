"""`python -m flowrun.memory`: the table of recipes by card size. With overrides, as those of a run: that run's row, and the
same without gradient checkpointing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from flowrun.compose import compose
from flowrun.config import ConfigError
from flowrun.memory.table import COLUMNS, Row, markdown, recipes, row


def main(overrides: Sequence[str]) -> int:
    try:
        rows = _of_run(overrides) if overrides else [row(name, compose([f"experiment={name}"])) for name in recipes()]
    except ConfigError as error:
        sys.stderr.write(f"flowrun: {error}\n")
        return error.exit_code
    sys.stdout.write(markdown(COLUMNS, [found.cells() for found in rows]) + "\n")
    return 0


def _of_run(overrides: Sequence[str]) -> list[Row]:
    run = compose(overrides)
    found = [row(run.model["name"], run)]
    if run.train.gradient_checkpointing:
        whole = replace(run, train=replace(run.train, gradient_checkpointing=False))
        found.append(row("the same without gradient checkpointing", whole))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
