"""Whole runs with adapters merged first, with other forms of the result, and from files of other programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrun import cli
from flowrun.finished import Finished
from flowrun.run import assemble
from tests.conftest import SMALL, Runs, losses

pytestmark = pytest.mark.slow

FAST = ("adapter=lora", "adapter.rank=4", "adapter.alpha=12", "train.steps=4", "optimizer.lr=0.05", "task.caption_dropout=0.3")
REAL = ("data.captions=[red apple,green apple,pear,lemon]", "data.size=64", "tracker=[csv]", "sample.prompts=[]",
        "train.log_every=1", "train.batch_size=2", "adapter.targets=auto", *FAST)  # fmt: skip


def merging(*entries: str) -> str:
    return f"adapter.merge_first=[{','.join(entries)}]"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "pytorch_lora_weights.safetensors")


def test_a_run_on_a_merged_adapter_goes_on_where_that_one_ended_and_saves_the_new_one_alone(runs: Runs) -> None:
    first = runs(*FAST, "run_id=first")
    entry = f"{{path: {first / 'model'}, scale: 1.0}}"
    second = runs(*FAST, "run_id=second", merging(entry))
    assert f"FluxTransformer2DModel, random weights, seed 0, {first / 'model'} merged 1 times" in (second / "plan.txt").read_text()
    assert weights(second).keys() == weights(first).keys()
    assert losses(second) != losses(first)
    plain = runs(*FAST, "run_id=plain", merging(f"{{path: {first / 'model'}, scale: 1e-9}}"))
    assert float(losses(plain)[0]) == pytest.approx(float(losses(first)[0]), abs=1e-6), "merged almost not at all"
    drawn = Finished(second, ["pear"], 1.0).pictures([("pear", 0)], 4)
    alone = Finished(plain, ["pear"], 1.0).pictures([("pear", 0)], 4)
    assert drawn.isfinite().all() and (drawn - alone).abs().max() > 1e-3


def test_only_what_reaches_a_cached_unit_gives_the_cache_other_keys(runs: Runs) -> None:
    both = "adapter.lora_base_model=[transformer,text_encoder]"
    assert cli.main(["model=flux_tiny", *REAL, both, "run_id=both"]) == 0
    made, tensors = runs.newest("train") / "model", weights(runs.newest("train"))
    for name in ("transformer", "text_encoder"):
        save_file({k: v for k, v in tensors.items() if k.startswith(f"{name}.")}, runs.folder / f"{name}.safetensors")

    def keys(*entries: str) -> list[bytes]:
        return assemble(["model=flux_tiny", *REAL, merging(*entries)]).library.all_keys()

    plain = keys()
    assert keys(str(runs.folder / "transformer.safetensors")) == plain
    texts = str(runs.folder / "text_encoder.safetensors")
    found = [keys(texts), keys(f"{{path: {texts}, scale: 0.5}}")]
    assert len({tuple(k) for k in (plain, *found)}) == 3
    images = set(plain) & set(found[0])
    assert images and images < set(plain), "the VAE's values stay, the captions' do not"

    curves = []
    for task in ("sft_split", "sft"):
        assert cli.main(["model=flux_tiny", *REAL, f"task={task}", merging(str(made))]) == 0
        curves.append(losses(runs.newest("train")))
    assert curves[0] == curves[1] and len(set(curves[0])) == 4
    (*_, cached) = sorted((runs.folder / "outputs" / "runs" / "cache").glob("*/*/plan.txt"), key=lambda path: path.stat().st_mtime)
    assert "merged 1 times" in cached.read_text()


@pytest.mark.parametrize("variant", ["lokr", "loha"])
def test_a_run_with_a_product_starts_from_another_ones_folder_and_is_drawn_from(runs: Runs, variant: str) -> None:
    settings = (*FAST, f"adapter.variant={variant}")
    first = runs(*settings, "run_id=first")
    assert {path.name for path in (first / "model").iterdir()} == {"peft"}
    second = runs(*settings, "run_id=second", f"adapter.init_from={first / 'model'}")
    assert losses(second) != losses(first)
    assert Finished(second, ["pear"], 1.0).pictures([("pear", 0)], 4).isfinite().all()


def test_further_forms_lie_beside_the_own_one_and_can_be_started_from(runs: Runs) -> None:
    assert cli.main(["model=z_image_tiny", *REAL, "adapter.export=[peft,comfyui,kohya]"]) == 0
    folder = runs.newest("train") / "model"
    assert {path.name for path in folder.iterdir()} == {
        "pytorch_lora_weights.safetensors", "peft", "lora_comfyui.safetensors", "lora_kohya.safetensors"}  # fmt: skip
    first = losses(runs.newest("train"))
    curves = []
    for start in ("pytorch_lora_weights.safetensors", "peft/transformer", "lora_kohya.safetensors"):
        assert cli.main(["model=z_image_tiny", *REAL, f"adapter.init_from={folder / start}"]) == 0
        curves.append(losses(runs.newest("train")))
    assert curves[0] == curves[1] == curves[2] != first


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["adapter.export=[kohya]"], "adapter.export: kohya: diffusers reads no lora of this model from there; what there is: diff"),
        (["adapter.export=[koyha]"], "adapter.export"),
        (["adapter.merge_first=[nowhere]"], "adapter.merge_first: there is no file nowhere"),
        (["adapter.variant=lokr", "adapter.dropout=0.1"], "adapter.dropout: is 0.1, but lokr multiplies weights"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(
    runs: Runs, capfd: pytest.CaptureFixture[str], settings: list[str], message: str
) -> None:
    runs(*FAST, *settings, code=2)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("flowrun: ")]
    assert line.startswith(f"flowrun: {message}")
    assert not (runs.folder / "outputs").exists()


def test_merging_needs_an_adapter_to_train(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "adapter.merge_first=[x]"]) == 2
    assert "adapter.merge_first: is ['x'], which adapter.kind=none does not use" in capfd.readouterr().err


def test_the_plan_says_which_layers_carry_the_adapter(runs: Runs) -> None:
    settings = ["model=flux_tiny", *REAL, "adapter.lora_base_model=[transformer,text_encoder_2]"]
    lines = [line.strip() for line in str(assemble(settings).plan).splitlines()]
    (listed,) = [line for line in lines if line.startswith("adapter on transformer: ")]
    (found,) = [line for line in lines if line.startswith("adapter on text_encoder_2: ")]
    assert listed == "adapter on transformer: 30 layers, attn.add_k_proj, attn.add_q_proj, attn.add_v_proj, attn.to_add_out, " \
        "attn.to_k, attn.to_out.0, attn.to_q, attn.to_v, ff.net.0.proj, ff.net.2, ff_context.net.0.proj, ff_context.net.2"
    assert found.startswith(r"adapter on text_encoder_2: 14 layers, re:encoder\.block\.\d+\.(layer\.0\.SelfAttention\.q|")
