"""Quoted words and edit distances by hand; reading by a stub, and by the real package where it is installed."""

import sys
import types
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from flowrun import rewards
from flowrun.config import ConfigError
from flowrun.rewards.ocr import distance, quoted

OCR = {"ocr": {"kind": "ocr", "weight": 1.0, "batch_size": 4}}


@pytest.mark.parametrize(("prompt", "text"), [
    ('a shop with the sign "Open Now"', "opennow"),
    ("a cake that says “Émile”", "émile"),
    ("the word 'yes' on a dog's collar", "yes"),
    ("‘left’ and \"right\"", "leftright"),
])  # fmt: skip
def test_what_a_prompt_quotes(prompt, text):
    assert quoted(prompt) == text


@pytest.mark.parametrize("prompt", ["a dog's collar, the cat's bowl", 'an empty ""', ""])
def test_a_prompt_without_quotes_has_no_text(prompt):
    with pytest.raises(ValueError, match="quotes no text"):
        quoted(prompt)


def by_definition(text, read):
    """Least plain edit distance of `text` to any part of `read`."""

    @cache
    def plain(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(plain(a[1:], b) + 1, plain(a, b[1:]) + 1, plain(a[1:], b[1:]) + (a[0] != b[0]))

    parts = {read[i:j] for i in range(len(read) + 1) for j in range(i, len(read) + 1)}
    return min(plain(text, part) for part in parts)


@pytest.mark.parametrize(("text", "read", "edits"), [
    ("open", "weareopentoday", 0), ("open", "", 4), ("open", "xyz", 4), ("open", "opn", 1), ("open", "0pen", 1), ("ab", "ba", 1),
])  # fmt: skip
def test_distance_is_to_the_nearest_part(text, read, edits):
    assert distance(text, read) == edits == by_definition(text, read)


def test_distance_of_random_texts_is_that_of_the_definition():
    generator = np.random.default_rng(0)
    for _ in range(60):
        text, read = ("".join(generator.choice(list("abc"), n)) for n in generator.integers(1, 7, 2))
        assert distance(text, read) == by_definition(text, read), (text, read)


@pytest.fixture
def stub(monkeypatch):
    """A module in RapidOCR's place that reads every picture by its first pixel's red: that many letters of "open"."""
    module = types.ModuleType("rapidocr_onnxruntime")
    module.__spec__ = types.SimpleNamespace()
    module.seen = []

    class RapidOCR:
        def __call__(self, pixels):
            module.seen.append(pixels)
            letters = int(pixels[0, 0, 2])
            return ([[None, "OP EN"[: letters + (letters > 2)], 0.9]], [0.1]) if letters else (None, None)

    module.RapidOCR = RapidOCR
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def made():
    reward = rewards.choose(OCR, None)["ocr"].reward
    reward.prepare(torch.device("cpu"), None)
    return reward


def test_the_share_of_the_text_that_is_read(stub):
    images = torch.zeros(3, 3, 4, 6)
    images[:, 0] = torch.tensor([0, 3, 4])[:, None, None] / 255
    images[:, 2] = 1.0
    assert made().score(images, ['says "open"'] * 3, [None] * 3).tolist() == [0, 0.75, 1]
    assert all(pixels.shape == (4, 6, 3) and pixels.dtype == np.uint8 and pixels[0, 0, 0] == 255 for pixels in stub.seen)
    with pytest.raises(ValueError, match="'no words' quotes no text"):
        made().score(images, ['says "open"', "no words", 'says "open"'], [None] * 3)


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(rewards, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"reward.ocr.kind: ocr needs the package rapidocr_onnxruntime, .*; pip install 'flowrun\[ocr\]'"):
        rewards.choose(OCR, None)


@pytest.mark.skipif(find_spec("rapidocr_onnxruntime") is None, reason="needs pip install 'flowrun[ocr]'")
def test_a_drawn_word_is_read():
    picture = Image.new("RGB", (512, 256), "white")
    ImageDraw.Draw(picture).text((40, 80), "Hello World", fill="black", font=ImageFont.load_default(64))
    images = torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255, torch.ones(3, 256, 512)])
    assert made().score(images, ['the words "hello world"'] * 2, [None] * 2).tolist() == [1, 0]
