"""One video -> RGB frames, decoded by PyAV, by rules that are part of its content key; or a folder of frames, by Pillow.

Times are seconds as the file has them. A video is known by the times of its packets, which its container holds; what is
decoded is the frame nearest to each time that is asked for, so that a varying rate needs no care.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from flowrun.data import _picture as picture
from flowrun.data._picture import PictureFault

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

EXTENSIONS = (".mp4", ".webm", ".mkv", ".mov", ".avi", ".gif")
DECODING = 2  # raise when a file may decode to other frames or pixels than before
TICK_S = 1e-3  # to which some containers round times
EVEN_S = 1e-6  # times that differ by less are one
SLACK_S = 0.1  # by which a container's duration may be longer than what lies in it
UPRIGHT = {90: Image.Transpose.ROTATE_90, -90: Image.Transpose.ROTATE_270,
           180: Image.Transpose.ROTATE_180, -180: Image.Transpose.ROTATE_180}  # fmt: skip
WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}  # FFmpeg's own decoders pass over their alpha
NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True, slots=True)
class Frames:
    """A folder of frames. names: of its pictures."""

    folder: Path
    names: tuple[str, ...]

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def name(self) -> str:
        return self.folder.name

    def files(self) -> list[Path]:
        """In order of their numbers. Raises PictureFault when these have gaps, or names are not alike but for them."""
        found: dict[int, str] = {}
        for name in self.names:
            match = NUMBERED.fullmatch(Path(name).stem)
            if match is None:
                raise PictureFault(f"holds {name}, which has no number at its end, so it is no folder of frames")
            if (twin := found.setdefault(int(match[2]), name)) != name:
                raise PictureFault(f"has two frames of one number, {twin} and {name}")
        if len(starts := {NUMBERED.fullmatch(Path(name).stem)[1] for name in self.names}) > 1:
            raise PictureFault(f"holds frames of several videos: {', '.join(sorted(starts))}")
        first, last = min(found), max(found)
        if gaps := [number for number in range(first, last) if number not in found]:
            raise PictureFault(f"has frames {first} to {last}, but no {gaps[0]}")
        return [self.folder / found[number] for number in range(first, last + 1)]


Clip = Path | Frames


@dataclass(frozen=True, slots=True)
class Measures:
    """height, width: of the upright frames. times: of all of them, ascending; of a folder's frames their places."""

    height: int
    width: int
    times: tuple[float, ...]


def measure(clip: Clip, max_pixels: int, full: bool) -> Measures:
    """From the container and the first frame; with `full` all frames are decoded. Raises PictureFault."""
    if isinstance(clip, Frames):
        return _measure_frames(clip, max_pixels, full)
    with _opened(clip) as (container, stream):
        if stream.height * stream.width > max_pixels:
            raise PictureFault(f"has {stream.height * stream.width} pixels, more than data.max_pixels = {max_pixels}")
        times = _times(container, stream)
    with _opened(clip) as (container, stream):
        frames = _decoded(container, stream)
        _, first = next(frames, (0.0, None))
        if first is None:
            raise PictureFault("no frame of it can be decoded")
        for _ in frames if full else ():
            pass
    turned = first.rotation % 180 == 90
    return Measures(*((first.width, first.height) if turned else (first.height, first.width)), times)


def read(clip: Clip, times: Sequence[float], max_pixels: int, ground: tuple[int, int, int]) -> Iterator[Image.Image]:
    """The frame nearest to each time, of two the earlier one: upright, RGB, transparent parts laid over `ground`.

    times: ascending; of a folder's frames their places. Raises PictureFault."""
    if isinstance(clip, Frames):
        files = clip.files()
        yield from (picture.read(files[round(place)], max_pixels, ground) for place in times)
        return
    with _opened(clip) as (container, stream):
        for frame, count in _nearest(_decoded(container, stream), times):
            yield from [_rgb(frame, ground)] * count


def _nearest(frames: Iterator[tuple[float, VideoFrame]], times: Sequence[float]) -> Iterator[tuple[VideoFrame, int]]:
    """(frame, how many of the times it is nearest to), for frames that are."""
    done, before = 0, None
    for time, frame in frames:
        count = 0
        while before is not None and done + count < len(times) and 2 * times[done + count] <= before[0] + time + EVEN_S:
            count += 1
        if count:
            yield before[1], count
            done += count
        if done == len(times):
            return
        before = time, frame
    if before is None or times[-1] > before[0] + SLACK_S:
        raise PictureFault(f"ends at {0.0 if before is None else before[0]:.2f} s: what follows cannot be decoded")
    yield before[1], len(times) - done


def _measure_frames(clip: Frames, max_pixels: int, full: bool) -> Measures:
    files = clip.files()
    sizes = {}
    for file in files:
        try:
            sizes.setdefault(picture.check(file, max_pixels, full), file.name)
        except PictureFault as error:
            raise PictureFault(f"frame {file.name} {error}") from error
    if len(sizes) > 1:
        told = ", ".join(f"{name} {width}x{height}" for (height, width), name in sizes.items())
        raise PictureFault(f"its frames differ in size ({told})")
    (height, width), *_ = sizes
    return Measures(height, width, tuple(map(float, range(len(files)))))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    import av

    try:
        if path.stat().st_size == 0:
            raise PictureFault("the file is empty (0 bytes)")
        with av.open(str(path), metadata_errors="replace") as container:
            if not container.streams.video:
                raise PictureFault("holds no video")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            if stream.sample_aspect_ratio not in (None, 0, 1):
                raise PictureFault(f"its pixels are {stream.sample_aspect_ratio} times as wide as high; square ones are needed")
            yield container, stream
    except (av.FFmpegError, OSError) as error:
        raise PictureFault(f"cannot be read: {error.strerror or error}") from error


def _times(container: InputContainer, stream: VideoStream) -> tuple[float, ...]:
    """Of all frames, from the packets, none decoded. Raises PictureFault when the file is cut short."""
    times, lasts, end = [], [], 0.0
    for packet in container.demux():
        place = packet.pts if packet.pts is not None else packet.dts
        if place is None:
            continue
        time = float(place * packet.time_base)
        end = max(end, time + float((packet.duration or 0) * packet.time_base))
        if packet.stream_index == stream.index:
            times.append(time)
            lasts.append(packet.is_corrupt)
    times.sort()
    if not times:
        raise PictureFault("holds no frame")
    if any(lasts) or len(times) < stream.frames:
        raise PictureFault(f"is cut short: {len(times)} of {max(stream.frames, len(times))} frames are there")
    longest = max((after - before for before, after in pairwise(times)), default=0.0)
    told = (container.duration or 0) / 1e6 + min((container.start_time or 0) / 1e6, 0.0)
    if told > end + longest + SLACK_S:
        raise PictureFault(f"is cut short: it ends at {end:.2f} of {told:.2f} s")
    return tuple(times)


def _decoded(container: InputContainer, stream: VideoStream) -> Iterator[tuple[float, VideoFrame]]:
    """(time, frame) in the order in which they are shown. Raises PictureFault for a damaged one."""
    from av.codec import CodecContext

    name = stream.codec_context.name
    if stream.metadata.get("alpha_mode") == "1" and name in WITH_ALPHA:
        decoder = CodecContext.create(WITH_ALPHA[name], "r")
        frames = (frame for packet in container.demux(stream) for frame in decoder.decode(packet if packet.size else None))
    else:
        frames = container.decode(stream)
    for frame in frames:
        time = float((frame.pts if frame.pts is not None else frame.dts) * stream.time_base)
        if frame.is_corrupt:
            raise PictureFault(f"its frame at {time:.2f} s is damaged")
        yield time, frame


def _rgb(frame: VideoFrame, ground: tuple[int, int, int]) -> Image.Image:
    if frame.format.name == "pal8" or any(part.is_alpha for part in frame.format.components):
        coloured = Image.fromarray(frame.to_ndarray(format="rgba"))  # [H, W, 4]
        rgb = Image.alpha_composite(Image.new("RGBA", coloured.size, (*ground, 255)), coloured).convert("RGB")
    else:
        rgb = Image.fromarray(frame.to_ndarray(format="rgb24"))  # [H, W, 3]
    turn = UPRIGHT.get(frame.rotation)
    return rgb if turn is None else rgb.transpose(turn)
