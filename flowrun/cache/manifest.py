"""Manifests: what a cache run made, from what, for which rows. One file per distinct set of parts. No torch.

Beside it may lie a second file, of a run that has begun and not come to its end. It keeps what that has made so far from
being pruned, and counts for nothing else: it goes when the run's own manifest appears.

R rows, K kept outputs over all variants:

    keys        [R, K, 16]  0 where a row has no value (see faults)
    sizes       [R, 2]      height and width in pixels
    frames      [R]         of a video; 0 for a picture. Older manifests have none
    sources     [R, 16]     fingerprint of what the row was made from
    ids.*, captions.*, faults.*   packed strings; a row without fault has an empty one
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flowrun.cache.key import KEY_BYTES, digest
from flowrun.cache.layout import MANIFEST_NAME, Layout
from flowrun.cache.tensorfile import Damaged, Strings, TensorFile, pack, table, write_tensorfile

FORMAT = "flowrun-cache-manifest-1"
NO_KEY = bytes(KEY_BYTES)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that cached values were made of or by. identity: hexadecimal or plain text; describe: for people."""

    identity: str
    describe: str


UNNAMED = {"cache.batch": Part("1", "1")}  # parts that are named only where they are otherwise


@dataclass(frozen=True)
class Parts:
    """Everything that reaches the keys of a run, by name ("text_encoder", "data.size", "unit text", "diffusers", ...).

    model, data: names of the model and of the data set, under which the newest manifest is found. environment: what is
    recorded without being part of any key (torch's version, the device). place: where the data were, if that can change.
    """

    model: str
    data: str
    made_of: Mapping[str, Part]
    environment: Mapping[str, str] = field(default_factory=dict)
    place: str = ""

    @property
    def id(self) -> str:
        """Equal for equal parts, whatever the environment."""
        return digest(self.model, self.data, {name: part.identity for name, part in self.made_of.items()}).hex()[:16]

    def differences(self, configured: Parts) -> list[str]:
        """One line for each part in which `configured` differs from these, the cached ones."""
        names = dict.fromkeys([*self.made_of, *configured.made_of])
        pairs = [(name, self._part(name), configured._part(name)) for name in names]
        return [_line(name, old, new) for name, old, new in pairs if _identity(old) != _identity(new)]

    def _part(self, name: str) -> Part | None:
        return self.made_of.get(name, UNNAMED.get(name))

    def warnings(self, present: Parts) -> list[str]:
        """One line for each difference that changes no key but may change a value's last bits."""
        return [f"{name}: cached with {old}, now {present.environment[name]}" for name, old in self.environment.items()
                if present.environment.get(name, old) != old]  # fmt: skip


def _identity(part: Part | None) -> str | None:
    return None if part is None else part.identity


def _line(name: str, cached: Part | None, configured: Part | None) -> str:
    if cached is None:
        return f"{name}: nothing was cached with it, configured {configured.describe}"
    if configured is None:
        return f"{name}: cached with {cached.describe}, no longer configured"
    old, new = cached.describe, configured.describe
    if old == new:  # the same words for other content
        old, new = f"{old} [{cached.identity[:12]}]", f"{new} [{configured.identity[:12]}]"
    return f"{name}: cached with {old}, configured {new}"


class Kept(NamedTuple):
    """One column of keys: an output of a unit under one of the algorithm's variants of a row."""

    variant: int
    unit: str
    scope: str
    name: str


class ManifestRow(NamedTuple):
    """size: (height, width). source: 16-byte fingerprint. fault: why the row has no values, or "". keys: by Kept.
    frames: of a video."""

    id: str
    caption: str
    size: tuple[int, int]
    source: bytes
    fault: str
    keys: Mapping[Kept, bytes]
    frames: int | None = None


def manifest_path(root: Path, parts: Parts, begun: bool = False) -> Path:
    """Data in two places are two data sets, each with its rows."""
    stamp = digest(parts.id, parts.place, *(["begun"] if begun else [])).hex()[:16]
    return Layout(Path(root)).manifests / f"{_safe(parts.model)}-{_safe(parts.data)}-{stamp}.safetensors"


def write_manifest(root: Path, parts: Parts, rows: Sequence[ManifestRow], begun: bool = False) -> Path:
    """Write, or replace, the manifest of `parts` in the cache at `root`. begun: their values are still being made.

    Raises Failure when the disk is full."""
    kept = list(dict.fromkeys(column for row in rows for column in row.keys))
    keys = b"".join(row.keys.get(column, NO_KEY) for row in rows for column in kept)
    arrays = [
        table("keys", np.frombuffer(keys, np.uint8).reshape(len(rows), len(kept), KEY_BYTES)),
        table("sizes", np.array([row.size for row in rows], np.uint32).reshape(-1, 2)),
        table("frames", np.array([row.frames or 0 for row in rows], np.uint32)),
        table("sources", np.frombuffer(b"".join(row.source for row in rows), np.uint8).reshape(-1, KEY_BYTES)),
    ]
    for name, strings in (
        ("ids", [r.id for r in rows]),
        ("captions", [r.caption for r in rows]),
        ("faults", [r.fault for r in rows]),
    ):
        arrays += pack(name, strings)
    Layout(Path(root)).create()
    path = manifest_path(root, parts, begun)
    told = {"created": str(time.time_ns()), "parts": json.dumps(asdict(parts)), "kept": json.dumps(kept)}
    write_tensorfile(path, FORMAT, arrays, told | ({"begun": "true"} if begun else {}))
    if not begun:
        manifest_path(root, parts, begun=True).unlink(missing_ok=True)
    return path


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "_", name) or "_"


class Manifest:
    """An open manifest; rows are read when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError, Damaged, OtherFormat."""
        self.path, self.file = path, TensorFile(path, FORMAT)
        parts = json.loads(self.file.metadata["parts"])
        made_of = {name: Part(**part) for name, part in parts["made_of"].items()}
        self.parts = Parts(parts["model"], parts["data"], made_of, parts["environment"], parts["place"])
        self.created = int(self.file.metadata["created"])  # ns since 1970
        self.begun = "begun" in self.file.metadata  # and not ended
        self.kept = [Kept(*column) for column in json.loads(self.file.metadata["kept"])]
        self.keys = self.file.array("keys")  # [R, K, 16]
        self.sizes, self.sources = self.file.array("sizes"), self.file.array("sources")
        self.frames = self.file.array("frames") if "frames" in self.file.spans else np.zeros(len(self.sizes), np.uint32)  # [R]
        self.ids, self.captions, self.faults = (Strings(self.file, name) for name in ("ids", "captions", "faults"))

    def __len__(self) -> int:
        return len(self.ids)

    def row(self, number: int) -> ManifestRow:
        keys = {
            column: key for at, column in enumerate(self.kept) if (key := self.keys[number, at].tobytes()) != NO_KEY
        }
        height, width = self.sizes[number].tolist()
        return ManifestRow(
            self.ids[number],
            self.captions[number],
            (height, width),
            self.sources[number].tobytes(),
            self.faults[number],
            keys,
            int(self.frames[number]) or None,
        )

    def rows(self) -> Iterator[ManifestRow]:
        return (self.row(number) for number in range(len(self)))

    def used_keys(self) -> np.ndarray:
        """Every key that some row has [N, 16], with repetitions."""
        keys = self.keys.reshape(-1, KEY_BYTES)
        return keys[keys.any(axis=1)]


def manifests(root: Path) -> tuple[list[Manifest], list[Damaged]]:
    """All manifests of a cache, newest first, and the faults of those that cannot be read."""
    found: list[Manifest] = []
    faults: list[Damaged] = []
    for path in sorted(Layout(Path(root)).manifests.glob("*.safetensors")):
        if MANIFEST_NAME.fullmatch(path.name):
            try:
                found.append(Manifest(path))
            except Damaged as fault:
                faults.append(fault)
    return sorted(found, key=lambda manifest: -manifest.created), faults


def newest_manifest(root: Path, model: str, data: str, place: str) -> Manifest | None:
    """The last one written at the end of a run for these names and this place of the data, whatever its other parts."""
    found, faults = manifests(root)
    for fault in faults:
        log.warning("cache: %s; it is passed over", fault)
    whole = (manifest for manifest in found if not manifest.begun)
    return next((m for m in whole if (m.parts.model, m.parts.data, m.parts.place) == (model, data, place)), None)
