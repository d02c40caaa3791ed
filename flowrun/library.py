"""The cached values of one run: which keys its rows and prompts have, which are missing, and records read back.

Keys follow from configuration and data alone, so the train stage knows what it expects before it reads anything; a value
made by other code, another model or other data has another key and is simply not there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from flowrun.cache.code import code_identity
from flowrun.cache.key import digest
from flowrun.cache.keyplan import KeyPlan, Output
from flowrun.cache.layout import Layout
from flowrun.cache.manifest import UNNAMED, Manifest, Part, Parts, manifest_path, newest_manifest, write_manifest
from flowrun.cache.pace import Pace, Work
from flowrun.cache.prune import needed_keys
from flowrun.cache.reader import Reader
from flowrun.cache.sources import Sources
from flowrun.cache.store import Store
from flowrun.cache.tensorfile import Damaged
from flowrun.config import ConfigError, Run, Verify
from flowrun.data import Row, Source
from flowrun.files import obstacle
from flowrun.graph import Record
from flowrun.pipelines import Pipeline
from flowrun.prompts import Drawn
from flowrun.remembered import Remembered
from flowrun.shelf import Job, Shelf
from flowrun.splitters import Split
from flowrun.variants import Variants

log = logging.getLogger(__name__)

LIBRARIES = ("diffusers", "transformers")  # their code computes what a model returns


class Library:
    """Raises ConfigError when a component or a unit cannot be identified, DataError when a source file cannot be read."""

    def __init__(
        self,
        run: Run,
        pipeline: Pipeline,
        source: Source,
        rows: Sequence[Row],
        drawn: Drawn,
        prompts: Sequence[Row],
        variants: Variants,
        split: Split,
        prompt_split: Split,
    ) -> None:
        self.run, self.pipeline = run, pipeline
        self.root = Path(run.cache.root).absolute()
        if not self.root.is_dir() and (why := obstacle(self.root)):  # one that is there may be for reading only
            raise ConfigError("cache.root", f"is {self.root}: {why}", "name a folder that may be written")
        self.store = Store(self.root, run.cache.verify)
        # A dry run opens no file to its end, unless it is asked to: what was never read is nowhere in the cache, or not yet known to be.
        self.sources = Sources(self.root, run.cache.verify, not run.dry_run or run.cache.verify is Verify.full)
        self.pace = Pace(self.root)
        self._kinds: dict[tuple[Shelf, tuple[int, ...], tuple[int, int]], str] = {}
        self.identities = {
            name: _identity(pipeline.identity(name, self.sources.hash_file), run.model["dtype"])
            for name in sorted({*split.models_cached, *prompt_split.models_cached})
        }
        context = digest("matmul", torch.get_float32_matmul_precision())
        self.rows, self.prompts = (
            Shelf(
                part,
                data,
                listed,
                changes,
                KeyPlan(part, self.identities, context, run.seed, run.cache.batch),
                self.sources.hash_file,
                self.store,
            )
            for part, data, listed, changes in (
                (split, source, rows, variants),
                (prompt_split, drawn, prompts, Variants(drawn)),
            )
        )

    def missing(self) -> set[bytes]:
        """Keys that this run needs and the cache lacks."""
        self.store.refresh()
        return set(self.store.missing(self.all_keys()))

    def all_keys(self) -> list[bytes]:
        """Every key once, in order."""
        return self._all_keys

    @cached_property
    def _all_keys(self) -> list[bytes]:
        return list(dict.fromkeys(key for shelf in (self.rows, self.prompts) for keys in shelf.each() for key in keys))

    def kind(self, job: Job) -> str:
        """What a job runs, as one number: the same for rows of one size that the same code and models encode."""
        found = job.shelf, job.units, job.shape
        if found not in self._kinds:
            units = [job.shelf.split.units[i] for i in job.units]
            models = sorted({name for unit in units for name in unit.onload_model_names})
            made_by = [code_identity(unit) for unit in units], [self.identities[name] for name in models]
            self._kinds[found] = digest("kind of work", *made_by, job.shape).hex()
        return self._kinds[found]

    def forecast(self, jobs: Sequence[Job]) -> Work:
        """What those of the jobs will come to whose kind was done before. rows: how many these are."""
        return self.pace.forecast(map(self.kind, jobs))

    def work(self, missing: set[bytes] | None = None) -> list[Job]:
        """What the cache stage has to do. missing: keys that the cache lacks; None: as of now."""
        missing = self.missing() if missing is None else missing
        rows = self.rows.jobs(missing)
        made = {key for job in rows for key in self.rows.keys(job.place).values()} if self.prompts.rows else set()
        return rows + self.prompts.jobs(missing - made)

    def require(self, command: str) -> None:
        """Raises ConfigError when anything is missing: what, why as far as can be told, and the command that repairs."""
        missing, source = self.missing(), self.rows.source
        there = newest_manifest(self.root, self.run.model["name"], self.run.data["source"], source.place())
        changed = [] if there is None else there.parts.differences(self.parts())
        otherwise = [] if there is None else there.parts.warnings(self.parts())
        for warning in otherwise if not missing else ():
            log.warning("cache: %s; the last bits of its values may differ from those made now", warning)
        if changed and isinstance(self.rows.source, Remembered):
            raise ConfigError(
                "data",
                f"its folder is gone and the cache was made otherwise: {'; '.join(changed)}",
                "bring the data back, or use the settings that the cache was made with",
            )
        if not missing:
            return
        names = sorted(
            {
                f"{shelf.split.units[u].name}.{p[1]}"
                for shelf in (self.rows, self.prompts)
                for place in shelf.places()
                for (u, p), key in shelf.keys(place).items()
                if key in missing
            }
        )
        what = f"needs the cache, but {len(missing)} of {len(self.all_keys())} values are not in {self.root} ({', '.join(names)})"
        damage = [f"found damaged: {fault}" for fault in self.store.faults(missing)]
        raise ConfigError("stage=train", "; ".join([what, *changed, *otherwise, *damage]), f"run: {command}")

    def records(self, visits: Sequence[tuple[int, int]]) -> list[dict[int, Record]]:
        """Of each (row, variant): what its cached units returned."""
        return self.rows.reader.batch(visits)

    def stacked(self, visits: Sequence[tuple[int, int]], output: Output) -> Tensor:
        """One kept output of each (row, variant): [len(visits), ...]. Raises ValueError when they are not alike."""
        return self.rows.stacked(visits, output)

    def prompt_records(self) -> list[dict[int, Record]]:
        return self.prompts.reader.batch([(row, 0) for row in range(len(self.prompts.rows))])

    def stored(self, job: Job, missing: set[bytes]) -> dict[int, Record]:
        """What the cache already has of a job's units that need not run."""
        keys = {
            output: key
            for output, key in job.shelf.keys(job.place).items()
            if output[0] not in job.units and key not in missing
        }
        return Reader(self.store, job.shelf.split.units, lambda row, variant: keys).records(0, 0)

    def parts(self) -> Parts:
        """Everything that reaches the keys, for people: what a later run compares itself with."""
        run = self.run
        dtype, batch = run.model["dtype"], str(run.cache.batch)
        made_of = {name: Part(key.hex(), f"{dtype} {self.pipeline.describe(name)}") for name, key in self.identities.items()}
        made_of |= {
            f"data.{name}": Part(str(value), str(value))
            for name, value in run.data.items()
            if name not in self.rows.source.not_content
        }
        made_of |= {
            f"unit {unit.name}": Part(code_identity(unit).hex(), f"version {unit.version}, {dict(unit.settings)}")
            for i in self.rows.split.needed
            for unit in [self.rows.split.units[i]]
        }
        made_of |= {name: Part(installed, installed) for name, installed in _versions().items()}
        made_of |= {"cache.batch": Part(batch, batch)} if batch != UNNAMED["cache.batch"].identity else {}
        environment = {"torch": torch.__version__, **{name: str(version) for name, version in self.rows.source.decoders().items()}}
        return Parts(run.model["name"], run.data["source"], made_of, environment, self.rows.source.place())

    def keep_manifest(self) -> None:
        """Write down which rows have which keys, unless it says so there already: a run may find all that it needs among others' values."""
        self.sources.save()
        if not self._is_listed() and not obstacle(Layout(self.root).manifests):
            self.save_manifest({})

    def _is_listed(self) -> bool:
        """Whether the manifest of these parts lists these rows with these keys."""
        try:
            there = Manifest(manifest_path(self.root, self.parts()))
        except (FileNotFoundError, Damaged):
            return False
        listed = [(row.id, shelf.stamp(number)) for shelf in (self.rows, self.prompts) for number, row in enumerate(shelf.rows)]
        known = zip(there.ids.all(), map(bytes, there.sources), strict=True)
        return listed == list(known) and set(self.all_keys()) == needed_keys([there])

    def save_manifest(self, faults: Mapping[str, str], begun: bool = False) -> None:
        """Write down which rows have which keys. faults: row id -> why it has none. begun: the values are still to be made."""
        self.sources.save()
        write_manifest(
            self.root,
            self.parts(),
            [
                shelf.manifest_row(number, faults.get(row.id, ""))
                for shelf in (self.rows, self.prompts)
                for number, row in enumerate(shelf.rows)
            ],
            begun,
        )


def _identity(component: bytes, dtype: str) -> bytes:
    """A model is its configuration and weights, the precision they are held in, and the code that runs them."""
    return digest(component, str(dtype), _versions())


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in LIBRARIES}
