"""Training on a cache that was made otherwise is refused with the old and the new value of what differs, and only what
that reaches is made again.   pytest tests/stages/test_stale_cache.py"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from flowrun import cli
from flowrun.cache.layout import Layout
from flowrun.cache.manifest import Manifest, write_manifest
from flowrun.config import ConfigError
from flowrun.data import _picture
from flowrun.library import Library
from flowrun.run import assemble
from tests.conftest import SMALL, Runs
from tests.pipelines.families import theirs

WITHOUT_DATA = tuple(text for text in SMALL if not text.startswith(("data.", "model=")))
TEXT, PICTURE = "text_encoder.prompt_embeds", "target_moments"


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved pipeline, pictures, and the cache of both."""
    folder = tmp_path_factory.mktemp("cached")
    theirs("sd3").save_pretrained(folder / "saved")
    (folder / "pictures").mkdir()
    for name, size in (("a", (64, 64)), ("b", (80, 72))):
        Image.effect_noise(size, 60).convert("RGB").save(folder / "pictures" / f"{name}.png")
        (folder / "pictures" / f"{name}.txt").write_text(f"a card named {name}")
    assert cli.main([*settings(folder), "stage=cache"]) == 0
    return folder


def settings(folder: Path, model: str = "sd3_5_medium", weights: str = "saved") -> list[str]:
    return [f"model={model}", f"model.weights={folder / weights}", "model.max_sequence_length=77", *WITHOUT_DATA,
            "data=folder", f"data.path={folder / 'pictures'}", "data.geometry.size=[64,64]", "data.geometry.multiple_of=16",
            f"cache.root={folder / 'cache'}"]  # fmt: skip


def refusal(library: Library) -> str:
    """What stage=train says, in one line."""
    with pytest.raises(ConfigError) as caught:
        library.require("COMMAND")
    text = str(caught.value)
    assert text.startswith("stage=train: needs the cache, but ") and text.endswith("; run: COMMAND") and "\n" not in text
    return text


def changed(path: Path, seed: int = 9) -> None:
    """Other numbers in every tensor of a file of weights, of the same names and shapes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {k: v + torch.randn(v.shape, generator=generator).to(v) for k, v in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


def other_weights(name: str) -> Callable[[Path], None]:
    return lambda folder: changed(next((folder / name).glob("*.safetensors")))


def other_tokens(folder: Path) -> None:
    file = folder / "tokenizer_3" / "tokenizer.json"
    text = json.loads(file.read_text())
    text["added_tokens"][0]["special"] = not text["added_tokens"][0]["special"]
    file.write_text(json.dumps(text))


@pytest.mark.parametrize(
    ("change", "name", "reached", "not_reached"),
    [
        (other_weights("text_encoder"), "text_encoder", TEXT, PICTURE),
        (other_weights("text_encoder_3"), "text_encoder_3", TEXT, PICTURE),
        (other_tokens, "text_encoder_3", TEXT, PICTURE),
        (other_weights("vae"), "vae", PICTURE, TEXT),
    ],
)
@pytest.mark.parametrize("place", ["saved", "elsewhere"])
def test_another_model_of_the_same_sizes_is_named_old_and_new_and_what_it_makes_is_missing(
    tmp_path: Path, cached: Path, change: Callable[[Path], None], name: str, reached: str, not_reached: str, place: str
) -> None:
    """In a folder of its own, or put in the place of the one before."""
    assemble(settings(cached)).library.require("COMMAND")
    shutil.copytree(cached / "saved", tmp_path / "as_it_was")
    folder = cached / place
    if place != "saved":
        shutil.copytree(cached / "saved", folder)
    try:
        change(folder)
        line = refusal(assemble(settings(cached, weights=place)).library)
    finally:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "as_it_was", cached / "saved", dirs_exist_ok=True)
    assert f"; {name}: cached with " in line
    old, new = line.partition(f"; {name}: cached with ")[2].partition(";")[0].split(", configured ")
    assert f"from {cached / 'saved'}" in old and f"from {cached / place}" in new and old != new
    assert reached in line and not_reached not in line


def test_a_copy_of_the_same_model_elsewhere_needs_nothing_new(tmp_path: Path, cached: Path) -> None:
    shutil.copytree(cached / "saved", tmp_path / "moved")
    assert not assemble([*settings(cached), f"model.weights={tmp_path / 'moved'}"]).library.missing()


def test_models_drawn_from_another_seed_are_other_models(runs: Runs) -> None:
    common = ["model=sd3_tiny", *WITHOUT_DATA, "data.captions=[pear]", "data.size=64", "data.source=emoji"]
    assert cli.main([*common, "stage=cache"]) == 0
    line = refusal(assemble([*common, "seed=1"]).library)
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3", "vae"):
        said = line.partition(f"; {name}: cached with ")[2].partition(";")[0]
        assert "seed 0, configured " in said and said.endswith("seed 1"), name
    assert "transformer" not in line, "it makes no cached value"


def test_another_precision_of_the_encoders_is_named_old_and_new(cached: Path) -> None:
    line = refusal(assemble([*settings(cached), "model.dtype=fp32"]).library)
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3", "vae"):
        old, new = line.partition(f"; {name}: cached with ")[2].partition(";")[0].split(", configured ")
        assert old.startswith("bf16 ") and new.startswith("fp32 ") and old[5:] == new[5:], name


def test_rows_encoded_alone_are_none_for_rows_encoded_together_and_the_other_way_round(runs: Runs) -> None:
    for cached, asked in ((1, 4), (4, 2), (4, 1)):
        root = f"cache.root={runs.folder / f'{cached}-{asked}'}"
        assert cli.main([*SMALL, root, f"cache.batch={cached}", "stage=cache"]) == 0
        line = refusal(assemble([*SMALL, root, f"cache.batch={asked}"]).library)
        assert f"; cache.batch: cached with {cached}, configured {asked};" in line


@pytest.mark.parametrize(
    ("overrides", "part", "old", "new"),
    [
        (["data.geometry.size=[128,128]"], "data.geometry", "[64, 64]", "[128, 128]"),
        (["data.geometry.size=[64,80]"], "data.geometry", "[64, 64]", "[64, 80]"),
        (["data.geometry.size=null", "data.geometry.mode=keep"], "data.geometry", "fixed", "keep"),
        (["data.ground=[0,0,0]"], "data.ground", "[255, 255, 255]", "[0, 0, 0]"),
    ],
)
def test_another_size_or_rule_for_pictures_is_refused_with_both_values_and_keeps_the_texts(
    cached: Path, overrides: list[str], part: str, old: str, new: str
) -> None:
    line = refusal(assemble([*settings(cached), *overrides]).library)
    said = line.partition(f"; {part}: cached with ")[2].partition(f"; {part}")[0].split(", configured ")
    assert old in said[0] and new in said[1]
    assert PICTURE in line and TEXT not in line


def test_after_making_the_new_size_both_are_there(cached: Path) -> None:
    grown = [*settings(cached), "data.geometry.size=[96,96]"]
    assert cli.main([*grown, "stage=cache"]) == 0
    assert not assemble(grown).library.missing() and not assemble(settings(cached)).library.missing()


def test_a_cache_of_another_family_is_no_cache_for_this_one(cached: Path) -> None:
    theirs("flux").save_pretrained(cached / "flux")
    line = refusal(assemble(settings(cached, "flux1_dev", "flux")).library)
    count = line.partition("but ")[2].split(" values")[0].split(" of ")
    assert count[0] == count[1], "nothing is shared"


def test_settings_that_an_older_version_did_not_know_are_no_difference_to_a_cache_that_has_every_value(
    cached: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What counts is the values' own keys; what the manifest lists is for messages."""
    library = assemble(settings(cached)).library
    path = write_manifest(library.root, library.parts(), [])
    known = Manifest(path).parts
    older = {name: part for name, part in known.made_of.items() if not name.startswith(("data.augment", "diffusers"))}
    assert len(older) < len(known.made_of)
    write_manifest(library.root, replace(known, made_of=older), [])
    assemble(settings(cached)).library.require("COMMAND")
    line = refusal(assemble([*settings(cached), "data.ground=[1,2,3]"]).library)
    assert "data.augment: nothing was cached with it, configured " in line and "data.ground: cached with [255" in line


def test_a_manifest_of_another_version_is_passed_over_with_a_line(cached: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cached / "cache" / "manifests").mkdir(exist_ok=True)
    newest = sorted(Layout(cached / "cache").manifests.glob("*.safetensors"))[0]
    whole = newest.read_bytes()
    newest.write_bytes(whole.replace(b"flowrun-cache-manifest-1", b"flowrun-cache-manifest-0"))
    try:
        assemble(settings(cached)).library.require("COMMAND")
        assert newest.name in caplog.text
    finally:
        newest.write_bytes(whole)


def test_another_version_of_what_decodes_is_named(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    was = _picture.DECODING
    monkeypatch.setattr(_picture, "DECODING", was + 1)
    said = refusal(assemble([*settings(cached), "stage=train"]).library)
    assert f"; decoding: cached with {was}, now {was + 1}; run: " in said and f"({PICTURE}." in said and TEXT not in said
