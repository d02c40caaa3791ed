"""Rewards that need no weights, against what pictures are made to have."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from flowrun.config import ConfigError
from flowrun.data.emoji import Emoji
from flowrun.data.prompts import Prompts
from flowrun.registry import SOURCES
from flowrun.rewards import choose

PURE = {"red": [1, 0, 0], "green": [0, 1, 0], "blue": [0, 0, 1], "white": [1, 1, 1], "black": [0, 0, 0], "yellow": [1, 1, 0]}
EMOJI = {"source": "emoji", "size": 32, "captions": ["red apple", "green apple", "star"]}


def made(kind, source=None, **fields):
    reward = choose({"x": {"kind": kind, "weight": 1.0, "batch_size": 4, **fields}}, source)["x"].reward
    reward.prepare(torch.device("cpu"), source)
    return reward


def scores(reward, images, prompts=None):
    return reward.score(images, prompts or [""] * len(images), [None] * len(images))


def plain(*names):
    return torch.tensor([PURE[name] for name in names], dtype=torch.float32)[:, :, None, None].expand(-1, 3, 8, 8)


def noise(rows=3, size=16, seed=0):
    return torch.rand(rows, 3, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("which", ["red", "green", "blue"])
def test_a_colour_is_itself_and_not_another(which):
    found = scores(made("colour", which=which), plain("red", "green", "blue", "white", "black"))
    assert found.tolist() == [1.0 if name == which else -0.5 for name in ("red", "green", "blue")] + [0.0, 0.0]


def test_redness_is_half_of_it_in_pixels_from_minus_one_to_one():
    images = noise()
    x = (images * 2 - 1).double()
    expected = (x[:, 0] - (x[:, 1] + x[:, 2]) / 2).mean((1, 2)) / 2
    torch.testing.assert_close(scores(made("colour", which="red"), images).double(), expected, rtol=0, atol=1e-6)


def test_size_is_the_share_of_what_is_not_ground():
    images = torch.ones(2, 3, 10, 10)
    images[0, :, :5, :4] = 0.0
    images[1, 1, :3, :2] -= 17 / 255  # further from white than the tolerance
    images[1, 1, 5:, :] -= 15 / 255  # not further
    found = scores(made("size", ground=[255, 255, 255], tolerance=16), images)
    assert found.tolist() == pytest.approx([0.2, 0.06])
    assert scores(made("size", ground=[0, 0, 0], tolerance=0), images)[1] == 1


def test_symmetry_is_of_left_and_right():
    half = noise(1, 8)[..., :4]
    mirrored = torch.cat([half, half.flip(-1)], -1)
    opposite = torch.cat([torch.zeros(1, 3, 8, 4), torch.ones(1, 3, 8, 4)], -1)
    upright = opposite.transpose(-1, -2)
    assert scores(made("symmetry"), torch.cat([mirrored, opposite, upright])).tolist() == [1, 0, 1]


@pytest.mark.parametrize(("wanted", "sign"), [("small", -1), ("large", 1)])
def test_jpeg_size_is_that_of_the_file(wanted, sign):
    images = torch.cat([noise(1, 32), torch.full((1, 3, 32, 32), 0.5)])
    found = scores(made("jpeg_size", wanted=wanted, quality=90), images)
    for image, kilobytes in zip(images, found.tolist(), strict=True):
        file = io.BytesIO()
        Image.fromarray(np.uint8(np.rint(image.permute(1, 2, 0).numpy() * 255))).save(file, "JPEG", quality=90)
        assert kilobytes == pytest.approx(sign * len(file.getvalue()) / 1000)
    assert sign * found[0] > sign * found[1]


@pytest.mark.parametrize(("kind", "fields"), [
    ("colour", {"which": "green"}),
    ("size", {"ground": [255, 255, 255], "tolerance": 16}),
    ("symmetry", {}),
    ("jpeg_size", {"wanted": "small", "quality": 95}),
])  # fmt: skip
def test_a_videos_score_is_the_mean_of_its_frames(kind, fields):
    reward, frames = made(kind, **fields), noise(6)
    torch.testing.assert_close(scores(reward, frames.reshape(2, 3, 3, 16, 16)), scores(reward, frames).reshape(2, 3).mean(1))


def emoji():
    return Emoji(SOURCES.build("data", Emoji, EMOJI))


def drawn():
    source = emoji()
    return {row.prompt: source.load(row)["image"].float() / 255 for row in source.rows()}


@pytest.mark.parametrize("where", ["run", "own"])
def test_the_nearest_picture_has_the_caption_or_not(where):
    reward = made("nearest", source=emoji() if where == "run" else None, measure="hit", data=None if where == "run" else EMOJI)
    pictures = drawn()
    images = torch.stack([pictures["red apple"], pictures["green apple"], pictures["star"] * 0.9, pictures["star"]])
    found = scores(reward, images, ["red apple", "red apple", "star", "purple star"])
    assert found[:3].tolist() == [1, 0, 1] and found[3].isnan()


def test_distance_to_ones_own_picture_is_minus_the_mean_squared_error():
    pictures = drawn()
    found = scores(made("nearest", source=emoji(), measure="mse", data=None), noise(1, 32), ["star"])
    x, own = (noise(1, 32)[0] * 2 - 1).double(), (pictures["star"] * 2 - 1).double()
    torch.testing.assert_close(found.double(), -(x - own).square().mean()[None], rtol=1e-5, atol=1e-6)


def test_data_without_pictures_are_refused_with_a_way_out():
    fields = {"source": "prompts", "path": "x.txt", "columns": {"id": None, "caption": "prompt", "height": None, "width": None},
              "size": [32, 32], "on_error": "stop"}  # fmt: skip
    source = Prompts(SOURCES.build("data", Prompts, fields))
    with pytest.raises(ConfigError, match="data: has no pictures .*x.data={source: emoji"):
        made("nearest", source=source, measure="hit", data=None)


def test_pictures_of_another_size_end_the_run():
    with pytest.raises(ConfigError, match="has no picture of the samples' size 16x16"):
        scores(made("nearest", source=emoji(), measure="hit", data=None), noise(1, 16), ["star"])
