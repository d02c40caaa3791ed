"""Whole runs of the families that change pictures.   pytest tests/stages/test_editing.py"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import flowrun.library
from flowrun import adapters, cli
from flowrun.adapters.config import Variant
from flowrun.algorithms._negative import negative_conditions, negative_of, negative_units
from flowrun.compose import compose
from flowrun.data._picture import from_tensor, to_tensor
from flowrun.graph import Draws, Executor, State, seed_of
from flowrun.pipelines._random import RandomWeights
from flowrun.run import assemble
from flowrun.sampling import denoise
from tests.conftest import Runs, losses
from tests.pipelines.families import CPU, EDITORS, SIZE, each, encoded, loaded, make, normal, oracle, picture, seen
from tests.pipelines.oracles import ORACLES
from tests.stages.test_real_families import stages
from tests.stages.test_split_equals_whole import NoStore

pytestmark = pytest.mark.slow

every = each(EDITORS, ("flux2_edit", "flux2_klein_edit", "qwen_image_edit"))
STEPS = 5
CAPTIONS = ["make it a red apple", "remove the very small cat behind the house", "brighter", "as at night"]


def table(folder: Path, size: tuple[int, int] = (64, 64), conditions: int = 1) -> list[str]:
    """Pairs of pictures, after and before, in a table; the settings that read it."""
    lines = []
    for row, caption in enumerate(CAPTIONS):
        names = [f"after{row}.png", *(f"before{row}_{number}.png" for number in range(conditions))]
        for number, name in enumerate(names):
            from_tensor(picture(10 * row + number, size)).save(folder / name)
        lines.append([*names, caption])
    columns = ["after", *(f"before{number}" for number in range(conditions)), "text"]
    with open(folder / "edits.csv", "w", newline="") as file:
        csv.writer(file).writerows([columns, *lines])
    pictures = {"condition": "before0", **({"condition_2": "before1"} if conditions > 1 else {})}
    return ["data=table", f"data.path={folder / 'edits.csv'}", "data.columns.pictures.image=after",
            *(f"+data.columns.pictures.{name}={column}" for name, column in pictures.items()),
            f"data.geometry.size=[{size[0]},{size[1]}]", "data.geometry.multiple_of=16", "tracker=[csv]", "train.log_every=1",
            "train.batch_size=2", f"train.steps={STEPS}", "task.caption_dropout=0.3"]  # fmt: skip


def train(runs: Runs, family: str, *overrides: str) -> Path:
    assert cli.main([f"model={family}_tiny", *table(runs.folder), *overrides]) == 0
    return runs.newest("train")


def both_ways(runs: Runs, monkeypatch: pytest.MonkeyPatch, family: str, *overrides: str) -> Path:
    """Train in two stages and in one: the losses are equal bit for bit. Returns the two-stage run."""
    split = train(runs, family, "task=sft_split", *overrides)
    with monkeypatch.context() as patch:
        patch.setattr(flowrun.library, "Store", NoStore)
        whole = train(runs, family, "task=sft", *overrides)
    assert losses(split) == losses(whole) and len(set(losses(split))) == STEPS
    return split


def stage_of(run: Path, unit: str) -> str:
    """By the plan's table of units."""
    (line,) = [line for line in (run / "plan.txt").read_text().splitlines() if line.strip().startswith(f"{unit} ")]
    return "cache" if " cache " in line else "train"


@every
def test_an_adapter_in_two_stages_as_in_one_and_in_diffusers(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """And what a run draws of its first row is what diffusers draws, shown beside the picture that it was made from."""
    lora = ("adapter=lora", "adapter.rank=4", "adapter.alpha=12", "optimizer.lr=0.02", "sample.rows=1", "sample.steps=2")
    run = both_ways(runs, monkeypatch, family, *lora)
    assert stages(run) == {"text_encoder": "cache", "target_moments": "cache", "target_latents": "train"}
    assert stage_of(run, "vae_encoder") == "cache"
    ours = make(family)
    ours.load(ours.components(), CPU, torch.float32)
    oracle = ORACLES[family](ours)  # of the weights that training starts from
    config = adapters.Config(kind=adapters.Kind.lora, variant=Variant.lora, lora_base_model=["transformer"], targets="auto",
                             rank=4, alpha=12.0, dropout=0.0, init_from=str(run / "model"), merge_first=[], export=[])  # fmt: skip
    noise, pictures = normal(1, *ours.latent_shape(SIZE)), [list(map(from_tensor, seen(ours, 0).values()))]
    before = oracle.sampled(noise, CAPTIONS[:1], 2, 1.0, pictures)
    start = ours.noise(SIZE, torch.Generator().manual_seed(seed_of("sample", 0, CAPTIONS[0])))[None]
    guidance = compose([f"model={family}_tiny"]).sample.guidance
    with Image.open(runs.folder / "before0_0.png") as condition, Image.open(run / "samples" / "step-000000" / "000.png") as first:
        truth = oracle.sampled(start, CAPTIONS[:1], 2, guidance, [[condition.convert("RGB")]])
        torch.testing.assert_close(to_tensor(first)[None] / 255, truth, atol=0.51 / 255, rtol=0)  # 8 bits of it
    oracle.whole.load_lora_weights(str(run / "model"))
    assert next(iter(oracle.whole.transformer.peft_config.values())).lora_alpha == 12
    theirs = oracle.sampled(noise, CAPTIONS[:1], 2, 1.0, pictures)
    oracle.whole.unload_lora_weights()
    adapters.attach(ours.models, [], config, ours.lora_targets, seed=0)
    drawn = ours.decode(denoise(ours, encoded(ours, CAPTIONS[:1]), None, noise, ours.schedule(2, SIZE), 1.0))
    torch.testing.assert_close((drawn + 1) / 2, theirs, atol=2e-5, rtol=0)
    assert (theirs - before).abs().max() > 1e-3
    grid = Image.open(run / "samples" / f"step-{STEPS:06d}.png").convert("RGB")
    with Image.open(runs.folder / "before0_0.png") as condition:
        assert grid.crop((4, 4, 68, 68)).tobytes() == condition.convert("RGB").tobytes()
    result = Image.open(run / "samples" / f"step-{STEPS:06d}" / "000.png")
    assert result.size == (64, 64) and grid.crop((68, 4, 132, 68)).tobytes() == result.convert("RGB").tobytes()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("text_encoder", {"text_encoder": "train", "vae_encoder": "cache"}),
        ("vae.encoder", {"text_encoder": "cache", "vae_encoder": "train"}),
    ],
)
def test_a_trained_encoder_makes_its_own_step_live_and_no_other(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, model: str, expected: dict[str, str]
) -> None:
    run = both_ways(runs, monkeypatch, "qwen_image_edit", f"task.trainable_models=[transformer,{model}]", "sample.rows=0")
    assert {unit: stage_of(run, unit) for unit in expected} == expected


def test_rows_of_several_sizes_and_pictures_train_with_their_like(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = table(runs.folder, conditions=2)
    for row in (1, 2):  # the first picture gives a row its size, to which the others are cut
        from_tensor(picture(row, (64, 96))).save(runs.folder / f"after{row}.png")
    settings += ["data.geometry.mode=keep", "data.geometry.size=null", "model.conditions=2", "sample.rows=2", "sample.steps=1",
                 "sample.guidance=2", "train.steps=3"]  # fmt: skip
    curves = []
    for task in ("sft_split", "sft"):
        assert cli.main(["model=flux2_klein_edit_tiny", *settings, f"task={task}"]) == 0
        curves.append(losses(runs.newest("train")))
    assert curves[0] == curves[1] and len(set(curves[0])) == 3
    plan = (runs.newest("train") / "plan.txt").read_text()
    assert "64x64 pixels: 2 rows" in plan and "96x64 pixels: 2 rows" in plan and "2 rows x 1 seed, 1 solver step, guidance 2" in plan
    with open(runs.newest("train") / "samples" / "step-000003" / "samples.csv", newline="") as file:
        assert [row["prompt"] for row in csv.DictReader(file)] == CAPTIONS[:2]
    sizes = [Image.open(runs.newest("train") / "samples" / "step-000003" / f"00{number}.png").size for number in (0, 1)]
    assert sizes == [(64, 64), (96, 64)]
    assert Image.open(runs.newest("train") / "samples" / "step-000003.png").width == 4 + 2 * (3 * 96 + 4)


def test_rows_are_drawn_from_what_the_cache_has_of_them(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """With caption dropout it has the empty caption beside a row's pictures too, which guidance subtracts."""
    settings = ["model=qwen_image_edit_tiny", *table(runs.folder), "sample.rows=3"]
    library = assemble(settings).library
    drawn, trained = ({key for place in s.places() for key in s.keys(place).values()} for s in (library.prompts, library.rows))
    assert len(drawn) == 3 * (1 + 2 * 2)  # the latents of its picture; embeddings and mask of both captions
    assert drawn < trained
    read: list[str] = []
    real = RandomWeights.load
    monkeypatch.setattr(RandomWeights, "load", lambda self, name: read.append(name) or real(self, name))
    for stage, models in (("cache", {"text_encoder", "vae"}), ("train", {"transformer", "vae"})):
        read.clear()
        assert cli.main([*settings, f"stage={stage}", "train.steps=1", "sample.steps=2"]) == 0
        assert set(read) == models and len(read) == len(models)


def test_the_negative_of_a_row_has_its_pictures() -> None:
    pipeline, alone = loaded("qwen_image_edit"), loaded("flux_kontext")
    (unit,) = negative_units(pipeline)
    assert (unit.name, unit.input_params) == ("negative_text_encoder", ("condition",))
    assert negative_conditions(pipeline) == ("negative_prompt_embeds", "negative_prompt_embeds_mask")
    (text,) = negative_units(alone)
    assert text.input_params == () and "negative_image_latents" not in negative_conditions(alone)
    for row in (0, 1):
        state = State(shared=seen(pipeline, row))
        Executor([unit], pipeline.models).run_unit(0, state, Draws(0, "row", 0))
        truth = encoded(pipeline, [""], first=row)
        made = {name: state.shared[name][None] for name in negative_conditions(pipeline)}
        batch = {**made, "image_latents": truth["image_latents"]}
        assert all(torch.equal(value, truth[name]) for name, value in negative_of(pipeline, batch).items())


def test_models_that_see_captions_alone_draw_those_of_the_first_rows(runs: Runs) -> None:
    run = runs("sample.rows=2", "sample.prompts=[green apple,plum]", "train.steps=1", "sample.steps=1")
    with open(run / "samples" / "step-000001" / "samples.csv", newline="") as file:
        assert [row["prompt"] for row in csv.DictReader(file)] == ["green apple", "plum", "red apple"]
    assert "3 prompts x 1 seed" in (run / "plan.txt").read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["sample.prompts=[a cat]"], "sample.prompts: gives captions alone, but the model also sees condition of each row; set it to []"),
        (["sample.rows=-1"], "sample.rows: is -1; must be at least 0"),
        (["sample.seeds=[]"], "sample.seeds: is empty although there is something to draw; give at least one seed"),
        (["model.conditions=2"], "data.source: the data give image, condition, prompt, and not condition_2; use data that have it"),
        (["data=emoji"], "data.source: the data give image, prompt, and not condition; use data that have it, e.g. data=table "
                          "data.path=FILE +data.columns.pictures.condition=COLUMN, or data=folder data.path=DIR +data.pictures.condition"),
        (["data.geometry.size=[48,48]"], "data: FLUX.2 sees no condition picture of 48x48 pixels; choose sizes with both sides at"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(runs: Runs, capfd: pytest.CaptureFixture[str], settings: list[str], message: str) -> None:
    data = [] if settings == ["data=emoji"] else table(runs.folder)
    assert cli.main(["model=flux2_edit_tiny", *data, *settings]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("flowrun: ")]
    assert line.startswith(f"flowrun: {message}")
    assert not (runs.folder / "outputs").exists()


@pytest.mark.parametrize(
    ("name", "settings"), [("condition", ()), ("mask", ("task.mask=true", "+data.columns.pictures.condition=before0"))]
)
def test_a_list_where_one_picture_is_taken_is_told_with_its_row_before_anything_runs(
    runs: Runs, capfd: pytest.CaptureFixture[str], name: str, settings: tuple[str, ...]
) -> None:
    data = [text for text in table(runs.folder) if "pictures.condition" not in text]
    lines = [{"after": f"after{n}.png", "before0": f"before{n}_0.png", "text": CAPTIONS[n],
              "several": f"before{n}_0.png" if n == 0 else [f"before{n}_0.png", f"before{n}_0.png"]} for n in range(3)]  # fmt: skip
    (runs.folder / "edits.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = [f"data.path={runs.folder / 'edits.jsonl'}", f"+data.columns.pictures.{name}=several", *settings]
    assert cli.main(["model=flux2_edit_tiny", *data, *asked]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("flowrun: ")]
    assert line.startswith(f"flowrun: data: {name} is a list of 2 pictures in row after1.png, and this model and task take one; ")
    assert not (runs.folder / "outputs").exists()


def test_a_saved_editor_trains_with_the_options_own_settings(runs: Runs) -> None:
    folder = runs.folder / "saved"
    oracle("flux_kontext").whole.save_pretrained(folder)
    settings = ["model=flux1_kontext", f"model.weights={folder}", "model.max_sequence_length=77", "model.preferred_sizes=false",
                "adapter=lora", "adapter.rank=4", *table(runs.folder)]  # fmt: skip
    curves = []
    for task in ("sft_split", "sft"):
        assert cli.main([*settings, f"task={task}"]) == 0
        curves.append(losses(runs.newest("train")))
    assert curves[0] == curves[1] and len(set(curves[0])) == STEPS


def test_a_saved_processor_without_torchvision_is_refused_before_weights_are_read(
    runs: Runs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs.folder / "saved"
    oracle("qwen_image_edit").whole.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["processor"] = ["transformers", "Qwen2VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    monkeypatch.setattr("flowrun.pipelines.qwen_image_edit.find_spec", lambda name: None)
    assert cli.main(["model=qwen_image_edit_2509", f"model.weights={folder}", *table(runs.folder)]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("flowrun: ")]
    assert line.startswith(f"flowrun: model.weights: the processor of {folder} needs torchvision, which is not installed; install")
