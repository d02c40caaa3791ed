"""Videos and folders of frames: exact pixels, which frames are taken, and faults of files.   pytest tests/data/test_video.py"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from test_folder import FIXED, KEEP, PLAIN, by_content
from torch import Tensor

from flowrun import cli
from flowrun.config import ConfigError, DataError
from flowrun.contact import contact_sheet
from flowrun.data.video import Length, Video
from flowrun.registry import SOURCES
from flowrun.variants import Variants
from tests.conftest import SMALL, Runs, losses

ANY = {"least": 1, "most": 81, "multiple": 1, "plus": 0}
LOSSLESS = {".mkv": ("ffv1", "bgr0"), ".avi": ("ffv1", "bgr0"), ".mov": ("png", "rgb24"), ".mp4": ("png", "rgb24")}


def make(path: Path, **changes: Any) -> Video:
    node = {"source": "video", "path": str(path), "on_error": "stop", "check": "headers", "max_pixels": 10_000_000,
            "ground": [255, 255, 255], "frames": ANY, "fps": None, "start": "first", "geometry": KEEP,
            "caption": {"file": "txt", "field": "caption", "lines": "whole"}, "augment": PLAIN, **changes}  # fmt: skip
    return Video(SOURCES.build("data", Video, node))


def noise(count: int, size: tuple[int, int] = (40, 48)) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (count, *size, 3), dtype=np.uint8))


def write(path: Path, frames: Sequence[np.ndarray], at_ms: Sequence[int] | None = None, turn: int | None = None, rate: int = 10) -> Path:
    """A lossless video with a caption beside it; at_ms: when each frame is shown. Frames are [H, W, 3]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text(path.stem)
    codec, pixels = LOSSLESS[path.suffix]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        if turn is not None:
            stream.set_display_rotation(turn)
        if at_ms is not None:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for number, frame in enumerate(frames):
            shown = av.VideoFrame.from_ndarray(frame, format="rgb24")
            shown.pts = number if at_ms is None else at_ms[number]
            if at_ms is not None:
                shown.time_base = Fraction(1, 1000)
            container.mux(stream.encode(shown))
        container.mux(stream.encode())
    return path


def stored(folder: Path, frames: Sequence[np.ndarray], name: str = "{:04}.png", first: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder.parent / f"{folder.name}.txt").write_text(folder.name)
    for number, frame in enumerate(frames, start=first):
        Image.fromarray(frame).save(folder / name.format(number))
    return folder


def tensor(frames: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)  # [F, 3, H, W]


def only(source: Video) -> Tensor:
    (row,) = source.rows()
    video = source.load(row)["video"]
    assert video.dtype == torch.uint8 and video.shape == (row.frames, 3, *row.size) == (row.shape[0], 3, *row.shape[1:])
    return video


def fault(source: Video) -> str:
    with pytest.raises(DataError) as caught:
        source.rows()
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize("ending", LOSSLESS)
@pytest.mark.parametrize("check", ["headers", "full"])
def test_every_pixel_of_every_frame_comes_out(ending: str, check: str, tmp_path: Path) -> None:
    frames = noise(9)
    write(tmp_path / f"a{ending}", frames)
    assert torch.equal(only(make(tmp_path, check=check)), tensor(frames))


def test_a_gif_keeps_its_pixels_and_its_transparent_parts_get_the_ground(tmp_path: Path) -> None:
    frames = [Image.new("RGBA", (24, 16), (0, 0, 0, 0)) for _ in range(3)]
    for number, frame in enumerate(frames):
        frame.paste((200, 10, 30, 255), (number * 8, 0, number * 8 + 8, 16))
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=100, disposal=2)
    (tmp_path / "a.txt").write_text("a")
    ground = np.full((3, 16, 24, 3), (0, 255, 128), np.uint8)
    for number in range(3):
        ground[number, :, number * 8 : number * 8 + 8] = (200, 10, 30)
    assert torch.equal(only(make(tmp_path, ground=[0, 255, 128])), tensor(list(ground)))


@pytest.mark.parametrize("codec", ["libvpx-vp9", "libvpx"])
def test_the_alpha_of_a_webm_is_seen(codec: str, tmp_path: Path) -> None:
    """A lossy codec: flat colours come out nearly as they were, and only where they are opaque."""
    flat = np.full((32, 48, 4), (255, 255, 255, 255), np.uint8)
    flat[:, 24:, 3] = 0
    with av.open(str(tmp_path / "a.webm"), "w") as container:
        stream = container.add_stream(codec, rate=10, options={"auto-alt-ref": "0"})
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuva420p"
        for number in range(4):
            frame = av.VideoFrame.from_ndarray(flat, format="rgba")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    (tmp_path / "a.txt").write_text("a")
    video = only(make(tmp_path, ground=[0, 0, 0])).float()
    assert len(video) == 4
    assert video[..., :16].mean() > 245 and video[..., 32:].mean() < 10


def test_folders_of_frames_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    frames = noise(12)
    stored(tmp_path / "shots" / "walk.v2", frames, "frame_{}.png", first=3)
    source = make(tmp_path)
    assert torch.equal(only(source), tensor(frames))
    (row,) = source.rows()
    assert (row.id, row.prompt) == ("shots/walk.v2", "walk.v2")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["1.png", "2.png", "4.png"], "has frames 1 to 4, but no 3"),
        (["1.png", "01.png"], "has two frames of one number"),
        (["a1.png", "b2.png"], "holds frames of several videos: a, b"),
        (["cat.png", "1.png"], "holds cat.png, which has no number at its end, so it is no folder of frames"),
    ],
)
def test_a_folder_that_is_no_video_is_named(names: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x.txt").write_text("x")
    for name in names:
        Image.new("RGB", (16, 16)).save(tmp_path / "x" / name)
    assert f"{tmp_path / 'x'}: {message}" in fault(make(tmp_path))


def test_frames_of_several_sizes_and_pictures_beside_the_folders_are_told(tmp_path: Path) -> None:
    stored(tmp_path / "x", [noise(1)[0], noise(1, (32, 48))[0]])
    Image.new("RGB", (16, 16)).save(tmp_path / "lone.png")
    assert "its frames differ in size (0000.png 48x40, 0001.png 48x32)" in fault(make(tmp_path))
    with pytest.raises(DataError, match=r"not read: lone.png"):
        make(tmp_path).rows()


@pytest.mark.parametrize(
    ("there", "frames", "start", "taken"),
    [
        (9, {"least": 5, "most": 81, "multiple": 4, "plus": 1}, "first", range(9)),
        (12, {"least": 5, "most": 81, "multiple": 4, "plus": 1}, "first", range(9)),
        (12, {"least": 5, "most": 81, "multiple": 4, "plus": 1}, "centre", range(1, 10)),
        (12, {"least": 1, "most": 9, "multiple": 8, "plus": 1}, "centre", range(1, 10)),
        (12, {"least": 3, "most": 3, "multiple": 1, "plus": 0}, "centre", range(4, 7)),
    ],
)
def test_as_many_frames_are_taken_as_the_rule_allows(there: int, frames: dict, start: str, taken: range, tmp_path: Path) -> None:
    shown = noise(there, (16, 16))
    write(tmp_path / "a.mkv", shown)
    stored(tmp_path / "b", shown)
    source = make(tmp_path, frames=frames, start=start)
    for row in source.rows():
        assert torch.equal(source.load(row)["video"], tensor([shown[i] for i in taken]))


def test_lengths_are_those_of_the_formula() -> None:
    for multiple, plus, most in ((4, 1, 81), (8, 1, 121), (1, 0, 7), (4, 0, 16)):
        rule = Length(least=1, most=most, multiple=multiple, plus=plus)
        for there in range(1, 200):
            fitting = [n for n in range(1, min(there, most) + 1) if n >= plus and (n - plus) % multiple == 0]
            assert rule.of(there) == (max(fitting) if fitting else None)


def test_a_varying_rate_is_sampled_by_the_nearest_time(tmp_path: Path) -> None:
    at = [0, 50, 80, 300, 310, 330, 700, 710, 1000]
    frames = noise(len(at), (16, 16))
    write(tmp_path / "a.mkv", frames, at_ms=at)
    nearest = [min(range(len(at)), key=lambda i: (abs(at[i] - target), i)) for target in range(0, 1001, 100)]
    assert torch.equal(only(make(tmp_path, fps=10.0)), tensor([frames[i] for i in nearest]))
    assert torch.equal(only(make(tmp_path)), tensor(frames)), "as the file has them"


@pytest.mark.parametrize(("fps", "taken"), [(5.0, [0, 2, 4, 6]), (20.0, [n // 2 for n in range(15)])])
def test_another_rate_leaves_frames_out_or_doubles_them(fps: float, taken: list[int], tmp_path: Path) -> None:
    frames = noise(8, (16, 16))
    write(tmp_path / "a.mp4", frames)
    assert torch.equal(only(make(tmp_path, fps=fps)), tensor([frames[i] for i in taken]))


@pytest.mark.parametrize(("turn", "quarters"), [(90, 1), (-90, -1), (180, 2)])
@pytest.mark.parametrize("ending", [".mp4", ".mkv"])
def test_a_phone_held_sideways_films_upright(turn: int, quarters: int, ending: str, tmp_path: Path) -> None:
    frames = noise(3)
    write(tmp_path / f"a{ending}", frames, turn=turn)
    assert torch.equal(only(make(tmp_path)), tensor([np.rot90(frame, quarters).copy() for frame in frames]))


def test_every_frame_is_cut_and_mirrored_alike(tmp_path: Path) -> None:
    still = [noise(1, (40, 80))[0]] * 3
    write(tmp_path / "a.mkv", still)
    source = make(tmp_path, geometry=FIXED, augment={**PLAIN, "variants": 8, "flip": 0.5, "crop": True})
    (row,) = source.rows()
    seen = [source.load(source.variant(row, number))["video"] for number in range(8)]
    assert all(torch.equal(video[0], video[1]) and torch.equal(video[0], video[2]) for video in seen)
    assert len({video.numpy().tobytes() for video in seen}) == 8
    assert len({source.fingerprints(source.variant(row, n), by_content)["video"] for n in range(8)}) == 8


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    for ending in (".mkv", ".mp4", ".avi"):
        whole = write(tmp_path / f"cut{ending}", noise(9)).read_bytes()
        (tmp_path / f"cut{ending}").write_bytes(whole[: len(whole) * 2 // 3])
    write(tmp_path / "short.mkv", noise(3, (16, 16)))
    for name, content in (("empty.mp4", b""), ("text.mp4", b"not a video" * 99)):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).with_suffix(".txt").write_text(name)
    write(tmp_path / "good.mkv", noise(5, (16, 16)))
    write(tmp_path / "silent.mkv", noise(5, (16, 16)))
    (tmp_path / "silent.txt").unlink()
    source = make(tmp_path, frames={"least": 5, "most": 5, "multiple": 4, "plus": 1}, on_error="skip")
    assert [row.id for row in source.rows()] == ["good.mkv"]
    why = dict(source.skipped)
    assert set(why) == {"cut.mkv", "cut.mp4", "cut.avi", "short.mkv", "empty.mp4", "text.mp4", "silent.mkv"}
    assert why["cut.mkv"].startswith("is cut short: it ends at 0.") and why["cut.avi"].startswith("is cut short: 6 of 9 frames")
    assert why["short.mkv"] == "is too short: 3 frames, 5 are needed"
    assert why["empty.mp4"] == "the file is empty (0 bytes)"
    assert "cannot be read: Invalid data" in why["text.mp4"] and "cannot be read: Invalid data" in why["cut.mp4"]
    assert why["silent.mkv"] == "has no caption file silent.txt"


def test_a_key_changes_with_the_bytes_and_with_each_rule(tmp_path: Path) -> None:
    write(tmp_path / "a.mkv", noise(9, (16, 16)))
    stored(tmp_path / "b", noise(9, (16, 16)))
    changes = [{}, {"fps": 5.0}, {"start": "centre"}, {"frames": {**ANY, "most": 5}}, {"ground": [0, 0, 0]}, {"geometry": FIXED}]
    for number in range(2):
        keys = [source.fingerprints(source.rows()[number], by_content)["video"] for source in (make(tmp_path, **c) for c in changes)]
        assert len(set(keys)) == len(changes)
        if number:
            Image.new("RGB", (16, 16)).save(tmp_path / "b" / "0007.png")
        else:
            write(tmp_path / "a.mkv", noise(10, (16, 16))[1:])
        source = make(tmp_path)
        assert source.fingerprints(source.rows()[number], by_content)["video"] not in keys


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": {"least": 1, "most": 80, "multiple": 4, "plus": 1}}, r"data.frames.most: is 80, which is not 4 n \+ 1; give 77 or 81"),
        ({"frames": {"least": 9, "most": 5, "multiple": 4, "plus": 1}}, "data.frames.least: is 9, and most is 5"),
        ({"fps": 0.0}, "data.fps: is 0.0"),
    ],
)
def test_wrong_settings_are_refused(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **changes)


def test_a_missing_package_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrun.data.video.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"data.source: video needs the package av; pip install 'flowrun\[video\]'"):
        make(tmp_path)


def test_the_sheet_shows_first_middle_and_last_frame(tmp_path: Path) -> None:
    shades = [(n * 20, 0, 255 - n * 20) for n in range(9)]
    write(tmp_path / "a.mkv", [np.full((16, 16, 3), shade, np.uint8) for shade in shades])
    source = make(tmp_path)
    sheet = contact_sheet(Variants(source), source.rows())
    seen = {tuple(pixel) for pixel in np.asarray(sheet).reshape(-1, 3).tolist()}
    assert seen & set(shades) == {shades[0], shades[4], shades[8]}


def words(tmp_path: Path) -> tuple[str, ...]:
    return (*(word for word in SMALL if not word.startswith("data.")), "data=video", f"data.path={tmp_path / 'in'}",
            "data.geometry.size=[32,32]", "train.steps=4", "resume=none")  # fmt: skip


def test_a_model_of_videos_says_how_to_give_it_some(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model=ltx_video_tiny", "tracker=[csv]"]) == 2
    assert "and not video; use data that have it, e.g. data=video data.path=DIR, or a task" in capsys.readouterr().err


def test_a_model_of_pictures_refuses_videos_in_one_line(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in" / "a.mkv", noise(5, (16, 16)))
    assert cli.main(list(words(tmp_path))) == 2
    assert capsys.readouterr().err.splitlines() == [
        "flowrun: data.source: the data give video, prompt, and not image; use data that have it, "
        "e.g. data=folder data.path=DIR, or a task or model that does without"
    ]


@pytest.mark.slow
def test_a_model_that_reads_videos_trains_on_batches_of_one_length(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, count in enumerate((5, 5, 9, 9)):
        write(tmp_path / "in" / f"{number}.mkv", noise(count, (32, 32)))
    run = (*words(tmp_path), "model.pipeline=tests.plugins:OfVideos")
    assert cli.main([*run, "dry_run=true"]) == 0
    plan = capsys.readouterr().out
    assert "5 frames of 32x32 pixels: 2 rows" in plan and "9 frames of 32x32 pixels: 2 rows" in plan and ".png" in plan
    found = []
    for splitter in ("none", "replay"):
        assert cli.main([*run, f"task.splitter={splitter}", f"run_id={splitter}"]) == 0
        found.append(losses(runs.newest("train")))
    (tmp_path / "in").rename(tmp_path / "gone")
    assert cli.main([*run, "run_id=remembered"]) == 0
    assert found[0] == found[1] == losses(runs.newest("train"))
