"""Rows that share their texts, and a run over rows that are all cached."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from figure import Figure, interleaved, seconds
from job import SETTINGS
from memory import command
from PIL import Image

from flowrun.dist import make_dist
from flowrun.run import assemble
from flowrun.stages.cache import fill

CAPTIONS, SHARED, UNCHANGED, PLANNED, FEW, ROUNDS = 10, 1000, 10_000, 100_000, 10, 3
JOB = ("model=emoji_tiny", "data=folder", "task=sft_split", "task.caption_dropout=0", "sample.prompts=[]")


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        return [*_shared(Path(folder) / "shared"), *_unchanged(Path(folder) / "unchanged"), _planned(Path(folder) / "planned")]


def _rows(folder: Path, many: int) -> str:
    """Pictures and captions of 10 kinds, as files of their own; the override that names them."""
    folder.mkdir(parents=True)
    for kind in range(CAPTIONS):
        pixels = np.random.default_rng(kind).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{kind}.png")
        (folder / f"{kind}.txt").write_text(f"noise number {kind}")
    for n in range(CAPTIONS, many):
        for suffix in ("png", "txt"):
            shutil.copyfile(folder / f"{n % CAPTIONS}.{suffix}", folder / f"{n}.{suffix}")
    return f"data.path={folder}"


def _shared(folder: Path) -> list[Figure]:
    """How often the text encoder runs and how many texts are stored for 1,000 rows with 10 captions, and for the same with one each."""
    assembly = assemble([*SETTINGS, *JOB, _rows(folder / "rows", SHARED), f"cache.root={folder / 'cache'}"])
    library = assembly.library
    text = next(i for i, unit in enumerate(library.rows.split.units) if unit.onload_model_names)
    encoded = sum(text in job.units for job in library.rows.jobs(library.missing()))
    fill(assembly, library.work(), make_dist(assembly.run.precision))
    keys = [library.rows.keys(place) for place in library.rows.places()]
    stored = {key for row in keys for (unit, _), key in row.items() if unit == text}
    outputs = sum(unit == text for unit, _ in keys[0])
    texts = len(stored) / outputs
    return [
        Figure(f"texts encoded, {SHARED:,} rows with {CAPTIONS} captions", str(encoded), str(CAPTIONS), encoded == CAPTIONS),
        Figure("texts stored for them", f"{texts:g}", str(CAPTIONS), texts == CAPTIONS and not library.store.missing(list(stored))),
    ]


def _unchanged(folder: Path) -> list[Figure]:
    """The cache stage over rows that are all there, beyond what the same command takes for few rows."""
    many, few = (
        (*JOB, "stage=cache", "tracker=[csv]", _rows(folder / f"rows{count}", count), f"cache.root={folder / f'cache{count}'}")
        for count in (UNCHANGED, FEW)
    )
    for job in (many, few):
        command(folder, *job)  # makes everything
    longer, shorter = interleaved(*[lambda job=job: seconds(lambda: command(folder, *job)) for job in (many, few)], rounds=ROUNDS)
    more, networks = longer - shorter, command(folder, *many).networks
    return [
        Figure(f"a run over {UNCHANGED:,} rows that are all cached, beyond its start-up", f"{more:.2f} s (start-up {shorter:.2f} s)",
               "< 1 s", more < 1, "reading captions, asking for each file's state, hashing keys, writing the manifest"),
        Figure("modules of text encoders that it makes", str(len(networks)), "none", not networks),
    ]  # fmt: skip


def _planned(folder: Path) -> Figure:
    """A dry run over rows of which nothing is known, beyond what the same command takes for few rows."""
    many, few = (
        (*JOB, "dry_run=true", _rows(folder / f"rows{count}", count), f"cache.root={folder / 'cache'}") for count in (PLANNED, FEW)
    )
    longer, shorter = interleaved(*[lambda job=job: seconds(lambda: command(folder, *job)) for job in (many, few)], rounds=1)
    return Figure(f"a dry run of {PLANNED:,} rows, beyond its start-up", f"{longer - shorter:.1f} s (start-up {shorter:.1f} s)")
