"""Share of a run's last samples that are nearest to the picture of their caption: `python -m flowrun.nearest RUN_DIR`.

Pixels in [-1, 1], distance = mean squared error, compared with every picture of the run's own data. It measures what
a small model has learned by heart, and is no score of generalisation.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor

from flowrun.config import ConfigError, UserError
from flowrun.data import Source, make_source
from flowrun.files import write_atomic
from flowrun.utf8 import speak_utf8


@dataclass(frozen=True, kw_only=True)
class Score:
    """accuracy: share of the counted samples whose nearest picture has their own caption. mse: their mean distance to
    the (nearest) picture of that caption. unknown: prompts that are no caption of the data; they count for neither."""

    accuracy: float
    mse: float
    counted: int
    unknown: tuple[str, ...]
    missed: tuple[tuple[str, str], ...]  # (prompt, caption of the nearest picture)


@dataclass(frozen=True)
class Match:
    """hit: the nearest picture, whose caption is `nearest`, is of the sample's own caption. mse: distance to the (nearest) own one."""

    hit: bool
    mse: float
    nearest: str


def matches(samples: Tensor, prompts: Sequence[str], pictures: Tensor, captions: Sequence[str]) -> list[Match | None]:
    """For each sample, None when its prompt is no caption. Arguments as for `score`."""
    found: list[Match | None] = []
    for sample, prompt in zip(samples, prompts, strict=True):
        row = (pictures - sample).square().flatten(1).mean(1)                        # [M]
        own = torch.tensor([caption == prompt for caption in captions])              # [M]
        mse = float(row[own].min()) if own.any() else None
        found.append(mse if mse is None else Match(mse <= float(row.min()), mse, captions[int(row.argmin())]))
    return found


def score(samples: Tensor, prompts: Sequence[str], pictures: Tensor, captions: Sequence[str]) -> Score:
    """samples: [N, 3, H, W] with N prompts; pictures: [M, 3, H, W] with M captions; floats in [-1, 1].

    Raises ValueError when no prompt is a caption."""
    found = list(zip(prompts, matches(samples, prompts, pictures, captions), strict=True))
    known = [(prompt, match) for prompt, match in found if match is not None]
    if not known:
        raise ValueError("no prompt is a caption of the data")
    missed = tuple((prompt, match.nearest) for prompt, match in known if not match.hit)
    return Score(
        accuracy=1 - len(missed) / len(known),
        mse=sum(match.mse for _, match in known) / len(known),
        counted=len(known),
        unknown=tuple(prompt for prompt, match in found if match is None),
        missed=missed,
    )


def of_run(run_dir: Path) -> Score:
    """The score of the newest samples in `run_dir`, saved there as nearest.json. Raises ConfigError, DataError."""
    if not run_dir.is_dir():
        raise ConfigError("RUN_DIR", f"{run_dir} is no directory", "give a run's directory, outputs/runs/train/...")
    folders = sample_folders(run_dir)
    if not folders:
        raise ConfigError("RUN_DIR", f"{run_dir} holds no samples", "train with sample.prompts=[...]")
    folder = folders[-1]
    samples, drawn = read_samples(folder)
    prompts = [prompt for prompt, _ in drawn]
    pictures, captions = pictures_of(_source(run_dir), tuple(samples.shape[-2:]))
    if not set(prompts) & set(captions):
        known = f"sample captions of the data, e.g. 'sample.prompts=[{captions[0]}]'"
        raise ConfigError(
            "sample.prompts", f"none of the {len(prompts)} prompts in {folder} is a caption of the data", known
        )
    result = score(samples, prompts, pictures, captions)
    report = {"samples": folder.name, **asdict(result)}
    write_atomic(run_dir / "nearest.json", (json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode())
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flowrun.nearest", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run's directory")
    try:
        result = of_run(parser.parse_args(arguments).run_dir)
    except UserError as error:
        sys.stderr.write(f"flowrun: {error}\n")
        return error.exit_code
    unknown = f"; {len(result.unknown)} more have prompts that are no captions" if result.unknown else ""
    sys.stdout.write(f"accuracy {result.accuracy:.3f}  mse {result.mse:.4f}  over {result.counted} samples{unknown}\n")
    for prompt, nearest in result.missed:
        sys.stdout.write(f"  {prompt!r} is nearest to {nearest!r}\n")
    return 0


def _source(run_dir: Path) -> Source:
    """The run's data source, built from the configuration that the run saved."""
    saved = run_dir / "config.yaml"
    if not saved.is_file():
        raise ConfigError("RUN_DIR", f"{run_dir} holds no config.yaml", "give the directory of a run")
    return make_source(OmegaConf.to_container(OmegaConf.load(saved).data, resolve=True))


def pictures_of(source: Source, size: tuple[int, int]) -> tuple[Tensor, list[str]]:
    """Those of the data's pictures that have the samples' (height, width): [M, 3, H, W], and their captions."""
    rows = [row for row in source.rows() if row.size == size]
    if not rows:
        raise ConfigError(
            "data", f"has no picture of the samples' size {size[0]}x{size[1]}", "score a run of this data"
        )
    images = torch.stack([source.load(row, ("image",))["image"] for row in rows])  # uint8 [M, 3, H, W]
    return images.float() / 127.5 - 1, [row.prompt for row in rows]


def sample_folders(run_dir: Path) -> list[Path]:
    """Those of the steps at which the run drew samples, in order."""
    tables = run_dir.glob("samples/step-*/samples.csv")
    return sorted((table.parent for table in tables), key=lambda folder: int(folder.name.partition("-")[2]))


def read_samples(folder: Path) -> tuple[Tensor, list[tuple[str, str]]]:
    """A step's samples [N, 3, H, W], fp32 in [-1, 1], and (prompt, seed) of each. Raises ConfigError for videos."""
    with open(folder / "samples.csv", newline="", encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    if any(not row["file"].endswith(".png") for row in rows):
        raise ConfigError("RUN_DIR", f"the samples in {folder} are videos", "give a run that draws pictures")
    return torch.stack([read_picture(folder / row["file"]) for row in rows]), [(row["prompt"], row["seed"]) for row in rows]


def read_picture(path: Path) -> Tensor:
    """[3, H, W], fp32 in [-1, 1]."""
    with Image.open(path) as picture:
        pixels = torch.from_numpy(np.array(picture.convert("RGB")))  # uint8 [H, W, 3]
    return pixels.permute(2, 0, 1).float() / 127.5 - 1  # [3, H, W]


if __name__ == "__main__":
    speak_utf8()
    sys.exit(main())
