"""The rows of a run: of its data, and those that it draws pictures from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flowrun import launch
from flowrun.cache.looks import Looks
from flowrun.config import ConfigError, Run, Stage, Verify
from flowrun.data import Row, Source
from flowrun.feed import live_inputs
from flowrun.files import obstacle
from flowrun.pipelines import Pipeline
from flowrun.prompts import Drawn, Edits, Prompts
from flowrun.remembered import Remembered, remember
from flowrun.splitters import Split


@contextmanager
def looks_of(run: Run) -> Iterator[Looks | None]:
    """What is known of the data's pictures, None where that cannot be written. The first process writes it down: at once, to have
    it after a fault, into a folder that is there; the session does it when the run begins. A dry run writes nothing."""
    root = Path(run.cache.root).absolute()
    looks = None if obstacle(root) else Looks(root, run.cache.verify is not Verify.full)
    if looks is not None and run.dry_run and not len(looks):
        looks = None
    try:
        yield looks
    finally:
        if looks is not None and root.is_dir() and launch.rank() == 0 and not run.dry_run:
            looks.save()


def rows_of(run: Run, source: Source, part: Split) -> tuple[Source, list[Row]]:
    """The data's rows; when its place is gone and nothing live needs it, those that the cache remembers."""
    try:
        return source, source.rows()
    except ConfigError:
        remembered = None
        if (
            source.gone()
            and part.needed
            and run.stage is not Stage.cache
            and not live_inputs(part, (), source)
        ):
            remembered = remember(run, source)
        if remembered is None:
            raise
    return remembered, remembered.rows()


def drawn_of(run: Run, pipeline: Pipeline, part: Split, source: Source, rows: Sequence[Row]) -> Drawn:
    """What is sampled from. part: the units that the conditions need. Raises ConfigError for what cannot be drawn."""
    sample, guided = run.sample, run.sample.guidance != 1
    read = {name for unit in part.units for scope, name in unit.reads if scope == "shared"}
    seen = [name for name in pipeline.inputs if name in read and name != "prompt"]
    if not seen:
        captions = [row.prompt for row in rows[: sample.rows]]
        shape = Counter(row.shape for row in rows).most_common(1)[0][0]
        return Prompts([*sample.prompts, *(text for text in dict.fromkeys(captions) if text not in sample.prompts)], guided, shape)
    if sample.prompts:
        what = f"gives captions alone, but the model also sees {', '.join(seen)} of each row"
        raise ConfigError("sample.prompts", what, "set it to [] and draw the data's first rows, e.g. sample.rows=4")
    if sample.rows and isinstance(source, Remembered):
        raise ConfigError("sample.rows", f"is {sample.rows}, but the data are gone and with them {', '.join(seen)}", "set it to 0")
    return Edits(source, rows[: sample.rows], seen, guided)
