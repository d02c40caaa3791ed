"""One training step of a run on networks without content: its own loss, backward pass and optimizer, bytes counted.

The driver's own part of the device's memory, workspaces of kernels and gaps between tensors are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowrun import adapters, frozen
from flowrun.adapters import Config, trained_names, trained_parameters
from flowrun.algorithms import Algorithm
from flowrun.config import ConfigError, Model, Precision, Run, Task
from flowrun.frozen.layers import in_full
from flowrun.memory.count import Live, Saved
from flowrun.memory.fake import GpuAutocast, called_as, checkpointed, faked
from flowrun.online import make_algorithm
from flowrun.optim import make_optimizer
from flowrun.pipelines import Pipeline, Shape, held_in
from flowrun.pipelines._precision import DTYPES, computes_in
from flowrun.registry import checked, common
from flowrun.run import make_pipeline


@dataclass(frozen=True)
class Estimate:
    """Bytes in the train stage. weights: of the denoisers that the loss calls, adapters included. kept: by autograd between
    forward and backward pass. working: the most that exists at one time of all that a step makes, gradients included."""

    weights: int
    gradients: int
    optimizer: int
    kept: int
    working: int

    @property
    def peak(self) -> int:
        return self.weights + self.optimizer + self.working


class Step:
    """The parts of a run that its training step is made of. shape: of its rows. Raises ConfigError for what is not estimated."""

    def __init__(self, run: Run, shape: Shape) -> None:
        self.run, self.shape, self.task = run, shape, common("task", Task, run.task)
        self.dtype = DTYPES[common("model", Model, run.model).dtype]
        self.pipeline: Pipeline = make_pipeline(run)
        self.algorithm: Algorithm = make_algorithm(run, self.task)
        self.adapter: Config = checked("adapter", Config, run.adapter)
        components = self.pipeline.components()
        self.pipeline.trained = trained_names(self.task.trainable_models, self.adapter, components)
        self.pipeline.holdings = frozen.holdings(run.memory, components, self.task.trainable_models)
        self.networks = self.algorithm.networks(self.pipeline)
        if strangers := sorted({name.split(".")[0] for name in self.pipeline.trained} - set(self.networks)):
            what = f"{', '.join(strangers)} is trained, and memory is estimated where only what the loss calls is"
            raise ConfigError("task.trainable_models, adapter.lora_base_model", what, f"name of {', '.join(self.networks)}")
        if more := set(self.algorithm.reads(self.pipeline)) - {*self.pipeline.conditions, self.pipeline.target}:
            what = f"reads {', '.join(sorted(more))}, and memory is estimated where conditions and target suffice"
            raise ConfigError("task.algorithm", what, "estimate task=sft_split")

    def estimate(self, conditions: Mapping[str, Tensor], checkpointing: bool) -> Estimate:
        """conditions: of a batch, [B, ...] each, as the cache gives them. checkpointing: whether the networks' blocks are."""
        weights = sum(self.weights(name) for name in self.networks)
        self.make(checkpointing)
        trained = trained_parameters(self.pipeline.models)
        weights += sum(p.nbytes for name, p in trained.items() if name.split(".")[0] in self.adapter.lora_base_model)
        clean = torch.zeros(self.run.train.batch_size, *self.pipeline.latent_shape(self.shape))
        batch = {**conditions, self.pipeline.target: clean}
        kept, working = step(self.pipeline, self.algorithm, batch, self.computes)
        gradients = sum(p.grad.nbytes for p in trained.values() if p.grad is not None)
        if self.run.train.accumulate > 1:  # they are there already when the next pass begins
            working += gradients
        return Estimate(weights, gradients, self._optimizer(trained), kept, working)

    def weights(self, name: str) -> int:
        """Bytes of a component as it is held."""
        outline, holding = self.pipeline.components()[name].outline(), self.pipeline.holdings.get(name)
        return in_full(outline, self.dtype) if holding is None else holding.bytes(outline, self.dtype)

    @property
    def computes(self) -> torch.dtype | None:
        """What autocast computes in; None: it is off."""
        return None if self.run.precision is Precision.fp32 else DTYPES[self.run.precision]

    def make(self, checkpointing: bool) -> None:
        """The networks that the loss calls, without content, with their adapters."""
        pipeline, models = self.pipeline, {}
        for name in self.networks:
            models[name] = network = pipeline.components()[name].outline()
            for path, tensor in (*network.named_parameters(), *network.named_buffers()):
                tensor.data = tensor.data.to(held_in(network, path, tensor.dtype, self.dtype))
        adapters.attach(models, self.task.trainable_models, self.adapter, pipeline.lora_targets, 0, pipeline.adapter_names)
        for name, network in models.items():
            if (holding := pipeline.holdings.get(name)) is not None:
                computes_in(network, self.dtype)
                called_as(network, name, holding, self.dtype)
            if checkpointing:
                network.enable_gradient_checkpointing(checkpointed)
            faked(network)
        pipeline.models = models

    def _optimizer(self, trained: Mapping[str, nn.Parameter]) -> int:
        """Bytes of its state after a step, and of the averaged weights."""
        optimizer = make_optimizer(self.run.optimizer, trained)
        optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
        average = sum(p.numel() * torch.promote_types(p.dtype, torch.float32).itemsize for p in trained.values())
        return sum(tensor.nbytes for tensor in state) + (average if self.run.optimizer.ema else 0)


def step(
    pipeline: Pipeline, algorithm: Algorithm, batch: Mapping[str, Tensor], computes: torch.dtype | None
) -> tuple[int, int]:
    """Forward and backward pass of a loss: bytes that autograd keeps between them, and the most that existed at one time of
    all that both made, gradients included. computes: autocast's precision, if any. Networks with content do as well."""
    own = [tensor for network in pipeline.models.values() for tensor in (*network.parameters(), *network.buffers())]
    saved, on = Saved(own), computes is not None
    with Live([*own, *batch.values()]) as live, GpuAutocast() if on else nullcontext():
        with saved.counted(), torch.autocast("cpu", computes, enabled=on):
            loss = algorithm.loss(pipeline, batch, torch.Generator().manual_seed(0)).loss
        loss.backward()
    return saved.bytes, live.most
