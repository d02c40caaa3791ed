"""What a cache holds of a run's rows, decoded back to pictures: `python -m flowrun.cache show RUN_DIR`."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from flowrun.config import ConfigError
from flowrun.contact import SIDE, spread
from flowrun.finished import read_config
from flowrun.graph import Draws, Executor, State, UnitGraph
from flowrun.grids import grid, to_image
from flowrun.run import Assembly, assemble


def cached_pictures(run_dir: Path) -> Image.Image:
    """A sheet of the cached targets of up to 64 rows of the run, each under its caption; loads what decodes them.

    Raises ConfigError when the directory is no run's, or when its cache holds none of its targets."""
    run = read_config(run_dir)
    run.stage, run.resume, run.dry_run = None, "none", False
    assembly = assemble(run)
    if assembly.library is None:
        raise ConfigError("RUN_DIR", f"{run_dir} uses no cache", "give a run of a task such as sft_split")
    needed, live = _units(assembly)
    assembly.pipeline.load(assembly.pipeline.decoders, torch.device("cpu"), assembly.dtype)
    assembly.pipeline.settle(torch.device("cpu"))
    configs = {name: component.configure() for name, component in assembly.pipeline.components().items()}
    executor, variants = Executor(assembly.split.units, assembly.pipeline.models, configs), assembly.variants
    tiles, captions = [], []
    for number, index in enumerate(spread(assembly.rows)):
        variant = number % assembly.source.variants * len(variants.changes)  # the algorithm leaves this one as it is
        if not _lacks(assembly, index, variant, needed - live):
            tiles.append(_picture(assembly, executor, index, variant, live))
            captions.append(variants.row(assembly.rows[index], variant).prompt)
    if not tiles:
        raise ConfigError("RUN_DIR", f"{assembly.library.root} holds no targets of {run_dir}", "fill it with stage=cache")
    return grid(tiles, captions)


def _units(assembly: Assembly) -> tuple[set[int], set[int]]:
    """The units that the target is made by, and those of them that are live. Raises ConfigError when these call a model."""
    units = assembly.split.units
    needed = set(UnitGraph(units).needed_for([("shared", assembly.pipeline.target)]))
    live = needed & set(assembly.split.live)
    if models := {name.partition(".")[0] for i in live for name in units[i].onload_model_names}:
        raise ConfigError("RUN_DIR", f"its targets are made by {', '.join(models)} and not cached", "look at another run")
    return needed, live


def _lacks(assembly: Assembly, index: int, variant: int, cached: set[int]) -> bool:
    """Whether a value of these units is not there."""
    keys = assembly.library.rows.keys(index * len(assembly.variants) + variant)
    return bool(assembly.library.store.missing([key for (unit, _), key in keys.items() if unit in cached]))


def _picture(assembly: Assembly, executor: Executor, index: int, variant: int, live: set[int]) -> Image.Image:
    pipeline, row = assembly.pipeline, assembly.rows[index]
    (records,) = assembly.library.records([(index, variant)])
    state = executor.run(State(), Draws(assembly.run.seed, row.id, 0), live, records)
    image = to_image(pipeline.decode(state.shared[pipeline.target][None])[0])  # [3, H, W]
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return image
