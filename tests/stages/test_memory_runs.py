"""Whole runs with frozen weights held otherwise.   pytest tests/stages/test_memory_runs.py"""

from __future__ import annotations

import pytest
import torch

import flowrun.library
from flowrun import cli
from flowrun.config import Held
from flowrun.finished import Finished
from tests.conftest import Runs, losses
from tests.frozen.test_held_weights import every
from tests.pipelines.families import theirs
from tests.stages.test_split_equals_whole import NoStore

pytestmark = pytest.mark.slow

RUN = (
    "data.captions=[red apple,green apple,pear,lemon]", "data.size=64", "tracker=[csv]", "sample.prompts=[]", "train.log_every=1",
    "train.batch_size=2", "train.steps=6", "task.caption_dropout=0.3", "adapter=lora", "adapter.rank=4", "adapter.alpha=4",
    "optimizer.lr=0.02", "precision=bf16", "model.dtype=bf16", "train.gradient_checkpointing=true",
)  # fmt: skip


@every(Held.bnb_nf4, Held.torchao_int8, Held.fp8_cast)
def test_two_stages_train_as_one_and_plain_diffusers_loads_the_adapter(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, held: Held
) -> None:
    chosen = [f"+memory.weights.{name}={held.value}" for name in ("transformer", "text_encoder_2", "vae")]
    curves = []
    for task, patched in (("sft_split", False), ("sft", True)):
        with monkeypatch.context() as patch:
            if patched:
                patch.setattr(flowrun.library, "Store", NoStore)
            assert cli.main(["model=flux_tiny", *RUN, f"task={task}", *chosen]) == 0
        curves.append(losses(runs.newest("train")))
    assert curves[0] == curves[1] and len(set(curves[0])) == 6
    run = runs.newest("train")
    plan = (run / "plan.txt").read_text()
    assert plan.count(": saves ") == 3 and "\nmemory      transformer: " in plan
    whole = theirs("flux")
    whole.load_lora_weights(str(run / "model"))
    try:
        assert next(iter(whole.transformer.peft_config.values())).r == 4
    finally:
        whole.unload_lora_weights()
    assert Finished(run, ["pear"], 1.0).pictures([("pear", 0)], 2).isfinite().all()


@every(Held.bnb_nf4, Held.fp8_cast)
def test_several_processes_share_a_network_that_is_held_otherwise(runs: Runs, held: Held) -> None:
    """Its frozen weights are not sent around: every process has loaded them."""
    curves = []
    for settings in (["processes=2", "train.batch_size=1"], ["train.accumulate=2", "train.batch_size=1"]):
        assert cli.main(["model=flux_tiny", *RUN, *settings, f"+memory.weights.transformer={held.value}"]) == 0
        curves.append([float(loss) for loss in losses(runs.newest("train"))])
    assert torch.allclose(*map(torch.tensor, curves), atol=1e-4)
