"""What lies in a cache, looked at: decoded, it is what the model was to see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowrun import cli
from flowrun.cache.__main__ import main
from flowrun.contact import contact_sheet
from flowrun.run import assemble
from tests.conftest import SMALL, Runs


def test_cached_targets_decode_to_the_pictures_of_the_data(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs("stage=cache", "task.caption_dropout=0.3")
    capsys.readouterr()
    assert main(["show", str(runs.newest("cache")), "--out", "sheet.png"]) == 0
    assert capsys.readouterr().out == f"{runs.folder / 'sheet.png'}\n"
    assembly = assemble(SMALL)
    with Image.open("sheet.png") as found:
        wanted = np.asarray(contact_sheet(assembly.variants, assembly.rows)).astype(int)
        assert np.abs(np.asarray(found.convert("RGB")) - wanted).max() <= 1


def test_targets_that_are_drawn_from_cached_moments_are_shown_too(runs: Runs) -> None:
    command = ["model=sd3_tiny", "data=emoji", "data.size=64", "data.captions=[red apple,pear]", "tracker=[csv]",
               "sample.prompts=[]"]  # fmt: skip
    assert cli.main([*command, "stage=cache"]) == 0
    assert main(["show", str(runs.newest("cache"))]) == 0
    with Image.open("cached.png") as found:
        assert found.width > 2 * 64


def test_a_folder_that_is_no_run_and_a_run_without_a_cache_are_named(
    runs: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["show", str(tmp_path / "none")]) == 2
    assert "none holds no config.yaml; give the directory of a run" in capsys.readouterr().err
    for out in ("nowhere/x.png", "x.foo"):
        assert main(["show", str(tmp_path), "--out", out]) == 2
        assert f"--out: {out} cannot be written; name a picture" in capsys.readouterr().err
    whole = runs("task=sft", "train.steps=1")
    assert main(["show", str(whole)]) == 2
    assert "uses no cache" in capsys.readouterr().err
    split = runs("train.steps=1")
    for shard in (runs.folder / "outputs" / "cache" / "shards").iterdir():
        shard.unlink()
    assert main(["show", str(split)]) == 2
    assert "holds no targets of" in capsys.readouterr().err
