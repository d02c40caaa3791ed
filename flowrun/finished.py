"""A finished run as something to draw from: its trained weights and the captions of its data, encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from flowrun import adapters
from flowrun.compose import to_run
from flowrun.config import ConfigError, Run
from flowrun.graph import Executor
from flowrun.prompts import encode
from flowrun.run import assemble
from flowrun.sampling import Walk, walks


def saved_run(run_dir: Path) -> Run:
    """What the run was configured to do. Raises ConfigError when the directory is no train run's with a result."""
    if not (run_dir / "model").is_dir():
        raise ConfigError("RUN_DIR", f"{run_dir} holds no trained model", "give the directory of a finished train run")
    return read_config(run_dir)


def read_config(run_dir: Path) -> Run:
    """Of any run. Raises ConfigError when the directory is none's."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError("RUN_DIR", f"{run_dir} holds no config.yaml", "give the directory of a run")
    return to_run(OmegaConf.merge(OmegaConf.structured(Run), OmegaConf.load(run_dir / "config.yaml")))


class Finished:
    """assembly: the run's, with the weights that it trained and every unit live. shape: of its pictures."""

    def __init__(self, run_dir: Path, prompts: Sequence[str], guidance: float) -> None:
        """Loads the networks. prompts: what will be asked for; empty: every caption of the run's data.

        Raises ConfigError, DataError."""
        run = saved_run(run_dir)
        run.stage, run.resume, run.dry_run, run.task["splitter"] = None, "none", False, "none"
        if run.adapter["kind"] == "none":
            run.model["weights"] = str(run_dir)
        else:
            run.adapter["init_from"], run.adapter["export"] = str(run_dir / "model"), []
        run.sample.prompts, run.sample.rows, run.sample.guidance = list(prompts), 0, guidance
        if not prompts:
            run.sample.prompts = list(dict.fromkeys(row.prompt for row in assemble(run).rows))
        self.prompts, self.guidance, self.assembly = run.sample.prompts, guidance, assemble(run)
        self.shape = self.assembly.rows[0].shape
        self._load()
        self.encoded = self._encode()

    def walks(self, wanted: Sequence[tuple[str, int]], steps: int) -> Iterator[Walk]:
        """From the noise of each (prompt, seed), which is the same for every run of the same model family and size."""
        return walks(self.assembly.pipeline, self.encoded, wanted, self.shape, steps, self.guidance)

    def pictures(self, wanted: Sequence[tuple[str, int]], steps: int) -> Tensor:
        """[len(wanted), 3, H, W], or [len(wanted), F, 3, H, W] of videos, in [-1, 1], on the CPU."""
        decode = self.assembly.pipeline.decode
        return torch.cat([decode(walk.latents).cpu() for walk in self.walks(wanted, steps)])

    def _load(self) -> None:
        a = self.assembly
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
        a.pipeline.load(a.train_models, device, a.dtype)
        if a.adapter.kind is not adapters.Kind.none:
            models, targets = a.pipeline.models, a.pipeline.lora_targets
            adapters.attach(models, a.task.trainable_models, a.adapter, targets, a.run.seed, a.pipeline.adapter_names)
        a.pipeline.settle(device)
        for model in a.pipeline.models.values():
            model.requires_grad_(False).eval()

    def _encode(self) -> dict[str, dict[str, Tensor]]:
        a, pipeline = self.assembly, self.assembly.pipeline
        configs = {name: component.configure() for name, component in pipeline.components().items()}
        executor = Executor(a.prompt_split.units, pipeline.models, configs)
        found = encode(a.drawn, a.prompts, a.prompt_split, executor, [{}] * len(a.prompts), pipeline.conditions, a.run.seed)
        return {row.prompt: found[row.id] for row in a.prompts}
