"""A folder of videos and of folders of frames, searched through its sub-folders, each with its caption beside it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from flowrun.cache.key import digest
from flowrun.config import ConfigError, DataError
from flowrun.data import Row, _clip, _sound
from flowrun.data import _picture as picture
from flowrun.data._augment import Look
from flowrun.data._beside import Beside, folder, tell_shared
from flowrun.data._clip import Clip, Frames, Measures
from flowrun.data._listing import Listing, list_folder
from flowrun.data._looking import WHOLE, each_of
from flowrun.data._picture import PictureFault
from flowrun.data._pictures import Found
from flowrun.data._sound import Span
from flowrun.files import HashFile
from flowrun.sound import Hearing


class Start(Enum):
    first = "first"  # from the first frame on
    centre = "centre"  # as much is left out before as after


@dataclass(kw_only=True, slots=True)
class Length:
    """multiple x n + plus frames for some n: as many as the video has, from `least` to `most`."""

    least: int
    most: int
    multiple: int
    plus: int

    def __post_init__(self) -> None:
        if self.multiple < 1 or self.plus < 0:
            raise ConfigError("data.frames", f"is {self.multiple} n + {self.plus}", "multiple is 1 or more, plus 0 or more")
        if not 1 <= self.least <= self.most:
            raise ConfigError("data.frames.least", f"is {self.least}, and most is {self.most}", "give 1 or more, and at most `most`")
        if not self._fits(self.most):
            near = self.of(self.most)
            fix = f"give {near or self.plus} or {(near or self.plus) + self.multiple}"
            raise ConfigError("data.frames.most", f"is {self.most}, which is not {self.multiple} n + {self.plus}", fix)

    def of(self, there: int) -> int | None:
        """How many are taken of so many; None when they are too few."""
        count = (min(there, self.most) - self.plus) // self.multiple * self.multiple + self.plus
        return count if count >= max(self.least, self.plus, 1) else None

    def _fits(self, count: int) -> bool:
        return count >= self.plus and (count - self.plus) % self.multiple == 0


class Video(Beside):
    """Gives `video`, and `audio` to a model that hears it. Rows named by path relative to `path`: "cats/tom.mp4", a folder of
    frames "cats/tom"."""

    names = ("video", "prompt")
    hearing: Hearing | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(Beside.Config):
        frames: Length
        fps: float | None
        start: Start

        def __post_init__(self) -> None:
            Beside.Config.__post_init__(self)
            if self.fps is not None and not self.fps > 0:
                raise ConfigError("data.fps", f"is {self.fps}", "give frames per second, or null for the file's own")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if find_spec("av") is None:
            raise ConfigError("data.source", "video needs the package av", "pip install 'flowrun[video]'")

    def listen(self, hearing: Hearing) -> None:
        fps = self.config.fps
        if fps != hearing.fps:
            what = f"is {'null' if fps is None else f'{fps:g}'}, but the model's sound goes by {hearing.fps:g} frames a second"
            raise ConfigError("data.fps", what, f"give data.fps={hearing.fps:g}, or another model.fps")
        self.hearing, self.names = hearing, ("video", "audio", "prompt")

    def find(self) -> Found:
        root = folder(self.config.path)
        ending = self.config.caption.ending
        listing = list_folder(root, ending, (*_clip.EXTENSIONS, *picture.EXTENSIONS), folders=True)
        clips = _clips(root, listing)
        if not clips and not listing.faults:
            kinds = f"videos end in {', '.join(_clip.EXTENSIONS)}; frames lie in a sub-folder for each video"
            raise ConfigError("data.path", f"{root} holds no videos ({listing.ignored} other files)", kinds)
        tell_shared(list(clips), ending)
        entries = [self._entry(root, listing, name, {"video": clip}) for name, clip in clips.items()]
        return Found([*self._unlisted(root, listing), *entries], listing.ignored, listing.unread())

    def _measures(self, files: Sequence[Clip]) -> Iterator[Any]:
        look = partial(_measured, max_pixels=self.config.max_pixels, full=self._full, hears=self.hearing is not None)
        return each_of(look, files, WHOLE)

    def _fit(self, file: Clip, measured: tuple[Measures, Span | None]) -> dict[str, Any]:
        seen, heard = measured
        times = self._taken(seen.times, isinstance(file, Frames))
        if heard is not None:
            heard.check(*self._lasts(times))
        size = self.config.geometry.target(seen.height, seen.width)
        return {"size": size, "frames": len(times), "extra": {"times": times}}

    def _taken(self, times: Sequence[float], as_they_are: bool) -> tuple[float, ...]:
        """Which of the frames, by time. Raises PictureFault when there are too few."""
        fps, rule = None if as_they_are else self.config.fps, self.config.frames
        if fps is not None:
            count = math.floor((times[-1] - times[0] + _clip.TICK_S) * fps) + 1
            times = [times[0] + number / fps for number in range(count)]
        length = rule.of(len(times))
        if length is None:
            least = max(rule.least, rule.plus)
            raise PictureFault(f"is too short: {len(times)} frames{'' if fps is None else f' at {fps:g} per second'}, {least} are needed")
        first = 0 if self.config.start is Start.first else (len(times) - length) // 2
        return tuple(times[first : first + length])

    def _decoded(self, file: Clip, row: Row, look: Look) -> Tensor:
        """uint8 [F, 3, H, W], every frame cut alike. Raises PictureFault."""
        frames = _clip.read(file, row.extra["times"], self.config.max_pixels, tuple(self.config.ground))
        return torch.stack([picture.to_tensor(self._shaped(frame, row.size, look)) for frame in frames])

    def load(self, row: Row, names: Collection[str] | None = None) -> dict[str, Any]:
        wanted, inputs = self.names if names is None else names, super().load(row, names)
        if self.hearing is not None and "audio" in wanted:
            try:
                inputs["audio"] = _sound.read(row.files["video"], *self._lasts(row.extra["times"]), self.hearing)
            except PictureFault as error:
                fix = "repair or remove it; data.check=full finds such files early"
                raise DataError([f"{row.files['video']}: {error}"], fix) from error
        return inputs

    def fingerprints(self, row: Row, hash_file: HashFile) -> dict[str, bytes]:
        found = super().fingerprints(row, hash_file)
        if self.hearing is not None:
            rules = [asdict(self.hearing), _sound.DECODING, version("av"), *self._lasts(row.extra["times"])]
            found["audio"] = digest("audio", hash_file(row.files["video"]), *rules)
        return found

    def _lasts(self, times: Sequence[float]) -> tuple[float, float]:
        """Of frames at these times: from when, for how many seconds."""
        return times[0], len(times) / self.hearing.fps

    def _content(self, file: Clip, hash_file: HashFile, rules: Sequence[Any]) -> bytes:
        frames = [hash_file(one) for one in file.files()] if isinstance(file, Frames) else hash_file(file)
        return digest("video", frames, *rules)

    def _made_by(self) -> dict[str, Any]:
        c = self.config
        taken = {"frames": asdict(c.frames), "fps": c.fps, "start": c.start.value}
        return {**super()._made_by(), **taken}

    def decoders(self) -> dict[str, Any]:
        return {**super().decoders(), "video": _clip.DECODING, "av": version("av")}


def _measured(file: Clip, max_pixels: int, full: bool, hears: bool) -> tuple[Measures, Span | None]:
    """Raises PictureFault."""
    return _clip.measure(file, max_pixels, full), _sound.measure(file, full) if hears else None


def _clips(root: Path, listing: Listing) -> dict[str, Clip]:
    """Name -> clip, in sorted order; a folder's name ends in `/`. Pictures in the root itself are none, and stay unread."""
    clips: dict[str, Clip] = {}
    frames: dict[str, list[str]] = {}
    for name in listing.pictures:
        path = PurePosixPath(name)
        if path.suffix.lower() in _clip.EXTENSIONS:
            clips[name] = root / name
        elif path.parent.name:
            frames.setdefault(f"{path.parent}/", []).append(path.name)
        else:
            listing.add_others(root, [*listing.others.get(root, []), path.name])
    clips |= {name: Frames(root / name, tuple(files)) for name, files in frames.items()}
    return dict(sorted(clips.items()))
