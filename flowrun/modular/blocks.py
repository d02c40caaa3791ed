"""Running blocks: on a state, without `no_grad`, on one row; and what stands in for a network that is not loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from diffusers import ModularPipeline
from diffusers.configuration_utils import FrozenDict
from diffusers.modular_pipelines.modular_pipeline import BlockState, ModularPipelineBlocks, PipelineState
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class StandIn:
    """An absent network: its configuration, each setting also an attribute as networks have it, and nothing that computes."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name, self.config = name, FrozenDict(config)

    def __getattr__(self, attribute: str) -> Any:
        if attribute in self.config:
            return self.config[attribute]
        raise AttributeError(f"a block asks for {attribute!r} of {self.name}, which it does not declare as a component")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise TypeError(f"a block calls {self.name}, which it does not declare as a component")


class Through:
    """A network in a wrapper that averages its gradients: calls go through the wrapper, all else is asked of the network."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.wrapper = wrapper

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.wrapper.module, attribute)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.wrapper(*arguments, **named)


class BlockCall:
    """A unit's process: the blocks, in order, on a batch of one row, with the models that the unit declares.

    make: gives the other components, once. fixed: inputs that are the same for every row. outputs: declared ones."""

    def __init__(self, blocks: Sequence[ModularPipelineBlocks], make: Callable[[], ModularPipeline],
                 fixed: Mapping[str, Any], outputs: Sequence[str]) -> None:  # fmt: skip
        self.blocks, self._make, self.fixed, self.outputs = blocks, make, fixed, outputs

    @cached_property
    def components(self) -> ModularPipeline:
        return self._make()

    def __call__(self, ctx: Any, **inputs: Any) -> dict[str, Any]:
        """Returns the declared outputs, and those inputs that the block replaced, without the batch's dimension."""
        given = {name: value[None] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        state = self._run(ctx, given)
        replaced = [name for name, value in given.items() if state.get(name) is not value]
        return {name: self._row(name, state.get(name)) for name in (*self.outputs, *replaced)}

    def rows(self, ctx: Any, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The block on a batch of these rows, whose pictures are of one size."""
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        given = {name: torch.stack(values) if isinstance(values[0], Tensor) else values for name, values in columns.items()}
        state = self._run(ctx, given)
        replaced = [name for name, value in given.items() if state.get(name) is not value]
        found = {name: self._split(name, state.get(name), len(rows)) for name in (*self.outputs, *replaced)}
        return [{name: values[row] for name, values in found.items()} for row in range(len(rows))]

    def _run(self, ctx: Any, given: Mapping[str, Any]) -> PipelineState:
        """What the blocks leave, from inputs with the batch's dimension."""
        for name in ctx.models:
            setattr(self.components, name, ctx.models[name])
        state = state_of({**self.fixed, **given}, {})
        for block in self.blocks:
            call(block, self.components, state)
        return state

    def _split(self, name: str, value: Any, rows: int) -> Sequence[Any]:
        if not isinstance(value, Tensor):
            return value if isinstance(value, list) else [value] * rows
        if len(value) != rows:
            raise ValueError(f"{type(self.blocks[-1]).__name__} returns {name} of shape {list(value.shape)} for {rows} rows")
        return value.unbind()

    def _row(self, name: str, value: Any) -> Any:
        if isinstance(value, list) and len(value) == 1:
            return value[0]
        if not isinstance(value, Tensor):
            return value
        if value.shape[0] != 1:
            raise ValueError(f"{type(self.blocks[-1]).__name__} returns {name} of shape {list(value.shape)} for one row")
        return value[0]


def placed(components: ModularPipeline) -> ModularPipeline:
    """Its networks are where their weights are. Blocks ask where at each call, and diffusers then looks for offloading
    hooks in every module of every network, which takes longer than many a row's tokens; here nothing is offloaded."""
    cls = type(components)
    components.__class__ = type(cls.__name__, (cls,), {"_execution_device": property(lambda self: self.device)})
    return components


def without_negatives(block: ModularPipelineBlocks) -> None:
    """Some encoding blocks fail when there is no guider to make a negative prompt's outputs for: let these be None."""
    write = block.set_block_state

    def lenient(state: PipelineState, found: BlockState) -> None:
        for name in block.intermediate_output_names:
            if name.startswith("negative_") and not hasattr(found, name):
                setattr(found, name, None)
        write(state, found)

    block.set_block_state = lenient


def call(block: ModularPipelineBlocks, components: ModularPipeline, state: PipelineState) -> None:
    unwrapped(block)(block, components, state)


def unwrapped(block: ModularPipelineBlocks) -> Callable[..., Any]:
    """The block's function without `torch.no_grad` around it."""
    function = type(block).__call__
    return getattr(function, "__wrapped__", function)


def state_of(values: Mapping[str, Any], kinds: Mapping[str, str]) -> PipelineState:
    """kinds: name -> the group of values under which a block may ask for all of them at once."""
    state = PipelineState()
    for name, value in values.items():
        state.set(name, value, kinds.get(name))
    return state


@contextmanager
def quiet(library: str) -> Iterator[None]:
    """Within the block this logger says errors only."""
    talking = logging.getLogger(library)
    level = talking.level
    talking.setLevel(logging.ERROR)
    try:
        yield
    finally:
        talking.setLevel(level)
