"""What each model family can do, found out on its tiny networks: `python -m flowrun.families` prints the table of the README.

Every cell is the result of a call: a loss with gradients, diffusers' own switches on the denoiser, a walk with a feature
cache in which fewer layers must have been computed. Nothing is typed in.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from flowrun.compose import CONF, compose
from flowrun.config import ConfigError, Model
from flowrun.graph import Draws, Executor, State
from flowrun.pipelines import Pipeline
from flowrun.registry import ACCELERATORS, PIPELINES
from flowrun.run import Assembly, assemble
from flowrun.sampling import denoise

TINY = "_tiny"  # ends the names of the model options that are probed
STEPS, SIZE, FILM_FPS = 8, (64, 64), 24
NOISE = ("task.noise=per_epoch",)  # what distillation needs to run on any data
TASKS = {"sft": (), "sft_split": (), "distill": NOISE, "distill_split": NOISE}
UNKNOWN = (ValueError, RuntimeError, TypeError, AttributeError, KeyError, NotImplementedError)  # what a switch that does not fit raises


@dataclass(frozen=True)
class Family:
    """option: the tiny model's; others: those of the public checkpoints."""

    name: str
    option: str
    others: tuple[str, ...]

    @cached_property
    def assembly(self) -> Assembly:
        return assemble(self._words("sft_split"))

    @cached_property
    def pipeline(self) -> Pipeline:
        """With all weights."""
        pipeline = self.assembly.pipeline
        pipeline.load(pipeline.components(), torch.device("cpu"), torch.float32)
        return pipeline

    @property
    def denoiser(self) -> nn.Module:
        return self.pipeline.models[self.pipeline.denoiser]

    def row(self) -> list[str]:
        """Cells of the table, as COLUMNS has them."""
        able = [name for name in self.pipeline.components() if self.learns(name)]
        blocks = getattr(self.denoiser, "_repeated_blocks", None) or []
        return [self.name, ", ".join(f"`{name}`" for name in (self.option, *self.others)), ", ".join(filter(self.does, TASKS)),
                ", ".join(self.pipeline.inputs), ", ".join(able), str(self.adapted()), yes(bool(blocks)),
                ", ".join(filter(self.skips, CACHES)) or "none", yes(self.switches_attention())]  # fmt: skip

    def does(self, task: str) -> bool:
        """A loss of the task on one row is finite and gives the denoiser gradients; units are cached where the task says so."""
        try:
            assembly = assemble(self._words(task))
        except ConfigError:
            return False
        loss = self._loss(assembly, self.pipeline.denoiser)
        splits = bool(assembly.split.cached) == task.endswith("_split")
        return splits and bool(loss.isfinite()) and self._has_gradient(self.pipeline.denoiser)

    def learns(self, name: str) -> bool:
        """Whether gradients of a loss reach a component."""
        self._loss(self.assembly, name)
        return self._has_gradient(name)

    def adapted(self) -> int:
        """Layers of the denoiser that `adapter.targets=auto` means."""
        from flowrun.adapters import Config, Kind, targets

        config = Config(kind=Kind.none, variant=None, lora_base_model=[], targets="auto", rank=None, alpha=None, dropout=None,
                        init_from=None, merge_first=[], export=[])  # fmt: skip
        name = self.pipeline.denoiser
        return len(targets.layers(self.denoiser, targets.resolve({name: self.denoiser}, config, self.pipeline.lora_targets)[name]))

    def skips(self, name: str) -> bool:
        """Whether the cache is admitted and a walk leaves something out; without it again, as much is computed as before."""
        cls = ACCELERATORS.find("diffusers_cache", "caches")
        one, whole = cls(ACCELERATORS.build("caches", cls, CACHES[name])), self._computed()
        try:
            one.check(self._unloaded)
            with one.rollout_context(self.pipeline):
                self._computed()
        except (*UNKNOWN, ConfigError):
            return False
        return one.report()["hits"] > 0 and self._computed() == whole

    def switches_attention(self) -> bool:
        """Whether `set_attention_backend` reaches any attention layer: on some networks it does nothing and says so nowhere."""
        return any(hasattr(getattr(module, "processor", None), "_attention_backend") for module in self.denoiser.modules())

    def _words(self, task: str) -> list[str]:
        data = ["data.captions=[red apple,pear]", f"data.size={SIZE[0]}"]
        reads = self._unloaded.inputs
        if "audio" in reads:
            data = ["data=video", f"data.path={films()}", f"data.fps={FILM_FPS}"]
        elif "video" in reads:
            data = ["data=video", f"data.path={videos()}"]
        elif "condition" in reads:
            before, after = edits()
            data = ["data=folder", f"data.path={after}", f"+data.pictures.condition={before}", f"data.geometry.size={[*SIZE]}"]
        return [f"model={self.option}", f"task={task}", *TASKS[task], *data, "sample.prompts=[]", "tracker=[csv]",
                f"task.trainable_models=[{self._unloaded.denoisers[0]}]"]  # fmt: skip

    @cached_property
    def _unloaded(self) -> Pipeline:
        model = compose([f"model={self.option}"]).model
        cls = PIPELINES.find(model["pipeline"], "model.pipeline")
        return cls(PIPELINES.build("model", cls, model, beside=Model), 0)

    def _loss(self, assembly: Assembly, trained: str) -> Tensor:
        pipeline = assembly.pipeline
        pipeline.models, pipeline.trained = self.pipeline.models, (trained,)
        for name, model in pipeline.models.items():
            model.requires_grad_(name == trained)
            model.zero_grad()
        algorithm = assembly.algorithm
        executor = Executor(assembly.split.units, pipeline.models, trained=[trained])
        row = assembly.rows[0]
        state = executor.run(State(shared=assembly.source.load(row)), Draws(0, row.id, 0))
        batch = {name: state.shared[name][None] for name in algorithm.reads(pipeline)}
        loss = algorithm.loss(pipeline, batch, torch.Generator().manual_seed(0)).loss
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    def _has_gradient(self, name: str) -> bool:
        return any(p.grad is not None and bool(p.grad.any()) for p in self.pipeline.models[name].parameters())

    def _computed(self) -> int:
        """Linear layers that the denoiser computes in one walk."""
        count, pipeline = [0], self.pipeline

        def counted(*_: Any) -> None:
            count[0] += 1

        handles = [m.register_forward_hook(counted) for m in self.denoiser.modules() if isinstance(m, nn.Linear)]
        row = self.assembly.rows[0]
        sigmas = pipeline.schedule(STEPS, row.shape)
        given = State(shared=self.assembly.source.load(row))
        state = Executor(self.assembly.prompt_split.units, pipeline.models).run(given, Draws(0, "row", 0))
        noise = torch.randn(1, *pipeline.latent_shape(row.shape), generator=torch.Generator().manual_seed(0))
        try:
            denoise(pipeline, {name: state.shared[name][None] for name in pipeline.conditions}, None, noise, sigmas, 1.0)
        finally:
            for handle in handles:
                handle.remove()
        return count[0]


RANGE = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": [-1, 700]}  # not the first steps
# Settings that let each of them skip where it is wired to the network at all.
CACHES: dict[str, dict[str, Any]] = {
    "first block": {"policy": "first_block", "policy_params": {"threshold": 100.0}},
    "MagCache": {"policy": "magcache", "policy_params": {"threshold": 10.0, "mag_ratios": [1.0] * STEPS}},
    "TaylorSeer": {"policy": "taylorseer", "policy_params": {"cache_interval": 3, "disable_cache_before_step": 1}},
    "pyramid": {"policy": "pyramid", "policy_params": RANGE},
    "FasterCache": {"policy": "faster", "policy_params": RANGE},
}
COLUMNS = ("family", "options", "tasks", "reads", "can be trained", "layers of the tiny network under `adapter.targets=auto`",
           "compiled by blocks", "feature caches that skip", "attention backend can be set")  # fmt: skip


def families() -> list[Family]:
    """By the tiny options in conf/model; every other option of the same kind is a public checkpoint."""
    options = sorted(file.stem for file in (CONF / "model").glob("*.yaml"))
    kinds = {option: _kind(compose([f"model={option}"]).model) for option in options}
    found = []
    for option in options:
        if option.endswith(TINY):
            others = tuple(o for o in options if kinds[o] == kinds[option] and not o.endswith(TINY))
            found.append(Family(option.removesuffix(TINY), option, others))
    return found


def _kind(model: Mapping[str, Any]) -> tuple[str, bool, str | None]:
    """Its pipeline, whether that is told to see pictures, and the blocks where these are all that is known."""
    return model["pipeline"], bool(model.get("conditions")), model.get("blocks")


@cache
def videos() -> Path:
    """A folder of two videos of five random frames, with captions; it is left to the system to remove."""
    folder = Path(tempfile.mkdtemp())
    for name in ("red apple", "pear"):
        (folder / name).mkdir()
        for frame in range(5):
            Image.effect_noise((32, 32), 64).convert("RGB").save(folder / name / f"{frame}.png")
        (folder / f"{name}.txt").write_text(name)
    return folder


@cache
def films() -> Path:
    """The same as films of 16 thousand random samples a second."""
    import av  # of an extra of its own

    folder = Path(tempfile.mkdtemp())
    for name in ("red apple", "pear"):
        with av.open(str(folder / f"{name}.mkv"), "w") as container:
            pictures, sound = container.add_stream("ffv1", rate=FILM_FPS), container.add_stream("pcm_s16le", rate=16000, layout="mono")
            pictures.width, pictures.height, pictures.pix_fmt = 32, 32, "bgr0"
            for _ in range(5):
                container.mux(pictures.encode(av.VideoFrame.from_image(Image.effect_noise((32, 32), 64).convert("RGB"))))
            samples = torch.randint(-(2**15), 2**15, (1, 5 * 16000 // FILM_FPS)).short().numpy()
            heard = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            heard.sample_rate = 16000
            container.mux([*pictures.encode(), *sound.encode(heard), *sound.encode()])
        (folder / f"{name}.txt").write_text(name)
    return folder


@cache
def edits() -> tuple[Path, Path]:
    """Two folders of random pictures of the same names, before and after, the latter with captions; left to the system, too."""
    folder = Path(tempfile.mkdtemp())
    for part in ("before", "after"):
        (folder / part).mkdir()
        for name in ("red apple", "pear"):
            Image.effect_noise(SIZE, 64).convert("RGB").save(folder / part / f"{name}.png")
            (folder / part / f"{name}.txt").write_text(name)
    return folder / "before", folder / "after"


def table(rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    sys.stdout.write(table([family.row() for family in families()]) + "\n")
