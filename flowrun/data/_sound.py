"""The sound of a video file -> samples, decoded and resampled by PyAV, by rules that are part of its content key.

It is the file's first track. Its samples follow one another from the track's first time on, and what lies before or after
the track, at most SLACK_S of what is taken, is silence. A mono track is the same on both sides, as loud as it is; other
tracks become mono or stereo as FFmpeg mixes them, cut at -1 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowrun.data._clip import SLACK_S, Clip, Frames
from flowrun.data._picture import PictureFault
from flowrun.sound import Hearing

if TYPE_CHECKING:
    from av import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer

DECODING = 1  # raise when a file may decode to other samples than before
LAYOUTS = {1: "mono", 2: "stereo"}


@dataclass(frozen=True, slots=True)
class Span:
    """begin, end: of a track, in the file's seconds."""

    begin: float
    end: float

    def check(self, begin: float, seconds: float) -> None:
        """Raises PictureFault when it has no sound for a part of what is taken."""
        if self.begin > begin + SLACK_S or self.end < begin + seconds - SLACK_S:
            taken = f"{begin:.2f} to {begin + seconds:.2f} s"
            raise PictureFault(f"its sound lasts from {self.begin:.2f} to {self.end:.2f} s, and what is taken of it from {taken}")


def measure(clip: Clip, full: bool) -> Span:
    """From the packets; with `full` all of them are decoded. Raises PictureFault when there is no sound."""
    if isinstance(clip, Frames):
        raise PictureFault("is a folder of frames, which has no sound, and this model needs one")
    begins, ends = [], []
    with _opened(clip) as (container, stream):
        for packet in container.demux(stream):
            if packet.pts is not None:
                begins.append(float(packet.pts * packet.time_base))
                ends.append(float((packet.pts + (packet.duration or 0)) * packet.time_base))
            for frame in packet.decode() if full else ():
                _sound_of(frame)
    if not begins:
        raise PictureFault("its sound is empty")
    return Span(min(begins), max(ends))


def read(path: Path, begin: float, seconds: float, hearing: Hearing) -> Tensor:
    """fp32 [channels, round(seconds rate)] in [-1, 1], from `begin` in the file's seconds. Raises PictureFault."""
    start, parts, there = None, [], 0
    with _opened(path) as (container, stream):
        for time, samples in _resampled(container, stream, hearing):
            start = time if start is None else start
            parts.append(samples)
            there += samples.shape[1]
            if start + there / hearing.rate > begin + seconds:
                break
    if start is None:
        raise PictureFault("nothing of its sound can be decoded")
    samples = torch.cat(parts, dim=1).clamp(-1, 1)  # [1 or channels, S]
    first, count = round((begin - start) * hearing.rate), round(seconds * hearing.rate)
    taken = samples[:, max(first, 0) : max(first + count, 0)]
    found = torch.zeros(hearing.channels, count)
    place = max(-first, 0)
    found[:, place : place + taken.shape[1]] = taken
    return found


def _resampled(container: InputContainer, stream: AudioStream, hearing: Hearing) -> Iterator[tuple[float, Tensor]]:
    """(time, samples [channels, S], of a mono track [1, S]) in order; only the first time is exact."""
    from av import AudioResampler

    resampler = AudioResampler(format="fltp", layout=LAYOUTS[min(stream.channels, hearing.channels)], rate=hearing.rate)
    for frame in map(_sound_of, container.decode(stream)):
        if (place := frame.pts if frame.pts is not None else frame.dts) is None:
            raise PictureFault("its sound has no times")
        time = float(place * frame.time_base)
        for part in resampler.resample(frame):
            yield time, torch.from_numpy(part.to_ndarray())
    for part in resampler.resample(None):
        yield 0.0, torch.from_numpy(part.to_ndarray())


def _sound_of(frame: AudioFrame) -> AudioFrame:
    if frame.is_corrupt:
        raise PictureFault("its sound is damaged")
    return frame


@contextmanager
def _opened(path: Path) -> Iterator[tuple[InputContainer, AudioStream]]:
    import av

    try:
        with av.open(str(path), metadata_errors="replace") as container:
            if not container.streams.audio:
                raise PictureFault("has no sound, which this model needs")
            yield container, container.streams.audio[0]
    except (av.FFmpegError, OSError) as error:
        raise PictureFault(f"its sound cannot be read: {error.strerror or error}") from error
