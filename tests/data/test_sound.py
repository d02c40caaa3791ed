"""The sound of videos: exact samples, which part of them, and faults.   pytest tests/data/test_sound.py"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from films import film
from test_video import ANY, make
from torch import Tensor

from flowrun.config import ConfigError, DataError
from flowrun.contact import _several, contact_sheet
from flowrun.data.video import Video
from flowrun.sound import Hearing
from flowrun.variants import Variants

STEREO = Hearing(rate=16000, channels=2, fps=24.0)
FRAMES, SECOND = 24, 16000


def pixels(frames: int = FRAMES) -> Tensor:
    return torch.randint(0, 256, (frames, 3, 16, 24), generator=torch.Generator().manual_seed(0)).byte()


def noise(channels: int = 2, samples: int = SECOND) -> Tensor:
    return torch.rand(channels, samples, generator=torch.Generator().manual_seed(1)) - 0.5


def sine(rate: int, frequency: float = 440.0) -> Tensor:
    return 0.5 * torch.sin(2 * torch.pi * frequency * torch.arange(rate) / rate)[None]


def heard(folder: Path, hearing: Hearing = STEREO, **changes: object) -> Video:
    source = make(folder, **{"fps": hearing.fps, **changes})
    source.listen(hearing)
    return source


def only(source: Video) -> Tensor:
    (row,) = source.rows()
    audio = source.load(row, ["audio"])["audio"]
    assert audio.dtype == torch.float32 and audio.shape == (source.hearing.channels, round(row.frames / 24 * source.hearing.rate))
    return audio


def test_a_lossless_track_of_the_models_rate_comes_as_it_is(tmp_path: Path) -> None:
    wave = noise()
    film(tmp_path / "a.mkv", pixels(), wave)
    torch.testing.assert_close(only(heard(tmp_path)), wave, atol=2**-15, rtol=0)
    source = heard(tmp_path)
    assert source.load(source.rows()[0]).keys() == {"video", "audio", "prompt"} == set(source.names)
    assert source.load(source.rows()[0], ["video"]).keys() == {"video"}


@pytest.mark.parametrize(("start", "first"), [("first", 0), ("centre", 7)])
def test_it_is_the_sound_of_the_frames_that_are_taken(tmp_path: Path, start: str, first: int) -> None:
    wave = noise()
    film(tmp_path / "a.mkv", pixels(), wave)
    found = only(heard(tmp_path, start=start, frames={**ANY, "most": 9}))
    begin = round(first / 24 * SECOND)
    torch.testing.assert_close(found, wave[:, begin : begin + found.shape[1]], atol=2**-15, rtol=0)


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_other_rates_are_resampled(tmp_path: Path, rate: int) -> None:
    film(tmp_path / "a.mkv", pixels(), sine(rate), rate)
    found = only(heard(tmp_path, Hearing(rate=16000, channels=1, fps=24.0)))
    torch.testing.assert_close(found[:, 500:-500], sine(16000)[:, 500:-500], atol=2e-3, rtol=0)


def test_mono_is_the_same_on_both_sides_and_stereo_becomes_mono_as_ffmpeg_mixes_it(tmp_path: Path) -> None:
    wave = noise()
    film(tmp_path / "mono" / "a.mkv", pixels(), wave[:1])
    film(tmp_path / "stereo" / "a.mkv", pixels(), wave)
    both, one = only(heard(tmp_path / "mono")), only(heard(tmp_path / "stereo", Hearing(rate=16000, channels=1, fps=24.0)))
    torch.testing.assert_close(both, wave[:1].expand(2, -1), atol=2**-15, rtol=0)
    torch.testing.assert_close(one, wave.sum(0, keepdim=True) / 2**0.5, atol=2**-13, rtol=0)


def test_more_channels_are_mixed_and_cut_at_one(tmp_path: Path) -> None:
    """FFmpeg's mix for two loudspeakers: the front ones, and the middle and the ones behind at 1 / sqrt(2)."""
    wave = 1.2 * noise(6)
    film(tmp_path / "a.mkv", pixels(), wave)
    left, right, middle, _, left_behind, right_behind = wave
    truth = torch.stack([left + (middle + left_behind) / 2**0.5, right + (middle + right_behind) / 2**0.5])
    assert truth.abs().max() > 1
    torch.testing.assert_close(only(heard(tmp_path)), truth.clamp(-1, 1), atol=2**-12, rtol=0)


def test_a_track_that_begins_late_or_ends_early_leaves_a_little_silence(tmp_path: Path) -> None:
    wave = noise()
    film(tmp_path / "a.mkv", pixels(), wave[:, :-1600], delay=0.05)
    found, late = only(heard(tmp_path)), 800
    torch.testing.assert_close(found[:, late : late + 14400], wave[:, :-1600], atol=2**-15, rtol=0)
    assert not found[:, :late].any() and not found[:, late + 14400 :].any()


@pytest.mark.parametrize("check", ["headers", "full"])
def test_files_without_the_sound_that_the_model_needs_are_named_all_at_once(tmp_path: Path, check: str) -> None:
    film(tmp_path / "good.mkv", pixels(), noise())
    film(tmp_path / "mute.mkv", pixels(), None)
    film(tmp_path / "short.mkv", pixels(), noise(samples=SECOND // 2))
    film(tmp_path / "late.mkv", pixels(), noise(), delay=0.3)
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames.txt").write_text("frames")
    for number in range(5):
        (tmp_path / f"frames/{number}.png").write_bytes(PNG)
    with pytest.raises(DataError) as error:
        heard(tmp_path, check=check).rows()
    said = "\n".join(error.value.faults)
    assert "mute.mkv: has no sound, which this model needs" in said
    assert "short.mkv: its sound lasts from 0.00 to 0.50 s, and what is taken of it from 0.00 to 1.00 s" in said
    assert "late.mkv: its sound lasts from 0.30 to 1.30 s" in said
    assert "frames: is a folder of frames, which has no sound, and this model needs one" in said and "good" not in said
    source = heard(tmp_path, check=check, on_error="skip")
    assert [row.id for row in source.rows()] == ["good.mkv"] and len(source.skipped) == 4


def test_a_model_that_hears_nothing_takes_them_all(tmp_path: Path) -> None:
    film(tmp_path / "mute.mkv", pixels(), None)
    film(tmp_path / "good.mkv", pixels(), noise())
    source = make(tmp_path)
    assert len(source.rows()) == 2 and source.names == ("video", "prompt")
    assert source.load(source.rows()[0]).keys() == {"video", "prompt"}


@pytest.mark.parametrize(("fps", "said"), [(None, "is null"), (25.0, "is 25")])
def test_frames_a_second_are_the_models(tmp_path: Path, fps: float | None, said: str) -> None:
    with pytest.raises(ConfigError, match=f"data.fps: {said}, but the model's sound goes by 24 frames a second; give data.fps=24, or"):
        heard(tmp_path, fps=fps)


def test_the_key_of_a_sound_holds_what_it_is_made_from(tmp_path: Path) -> None:
    file = film(tmp_path / "a.mkv", pixels(), noise())

    def key(hearing: Hearing = STEREO, name: str = "audio", **changes: object) -> bytes:
        source = heard(tmp_path, hearing, **changes)
        return source.fingerprints(source.rows()[0], lambda path: path.read_bytes())[name]

    own, other = key(), Hearing(rate=8000, channels=2, fps=24.0)
    assert key() == own != key(other) and key(Hearing(rate=16000, channels=1, fps=24.0)) != own
    assert key(frames={**ANY, "most": 9}) != key(frames={**ANY, "most": 9}, start="centre") != own
    assert key(name="video") == key(other, name="video"), "pixels do not depend on it"
    assert key(ground=[0, 0, 0]) == own != key(name="video"), "nor it on pixels"
    file.write_bytes(file.read_bytes() + b"\0")
    assert key() != own


def test_the_sheet_of_what_a_model_sees_shows_the_frames(tmp_path: Path) -> None:
    film(tmp_path / "a.mkv", pixels(), noise())
    source = heard(tmp_path)
    assert contact_sheet(Variants(source, [{}], lambda *_: 0), source.rows()).width > 3 * 24
    assert _several(source.names) == "", "a sound is no picture beside the others"


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc000000301010018dd8db0"
    "0000000049454e44ae426082"
)  # fmt: skip
