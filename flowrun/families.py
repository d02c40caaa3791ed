"""What each model family can do, found out on its tiny networks: `python -m flowrun.families` prints the table of the README.

Every cell is the result of a call: a loss with gradients, an epoch of learning from rewards, the denoiser compiled by blocks, its
loss by each attention kernel, a walk with a feature cache in which fewer layers must have been computed. Nothing is typed in.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn

from flowrun.accelerators import applied
from flowrun.compose import CONF, compose
from flowrun.config import ConfigError, Failure, Model
from flowrun.dist import make_dist
from flowrun.graph import Draws, Executor, State
from flowrun.pipelines import Pipeline
from flowrun.random_data import FILM_FPS, SIZE, edits, films, videos
from flowrun.registry import PIPELINES
from flowrun.run import Assembly, assemble
from flowrun.sampling import denoise
from flowrun.stages.build import build_learning
from flowrun.trials import BACKENDS, BY_BLOCKS, CACHES, STEPS, accelerator, asked

NONE, TINY = "none", "_tiny"  # the latter ends the names of the model options that are probed
NOISE = ("task.noise=per_epoch",)  # what distillation needs to run on any data
TASKS = {"sft": (), "sft_split": (), "distill": NOISE, "distill_split": NOISE}
# An epoch of two samples in three steps.
EPOCH = ("task.splitter=none", "reward=[red]", "tracker=[]", "optimizer.warmup_steps=0", "train.steps=null", "train.epochs=1",
         "train.batch_size=2", "rollout.prompts_per_epoch=1", "rollout.group_size=2", "rollout.batch_size=2", "rollout.updates=1",
         "rollout.sampler.steps=3")  # fmt: skip
ONE_NOISY = (*EPOCH, "rollout.sampler.window.size=1")
REWARDED = {"grpo": ONE_NOISY, "grpo_rescored": ONE_NOISY, "nft": EPOCH}
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
        return [self.name, quoted([self.option, *filter(self.runs, self.others)]),
                quoted(other for other in self.others if not self.runs(other)), listed(filter(self.does, TASKS)),
                listed(filter(self.learns_from_rewards, REWARDED)), listed(self.pipeline.inputs), listed(able), str(self.adapted()),
                yes(self.compiles_by_blocks()), listed(filter(self.skips, CACHES)), self.attention()]  # fmt: skip

    @staticmethod
    def runs(option: str) -> bool:
        """Whether it does without published weights; an option that names some is its configuration only, as far as was tried here."""
        return compose([f"model={option}"]).model["weights"] is None

    def does(self, task: str) -> bool:
        """A loss of the task on one row is finite and gives the denoiser gradients; units are cached where the task says so."""
        try:
            assembly = assemble(self._words(task))
        except ConfigError:
            return False
        loss = self._learned(self.pipeline.denoiser, assembly)
        splits = bool(assembly.split.cached) == task.endswith("_split")
        return splits and bool(loss.isfinite()) and self._has_gradient(self.pipeline.denoiser)

    def learns_from_rewards(self, task: str) -> bool:
        """An epoch of sampling, scoring and learning ends, and leaves finite weights of which some have moved."""
        try:
            assembly = assemble(self._words(task, self._unloaded.denoisers))
            with tempfile.TemporaryDirectory() as folder:
                learning = build_learning(assembly, make_dist(assembly.run.precision), Path(folder), None)
                before = [p.detach().clone() for p in learning.updates.parameters.values()]
                learning.run()
        except (ConfigError, Failure):
            return False
        after = list(learning.updates.parameters.values())
        moved = not all(map(torch.equal, before, after))
        return moved and all(bool(p.isfinite().all()) for p in after)

    def learns(self, name: str) -> bool:
        """Whether gradients of a loss reach a component."""
        self._learned(name)
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
        one, whole = accelerator("diffusers_cache", CACHES[name]), self._computed()
        try:
            one.check(self._unloaded)
            with one.rollout_context(self.pipeline):
                self._computed()
        except (*UNKNOWN, ConfigError):
            return False
        return one.report()["hits"] > 0 and self._computed() == whole

    def compiles_by_blocks(self) -> bool:
        """Whether torch makes graphs of its repeated blocks alone, which compute the same loss; by a compiler that changes nothing."""
        one, plain = accelerator("torch_compile", BY_BLOCKS), self._denoised().detach()
        torch._dynamo.reset()  # or what another family compiled would count for this one
        try:
            one.check(self._unloaded)
        except ConfigError:
            return False
        with applied([one], self.pipeline):
            compiled = self._denoised().detach()
        return one.report()["graphs"] > 0 and torch.allclose(compiled, plain)

    def attention(self) -> str:
        """Kernels by which it can be trained."""
        able = listed(filter(self.attends_by, BACKENDS))
        return f"{able}: diffusers' setter does nothing" if able == NONE and self.ignores_backend() else able

    def ignores_backend(self) -> bool:
        """Whether diffusers' `set_attention_backend` goes through, and the kernel is then not asked for."""
        default, plain = _AttentionBackendRegistry._active_backend, AttentionBackendName._NATIVE_MATH
        try:
            self.denoiser.set_attention_backend(plain.value)
            with asked(plain) as count:
                self._denoised()
        finally:
            _AttentionBackendRegistry.set_active_backend(default)
        return count[0] == 0

    def attends_by(self, backend: str) -> bool:
        """Whether the kernel is admitted, computes attention of the denoiser, and gives the native one's gradients."""
        one = accelerator("attention_backend", {"backend": backend})
        try:
            one.check(self._unloaded)
            with asked(AttentionBackendName(backend)) as count, applied([one], self.pipeline):
                one.prove(self.pipeline, self._denoised)
        except ConfigError:
            return False
        return count[0] > 0

    def _words(self, task: str, trained: Sequence[str] = ()) -> list[str]:
        """The command that does a task. trained: components; the first denoiser where none is named."""
        data = ["data.captions=[red apple,pear]", f"data.size={SIZE[0]}"]
        reads = self._unloaded.inputs
        if "audio" in reads:
            data = ["data=video", f"data.path={films()}", f"data.fps={FILM_FPS}"]
        elif "video" in reads:
            data = ["data=video", f"data.path={videos()}"]
        elif "condition" in reads:
            before, after = edits()
            data = ["data=folder", f"data.path={after}", f"+data.pictures.condition={before}", f"data.geometry.size={[*SIZE]}"]
        return [f"model={self.option}", f"task={task}", *data, "sample.prompts=[]", "tracker=[csv]",
                f"task.trainable_models=[{','.join(trained or self._unloaded.denoisers[:1])}]", *(TASKS | REWARDED)[task]]  # fmt: skip

    @cached_property
    def _unloaded(self) -> Pipeline:
        model = compose([f"model={self.option}"]).model
        cls = PIPELINES.find(model["pipeline"], "model.pipeline")
        return cls(PIPELINES.build("model", cls, model, beside=Model), 0)

    def _learned(self, trained: str, assembly: Assembly | None = None) -> Tensor:
        """A loss, whose gradients are left on what is trained if they come to it. 0-d. assembly: of another task than `sft_split`."""
        assembly = assembly or self.assembly
        loss = self._loss(self._batch(trained, assembly), assembly)
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    def _denoised(self) -> Tensor:
        """The loss of the denoiser, which alone gets gradients. 0-d, the same each time."""
        self._train(self.pipeline.denoiser)
        return self._loss(self._read, self.assembly)

    def _loss(self, batch: Mapping[str, Tensor], assembly: Assembly) -> Tensor:
        return assembly.algorithm.loss(assembly.pipeline, batch, torch.Generator().manual_seed(0)).loss

    @cached_property
    def _read(self) -> dict[str, Tensor]:
        """What the loss of the denoiser reads."""
        return self._batch(self.pipeline.denoiser, self.assembly)

    def _batch(self, trained: str, assembly: Assembly) -> dict[str, Tensor]:
        """Of one row, with gradients of this component and of no other."""
        self._train(trained)
        assembly.pipeline.models, assembly.pipeline.trained = self.pipeline.models, (trained,)
        executor = Executor(assembly.split.units, self.pipeline.models, trained=[trained])
        row = assembly.rows[0]
        state = executor.run(State(shared=assembly.source.load(row)), Draws(0, row.id, 0))
        return {name: state.shared[name][None] for name in assembly.algorithm.reads(assembly.pipeline)}

    def _train(self, trained: str) -> None:
        for name, model in self.pipeline.models.items():
            model.requires_grad_(name == trained)
            model.zero_grad()

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


COLUMNS = ("family", "options that were run", "options of published weights, configuration only", "tasks", "tasks with rewards",
           "reads", "can be trained", "layers of the tiny network under `adapter.targets=auto`", "compiled by blocks",
           "feature caches that skip", "attention backends on a CPU")  # fmt: skip


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


def table(rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or NONE


def quoted(names: Iterable[str]) -> str:
    return listed(f"`{name}`" for name in names)


def yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    sys.stdout.write(table([family.row() for family in families()]) + "\n")
