"""Picture files to RGB.   pytest tests/data/test_picture.py"""

from __future__ import annotations

import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, PngImagePlugin

from flowrun.data import _picture as picture
from flowrun.data._pictures import PILLOW_LIMIT

WHITE = (255, 255, 255)
LIMIT = 10_000_000


def noisy(height: int = 6, width: int = 9, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def read(path: Path, ground: tuple[int, int, int] = WHITE) -> np.ndarray:
    return np.asarray(picture.read(path, LIMIT, ground))


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def move_exif_behind_pixels(path: Path) -> None:
    """A PNG's eXIf chunk may stand anywhere before IEND."""
    data = path.read_bytes()
    start = data.index(b"eXIf") - 4
    length = 12 + struct.unpack(">I", data[start : start + 4])[0]
    chunk, rest = data[start : start + length], data[:start] + data[start + length :]
    path.write_bytes(rest[:-12] + chunk + rest[-12:])


@pytest.mark.parametrize("orientation", [*range(1, 9), 14])  # the last is none, and turns nothing
@pytest.mark.parametrize("suffix", ["png", "late.png", "webp", "jpg"])
def test_a_picture_is_upright_and_its_header_says_the_size_it_will_have(
    tmp_path: Path, suffix: str, orientation: int
) -> None:
    path = tmp_path / f"photo.{suffix}"
    Image.fromarray(noisy(40, 20)).save(
        path, exif=exif_of(orientation), **({"lossless": True} if suffix == "webp" else {})
    )
    if suffix == "late.png":
        move_exif_behind_pixels(path)
    with Image.open(path) as opened:
        opened.load()
        truth = np.asarray(ImageOps.exif_transpose(opened))
    assert np.array_equal(read(path), truth)
    assert picture.check(path, LIMIT, full=False) == truth.shape[:2] == ((20, 40) if 5 <= orientation <= 8 else (40, 20))


def test_sixteen_bit_grey_is_rescaled_not_clipped(tmp_path: Path) -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    rgb = read(tmp_path / "ramp.png")
    assert np.array_equal(rgb[:, :, 0], np.floor(ramp / 65535 * 255 + 0.5).astype(np.uint8))
    assert np.array_equal(rgb[:, :, 0], rgb[:, :, 1]) and np.array_equal(rgb[:, :, 0], rgb[:, :, 2])


def test_transparent_parts_show_the_ground(tmp_path: Path) -> None:
    rgba = noisy(channels=4)
    Image.fromarray(rgba).save(tmp_path / "rgba.png")
    alpha = rgba[:, :, 3:].astype(float) / 255
    for ground in (WHITE, (10, 200, 30)):
        truth = alpha * rgba[:, :, :3] + (1 - alpha) * np.array(ground)
        assert np.abs(read(tmp_path / "rgba.png", ground) - truth).max() <= 1


@pytest.mark.parametrize("kind", ["palette", "grey", "grey16", "rgb", "grey+alpha"])
def test_every_form_of_transparency_shows_the_ground(tmp_path: Path, kind: str) -> None:
    path, ground = tmp_path / "t.png", (1, 2, 3)
    if kind == "palette":
        image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), mode="P")
        image.putpalette([9, 9, 9, 7, 7, 7])
        image.save(path, transparency=0)
    elif kind == "grey":
        Image.fromarray(np.array([[9, 7]], dtype=np.uint8)).save(path, transparency=9)
    elif kind == "grey16":
        Image.fromarray(np.array([[900, 7 * 257]], dtype=np.uint16)).save(path, transparency=900)
    elif kind == "rgb":
        Image.fromarray(np.array([[[9, 9, 9], [7, 7, 7]]], dtype=np.uint8)).save(path, transparency=(9, 9, 9))
    else:
        Image.fromarray(np.array([[[9, 0], [7, 255]]], dtype=np.uint8), mode="LA").save(path)
    assert read(path, ground).tolist() == [[[1, 2, 3], [7, 7, 7]]]


def test_grey_black_and_white_palette_and_print_colours_become_rgb(tmp_path: Path) -> None:
    grey = noisy()[:, :, 0]
    Image.fromarray(grey).save(tmp_path / "grey.png")
    assert np.array_equal(read(tmp_path / "grey.png"), np.repeat(grey[:, :, None], 3, 2))
    Image.fromarray(grey > 127).save(tmp_path / "bits.png")
    assert np.array_equal(read(tmp_path / "bits.png")[:, :, 0], np.where(grey > 127, 255, 0))
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "print.jpg", quality=95)
    assert np.abs(read(tmp_path / "print.jpg").astype(int) - [255, 0, 0]).max() < 8
    Image.fromarray(noisy()).save(tmp_path / "plain.bmp")
    assert np.array_equal(read(tmp_path / "plain.bmp"), noisy())


def test_the_tensor_is_channels_first_and_its_own_memory() -> None:
    pixels = noisy()
    tensor = picture.to_tensor(Image.fromarray(pixels))
    assert tensor.dtype == torch.uint8 and tensor.is_contiguous()
    assert np.array_equal(tensor.numpy(), pixels.transpose(2, 0, 1))
    tensor.add_(1)  # writable


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp"])
def test_a_file_cut_in_half_is_found_by_the_full_check_and_when_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"half.{suffix}"
    Image.fromarray(noisy(64, 64)).save(path)
    picture.check(path, LIMIT, full=True)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for attempt in (lambda: picture.check(path, LIMIT, full=True), lambda: picture.read(path, LIMIT, WHITE)):
        with pytest.raises(picture.PictureFault, match="cannot be read|damaged"):
            attempt()


def test_the_header_check_decodes_no_pixels(tmp_path: Path) -> None:
    path = tmp_path / "half.jpg"
    Image.fromarray(noisy(64, 48)).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert picture.check(path, LIMIT, full=False) == (64, 48)


def test_empty_foreign_and_oversized_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no picture at all")
    Image.new("RGB", (30, 20)).save(tmp_path / "large.png")
    for name, message in (
        ("empty.png", "empty"),
        ("text.png", "is no PNG"),
        ("large.png", "600 pixels, more than data.max_pixels = 599"),
        ("absent.png", "No such file"),
    ):
        with pytest.raises(picture.PictureFault, match=message):
            picture.check(tmp_path / name, 599, full=False)


def add_chunks(path: Path, kind: bytes, *bodies: bytes, behind: bool) -> None:
    """Put chunks of one kind into a PNG: after its header, or after its pixels."""
    chunks = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for body in bodies
    )
    data = path.read_bytes()
    at = len(data) - 12 if behind else 33  # before IEND, or after signature and IHDR
    path.write_bytes(data[:at] + chunks + data[at:])


LONG = b"a" * (2 * PngImagePlugin.MAX_TEXT_CHUNK)  # 2 MB of what a generator was told


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("kind", "bodies"),
    [
        (b"zTXt", [b"parameters\0\0" + zlib.compress(LONG)]),
        (b"iTXt", [b"parameters\0\1\0\0\0" + zlib.compress(LONG)]),
        (b"zTXt", [b"p%d\0\0" % n + zlib.compress(LONG[: 1 << 20]) for n in range(65)]),  # 65 MB in all
        (b"tEXt", [b"parameters\0" + LONG]),
        (b"iTXt", [b"parameters\0\0\0\0\0" + LONG]),
        (b"zTXt", [b"parameters\0\0" + zlib.compress(LONG)[:100]]),
    ],
)
def test_a_picture_with_a_huge_text_inside_is_read_or_a_named_fault(
    tmp_path: Path, kind: bytes, bodies: list[bytes], behind: bool
) -> None:
    path, pixels = tmp_path / "generated.png", noisy()
    Image.fromarray(pixels).save(path)
    add_chunks(path, kind, *bodies, behind=behind)
    try:
        size = picture.check(path, LIMIT, full=True)
        assert size == pixels.shape[:2] and np.array_equal(read(path), pixels)
    except picture.PictureFault as fault:
        assert str(fault).startswith("cannot be read: ") and len(str(fault)) < 200
        with pytest.raises(picture.PictureFault):
            read(path)


def test_a_text_that_pillow_reads_costs_no_picture(tmp_path: Path) -> None:
    path, pixels = tmp_path / "generated.png", noisy()
    Image.fromarray(pixels).save(path)
    add_chunks(path, b"tEXt", b"parameters\0" + LONG, behind=False)
    assert np.array_equal(read(path), pixels)


@pytest.mark.parametrize("name", ["half.tiff", "half.tif", "half.png"])
@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_that_are_no_bytes_are_refused_and_never_cut_to_black(tmp_path: Path, name: str, mode: str) -> None:
    """Pillow's own conversion makes 0.5 black and 70000 white."""
    values = np.array([[0.5, 0.25]], np.float32) if mode == "F" else np.array([[70000, 300]], np.int32)
    Image.fromarray(values).save(tmp_path / name, format="TIFF")
    for attempt in (lambda: picture.check(tmp_path / name, LIMIT, full=False), lambda: read(tmp_path / name)):
        with pytest.raises(picture.PictureFault, match="is no PNG, JPEG, WebP or BMP picture"):
            attempt()


def vast(path: Path, side: int) -> None:
    """A PNG that says it is side x side black and white pixels, without them."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunks = [(13, header), (0, b"IDAT"), (0, b"IEND")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", length) + chunk + struct.pack(">I", zlib.crc32(chunk)) for length, chunk in chunks))  # fmt: skip


@pytest.mark.parametrize("side", [3163, 9500, 13000, 14000, 60000])
def test_the_most_pixels_of_a_picture_are_the_settings_and_not_pillows(tmp_path: Path, side: int) -> None:
    """Pillow warns above 89 million, which is no fault of the data, and refuses above 179 million."""
    vast(tmp_path / "vast.png", side)
    with pytest.raises(picture.PictureFault, match="more than data.max_pixels = 10000000|exceeds limit") as caught:
        picture.check(tmp_path / "vast.png", LIMIT, full=False)
    assert str(side * side) in str(caught.value)
    if side * side <= PILLOW_LIMIT:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert picture.check(tmp_path / "vast.png", PILLOW_LIMIT, full=False) == (side, side)


@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_an_animation_is_refused(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / f"moving.{suffix}", save_all=True, append_images=frames[1:])
    with pytest.raises(picture.PictureFault, match="animation of 2 frames"):
        picture.check(tmp_path / f"moving.{suffix}", LIMIT, full=False)


def test_a_phones_picture_with_a_second_one_inside_is_read(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=frames[1:])
    assert np.abs(read(tmp_path / "phone.jpg").astype(int) - [255, 0, 0]).max() < 8
