"""Samples on disk.   pytest tests/test_grids.py"""

from __future__ import annotations

import csv
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

from flowrun import grids
from flowrun.sampling import Picture
from flowrun.sound import Wave


def picture(index: int, prompt: str = "red apple", seed: int = 0) -> Picture:
    """A 32x32 picture of random 8-bit colours."""
    pixels = torch.randint(0, 256, (3, 32, 32), generator=torch.Generator().manual_seed(index))
    return Picture(prompt=prompt, seed=seed, image=pixels / 127.5 - 1)


def test_pictures_are_saved_exactly_with_prompts_and_seeds(tmp_path: Path) -> None:
    drawn = [picture(0, 'a "red", apple\nbelow'), picture(1, "りんご", seed=7)]
    assert grids.save(tmp_path / "samples", 250, drawn) == tmp_path / "samples/step-000250.png"
    with open(tmp_path / "samples/step-000250/samples.csv", newline="", encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    assert [(row["file"], row["prompt"], row["seed"]) for row in rows] == [
        ("000.png", 'a "red", apple\nbelow', "0"), ("001.png", "りんご", "7")]  # fmt: skip
    for row, original in zip(rows, drawn, strict=True):
        pixels = np.asarray(Image.open(tmp_path / "samples/step-000250" / row["file"]))
        assert np.allclose(pixels / 127.5 - 1, original.image.permute(1, 2, 0).numpy(), atol=1e-6)


def test_saving_again_replaces_what_was_there_and_leaves_nothing_else(tmp_path: Path) -> None:
    grids.save(tmp_path, 1, [picture(index) for index in range(3)])
    grids.save(tmp_path, 1, [picture(9)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000001.png"]
    assert sorted(path.name for path in (tmp_path / "step-000001").iterdir()) == ["000.png", "samples.csv"]


def test_no_pictures_are_refused_and_leave_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one picture"):
        grids.save(tmp_path, 1, [])
    assert not list(tmp_path.iterdir())


def test_pixels_out_of_range_are_clamped_and_rounded() -> None:
    values = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0])
    pixels = np.asarray(grids.to_image(values.expand(3, 1, 5)))
    assert pixels[0, :, 0].tolist() == [0, 0, 128, 255, 255]


def test_the_grid_shows_each_picture_enlarged_by_whole_pixels_in_reading_order() -> None:
    images = [grids.to_image(picture(index).image) for index in range(10)]
    sheet = np.asarray(grids.grid(images, ["x"] * 10))
    found = []
    for image in images:
        large = np.asarray(image).repeat(3, 0).repeat(3, 1)  # [96, 96, 3]
        places = np.argwhere((sheet[: -95 or None, : -95 or None] == large[0, 0]).all(2))
        found += [(y, x) for y, x in places.tolist() if np.array_equal(sheet[y : y + 96, x : x + 96], large)]
    assert len(found) == 10 and found == sorted(found)
    assert len({y for y, _ in found}) == 2 and len({x for _, x in found}) == 8


def video(frames: int, seed: int = 0) -> Picture:
    pixels = torch.randint(0, 256, (frames, 3, 16, 48), generator=torch.Generator().manual_seed(seed))
    return Picture(prompt="red apple", seed=seed, image=pixels / 127.5 - 1)


def test_videos_are_saved_to_the_last_bit_and_play_at_sixteen_frames_a_second(tmp_path: Path) -> None:
    drawn = [video(9), video(1, seed=1)]
    sheet = Image.open(grids.save(tmp_path, 5, drawn))
    with open(tmp_path / "step-000005/samples.csv", newline="", encoding="utf-8") as table:
        files = [row["file"] for row in csv.DictReader(table)]
    assert files == ["000.webp", "001.webp"]
    for file, original in zip(files, drawn, strict=True):
        with Image.open(tmp_path / "step-000005" / file) as moving:
            shown, times = [], []
            for frame in range(moving.n_frames):
                moving.seek(frame)
                shown.append(torch.from_numpy(np.array(moving.convert("RGB"))).permute(2, 0, 1) / 127.5 - 1)
                times.append(moving.info.get("duration"))
        torch.testing.assert_close(torch.stack(shown), original.image, atol=1e-6, rtol=0)
        assert len(times) == 1 or sum(times) == round(len(times) * 1000 / 16)
    strip = np.asarray(grids.to_image(torch.cat([drawn[0].image[i] for i in (0, 4, 8)], dim=2)))
    assert np.array_equal(np.asarray(sheet)[4 : 4 + 16, 4 : 4 + 3 * 48], strip)


def test_a_video_with_sound_plays_at_its_own_rate_beside_a_wav_of_the_same_name(tmp_path: Path) -> None:
    samples = torch.tensor([[0.0, 0.5, -0.5, 1.5], [1.0, -1.0, 0.25, -1.5]])
    grids.save(tmp_path, 5, [replace(video(6), sound=Wave(samples=samples, rate=400), fps=24.0), video(3)])
    folder = tmp_path / "step-000005"
    assert sorted(file.name for file in folder.iterdir()) == ["000.wav", "000.webp", "001.webp", "samples.csv"]
    with wave.open(str(folder / "000.wav")) as sound:
        assert sound.getparams()[:4] == (2, 2, 400, 4)
        found = np.frombuffer(sound.readframes(4), "<i2").reshape(4, 2).T
    assert found.tolist() == [[0, 16384, -16384, 32767], [32767, -32767, 8192, -32767]]
    with Image.open(folder / "000.webp") as moving:
        times = []
        for frame in range(moving.n_frames):
            moving.seek(frame)
            moving.load()
            times.append(moving.info["duration"])
    assert sum(times) == 250


def test_captions_stand_below_their_own_picture() -> None:
    blank = Image.new("RGB", (32, 32), "white")
    sheet = np.asarray(grids.grid([blank, blank], ["", "red apple"]).convert("L"))
    dark = np.argwhere(sheet < 128)
    assert len(dark) > 20
    assert dark[:, 1].min() > sheet.shape[1] // 2 and dark[:, 0].min() > 96


def test_long_captions_are_wrapped_to_two_lines_and_cut_with_dots() -> None:
    font = ImageFont.load_default(10)
    for text in (
        "red apple",
        "a slice of pizza with olives on a very large wooden plate",
        "Donaudampfschifffahrtsgesellschaftskapitän",
        "",
    ):
        lines = grids._wrap(text, 96, font)
        assert len(lines) <= 2 and all(font.getlength(line) <= 96 for line in lines)
        assert lines[-1].endswith("...") or " ".join(lines) == text


def test_large_pictures_are_not_enlarged() -> None:
    sheet = grids.grid([Image.new("RGB", (200, 100))], ["x"])
    assert 200 <= sheet.width < 220 and 100 < sheet.height < 150
