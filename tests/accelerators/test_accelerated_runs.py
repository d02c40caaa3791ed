"""Whole runs with accelerators, through the command line.   pytest tests/accelerators/test_accelerated_runs.py"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowrun import cli
from flowrun.stages.trainer import Trainer
from tests.conftest import SMALL, Runs, losses, result

pytestmark = pytest.mark.slow

KERNEL = ("acceleration/shared=[attention_backend]", "acceleration.shared.attention_backend.backend=_native_math")
COMPILE = ("acceleration/shared=[torch_compile]", "acceleration.shared.torch_compile.compile_kwargs.backend=eager")


def test_training_by_another_kernel_differs_in_last_bits_and_by_the_native_one_in_none(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, step = [], Trainer.step

    def noted(self: Trainer, number: int) -> dict[str, float]:
        used.append({m.processor._attention_backend for m in self.pipeline.models["transformer"].modules() if hasattr(m, "processor")})
        return step(self, number)

    plain = runs("train.steps=2", "task.caption_dropout=0.5")
    monkeypatch.setattr(Trainer, "step", noted)
    found = runs("train.steps=2", "task.caption_dropout=0.5", "sample.prompts=[pear]", "sample.steps=1", *KERNEL)
    exact = runs("train.steps=2", "task.caption_dropout=0.5", KERNEL[0], "acceleration.shared.attention_backend.backend=native")
    assert used == [{"_native_math"}] * 2 + [{"native"}] * 2
    assert losses(exact) == losses(plain)  # so the comparison before training leaves no trace
    assert [float(loss) for loss in losses(found)] == pytest.approx([float(loss) for loss in losses(plain)], rel=1e-4)
    assert "attention_backend (lossless): transformer _native_math, 2 attention layers" in (found / "plan.txt").read_text()
    assert len(list((found / "samples").glob("*.png"))) == 2


def test_a_dry_run_shows_slots_components_and_nothing_is_written(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    order = "acceleration/shared=[attention_backend,torch_compile]"
    mine = "+acceleration.shared.mine={target:tests.accelerators.noted.Noted,k:3}"
    assert cli.main([*SMALL, "dry_run=true", order, *KERNEL[1:], *COMPILE[1:], mine]) == 0
    out = capsys.readouterr().out
    assert "shared      attention_backend (lossless): transformer _native_math, 2 attention layers\n" in out
    compiled = "transformer regional (FluxTransformerBlock, FluxSingleTransformerBlock), backend=eager"
    assert f"            torch_compile (lossy): {compiled}\n" in out
    assert "            Noted (lossless)\n" in out
    assert not (runs.folder / "outputs" / "runs").exists()


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (("acceleration/rollout=[diffusers_cache]",), "flowrun: acceleration.rollout.diffusers_cache: Sft has no rollouts, so it would do"),
        ((KERNEL[0], "acceleration.shared.attention_backend.backend=sage"),
         "flowrun: acceleration.shared.attention_backend.backend: sage cannot be used: "),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_and_makes_no_directory(
    runs: Runs, capsys: pytest.CaptureFixture[str], texts: tuple[str, ...], line: str
) -> None:
    runs(*texts, code=2)
    assert capsys.readouterr().err.startswith(line)
    assert not (runs.folder / "outputs" / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("adapter=lora", "adapter.rank=2"), ("train.gradient_checkpointing=true",)])
def test_training_compiled_is_training(runs: Runs, more: tuple[str, ...]) -> None:
    """With a compiler that changes nothing the losses are the same to the last bit, and so are the names that are saved."""
    torch._dynamo.reset()
    plain, found = (runs("train.steps=3", *more, *texts) for texts in ((), COMPILE))
    assert losses(found) == losses(plain)
    told = result(found)
    assert told["torch_compile/graphs"] > 0 and told["torch_compile/gave_up"] == 0
    assert _names(found) == _names(plain) != []


@pytest.mark.slow
def test_two_processes_train_by_a_kernel_and_compiled(runs: Runs) -> None:
    order = "acceleration/shared=[attention_backend,torch_compile]"
    both = ((), (order, *KERNEL[1:], *COMPILE[1:]))
    plain, found = (runs("train.steps=2", "processes=2", "train.batch_size=1", *texts) for texts in both)
    assert [float(loss) for loss in losses(found)] == pytest.approx([float(loss) for loss in losses(plain)], rel=1e-4)


def _names(run: Path) -> list[str]:
    from safetensors import safe_open

    return [name for file in sorted((run / "model").rglob("*.safetensors")) for name in safe_open(file, "pt").keys()]  # noqa: SIM118
