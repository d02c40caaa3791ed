"""Every family on two ranks, in one launch: the weights are those of one process with twice the accumulation.

pytest tests/stages/test_family_ranks.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrun import cli
from tests.pipelines.families import FROM_TEXT
from tests.ranks import Told, launch

COMMON = (
    "data.captions=[red apple,green apple,pear,lemon]", "data.size=64", "tracker=[csv]", "sample.prompts=[]", "train.batch_size=1",
    "train.steps=3", "adapter=lora", "adapter.rank=4", "adapter.alpha=8", "optimizer=sgd", "optimizer.lr=1.0", "resume=none",
)  # fmt: skip
WEIGHTS = Path("model") / "pytorch_lora_weights.safetensors"
pytestmark = pytest.mark.slow


def words(family: str) -> list[str]:
    denoiser = "unet" if family == "sdxl" else "transformer"
    return [f"model={family}_tiny", f"adapter.lora_base_model=[{denoiser}]", *COMMON]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Told]]:
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for family in FROM_TEXT:  # fills the cache for both
            assert cli.main([*words(family), "train.accumulate=2", f"run_id={family}_alone"]) == 0
    plan = [{"name": family, "words": [*words(family), f"run_id={family}_pair"]} for family in FROM_TEXT]
    return folder, launch(folder, plan)


@pytest.mark.parametrize("family", FROM_TEXT)
def test_two_ranks_train_as_one_process_with_twice_the_accumulation(told: tuple[Path, dict[str, Told]], family: str) -> None:
    folder, said = told
    assert said[family].codes == [0, 0] and said[family].lines() == [] and said[family].encoded == [[], []]
    alone, pair = (
        load_file(next((folder / "outputs" / "runs" / "train").glob(f"*/{family}_{name}")) / WEIGHTS) for name in ("alone", "pair")
    )
    assert alone.keys() == pair.keys() and any(value.any() for name, value in pair.items() if "lora_B" in name)
    for name, value in alone.items():
        torch.testing.assert_close(pair[name], value, atol=1e-5, rtol=1e-3)
