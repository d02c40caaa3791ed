"""Any diffusers modular pipeline as units, live preparation and velocity.

A workflow is a sequence of blocks that declare what they read, write and call. Here it is read as

    units        steps before `denoise` that need neither the denoiser nor the scheduler: per row, cacheable. A step is a
                 block, or several under one name (vae_encoder.preprocess, vae_encoder.encode): its last one gives the results
    preparation  blocks of `denoise` before its loop: per batch, live; those run that give the loop what it lacks
    velocity     the blocks of the loop up to the one that calls the denoiser
    schedule     the block that sets the scheduler's noise levels
    unpacking    blocks of `denoise` after its loop
    decoding     all steps after `denoise`

Blocks carry `no_grad`; they are called without it, so that gradients reach trained encoders. Components, and defaults of
inputs, are those of the whole workflow: blocks contradict one another there. A network that is not loaded is replaced by
its configuration, since blocks derive sizes from one and take a constant, without a word, when there is none.

Legend: B rows.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from diffusers import ModularPipeline
from diffusers.guiders import BaseGuidance
from diffusers.modular_pipelines.modular_pipeline import (
    BlockState,
    LoopSequentialPipelineBlocks,
    ModularPipelineBlocks,
    PipelineState,
    SequentialPipelineBlocks,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flowrun.graph import Unit
from flowrun.modular.blocks import (
    BlockCall,
    StandIn,
    Through,
    call,
    placed,
    quiet,
    state_of,
    unwrapped,
    without_negatives,
)


@dataclass(frozen=True, kw_only=True)
class Names:
    """Components of a workflow, in order. networks: with weights; parts: without, but saved: tokenizers, schedulers."""

    networks: dict[str, type]
    parts: dict[str, type]


def component_names(blocks: SequentialPipelineBlocks) -> Names:
    saved = {c.name: c.type_hint for c in blocks.expected_components if c.default_creation_method == "from_pretrained"}
    networks = {name: cls for name, cls in saved.items() if issubclass(cls, nn.Module)}
    return Names(networks=networks, parts={name: cls for name, cls in saved.items() if name not in networks})


def leaves_of(blocks: SequentialPipelineBlocks, prefix: str = "") -> Iterator[tuple[str, ModularPipelineBlocks]]:
    """Blocks that hold no others, in order, under names with dots. A loop is one of them."""
    for name, block in blocks.sub_blocks.items():
        if isinstance(block, SequentialPipelineBlocks):
            yield from leaves_of(block, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", block


class Modular:
    """blocks: the whole workflow. configs: of every network; None: the pipeline does without it.

    part: gives a tokenizer or scheduler by name; asked once for each, when it is first used. denoiser: the network that
    the loop calls. settings: values of the blocks' inputs that hold for every row. rewrites: step -> inputs that it
    replaces without saying so; a step that is not listed may replace any of its inputs. stand_in: makes what stands for a
    network that is not loaded, from its name and configuration."""

    def __init__(
        self,
        blocks: SequentialPipelineBlocks,
        configs: Mapping[str, Mapping[str, Any] | None],
        part: Callable[[str], Any],
        denoiser: str,
        settings: Mapping[str, Any],
        rewrites: Mapping[str, Collection[str]],
        stand_in: Callable[[str, Mapping[str, Any]], Any] = StandIn,
    ) -> None:
        self.blocks, self.configs, self.denoiser, self.rewrites = blocks, configs, denoiser, rewrites
        self._stand_in = stand_in
        self.names = component_names(blocks)
        self._part, self._parts = part, {}
        self._prepared_by: dict[frozenset[str], list[ModularPipelineBlocks]] = {}  # what was given -> blocks to run
        defaults = {i.name: i.default for i in blocks.inputs if i.default is not None}
        self.settings = {**defaults, **settings}
        outputs = [output for leaf in self._leaves.values() for output in leaf.intermediate_outputs]
        self._kinds = {output.name: output.kwargs_type for output in outputs if output.kwargs_type is not None}

    def part(self, name: str) -> Any:
        if name not in self._parts:
            self._parts[name] = self._part(name)
        return self._parts[name]

    def units(self, data: Collection[str]) -> tuple[Unit, ...]:
        """data: names that the rows provide."""
        known, units = set(data), []
        for name, blocks in self._encoding.items():
            units.append(self._unit(name, blocks, known))
            known.update(units[-1].output_params)
        return tuple(units)

    def begin(self, given: Mapping[str, Any]) -> BlockState:
        """What the loop reads, from `given` (name -> [B, ...] or a plain value) and the preparing blocks."""
        return self._loop.get_block_state(self._before(given))

    def enter(self, given: Mapping[str, Any]) -> BlockState:
        """The same, with what the loop itself adds before its first step. given: without times; the scheduler's are taken."""
        state, loop = self._before(given), copy(self._loop)
        loop.loop_step = _stop
        loop.set_progress_bar_config(disable=True)
        try:
            unwrapped(loop)(loop, self._outlines, state)
        except _Entered as entered:
            return entered.state
        raise ValueError(f"{type(loop).__name__} takes no step")

    def in_precision(self, dtype: torch.dtype) -> None:
        """Tell the blocks before the loop the precision of the denoiser's weights."""
        getattr(self._outlines, self.denoiser).dtype = dtype

    def blank(self, given: Mapping[str, Any]) -> Tensor:
        """Noise as the blocks prepare it and the network takes it, of which only the shape counts."""
        given = {**given, "generator": torch.Generator()}
        return self._prepared(self._preparing({"latents"}, frozenset(given)), given).get("latents")

    def unpacked(self, latents: Tensor, given: Mapping[str, Any]) -> Tensor:
        """Latents as the network takes them -> as the decoding steps do."""
        state = state_of({**self.settings, **given, "latents": latents}, self._kinds)
        for block in self._behind_loop("denoise"):
            call(block, self._outlines, state)
        return state.get("latents")

    def decoded(self, latents: Tensor, given: Mapping[str, Any], networks: Mapping[str, Any]) -> PipelineState:
        """What the decoding steps make of latents as the network takes them."""
        blocks = self._behind_loop("")
        parts = [name for block in blocks for name in block.component_names if name in self.names.parts]
        components, state = self._pipeline(parts), state_of({**self.settings, **given, "latents": latents}, self._kinds)
        for name, network in networks.items():
            setattr(components, name, network)
        for block in blocks:
            call(block, components, state)
        return state

    def told(self) -> set[str]:
        """Names that the loop and the blocks before it may read."""
        return {i.name for block in (*self._before_loop, self._loop) for i in block.inputs}

    def velocity(self, prepared: BlockState, x: Tensor, time: Tensor, network: nn.Module) -> Tensor:
        """The loop's prediction at latents x, as the network takes them, and time [B], in the scheduler's unit.

        No classifier-free guidance."""
        state = BlockState(**prepared.as_dict())
        state.latents = x
        asked = Through(network) if isinstance(network, DistributedDataParallel) else network
        setattr(self._denoising, self.denoiser, asked)
        for block in self._calling:
            unwrapped(block)(block, self._denoising, state, i=0, t=time)
        return state.noise_pred

    def schedule(self, steps: int, given: Mapping[str, Any]) -> Tensor:
        """The scheduler's own noise levels, 0 appended: [steps + 1], fp32.

        given: height and width in pixels, and latents as the network takes them, of which only the shape is looked at."""
        (block,) = [block for name, block in self._leaves.items() if name.endswith("set_timesteps")]
        call(block, self._scheduling, state_of({**self.settings, "num_inference_steps": steps, "batch_size": 1, **given}, {}))
        return self.part("scheduler").sigmas.float().cpu()

    @cached_property
    def _leaves(self) -> dict[str, ModularPipelineBlocks]:
        return dict(leaves_of(self.blocks))

    @cached_property
    def _encoding(self) -> dict[str, list[ModularPipelineBlocks]]:
        """Step -> its blocks, in order."""
        steps: dict[str, list[ModularPipelineBlocks]] = {}
        for name, block in list(self._leaves.items())[: self._first_of_denoise]:
            if not {self.denoiser, "scheduler"} & set(block.component_names):
                steps.setdefault(name.split(".")[0], []).append(block)
        return steps

    @property
    def _first_of_denoise(self) -> int:
        return next(i for i, name in enumerate(self._leaves) if name.split(".")[0] == "denoise")

    @cached_property
    def _loop(self) -> LoopSequentialPipelineBlocks:
        (loop,) = [block for block in self._leaves.values() if isinstance(block, LoopSequentialPipelineBlocks)]
        return loop

    @cached_property
    def _calling(self) -> list[ModularPipelineBlocks]:
        """The loop's blocks up to the one that calls the denoiser."""
        blocks = list(self._loop.sub_blocks.values())
        last = next(i for i, block in enumerate(blocks) if self.denoiser in block.component_names)
        return blocks[: last + 1]

    @cached_property
    def _outlines(self) -> ModularPipeline:
        return self._pipeline({name for block in self._before_loop for name in block.component_names if name in self.names.parts})

    @cached_property
    def _scheduling(self) -> ModularPipeline:
        return self._pipeline(("scheduler",))

    @cached_property
    def _before_loop(self) -> list[ModularPipelineBlocks]:
        """Between the units and the loop."""
        leaves = list(self._leaves.values())
        return leaves[self._first_of_denoise : leaves.index(self._loop)]

    def _behind_loop(self, step: str) -> list[ModularPipelineBlocks]:
        """Those of the step, or all."""
        leaves = list(self._leaves.items())[list(self._leaves.values()).index(self._loop) + 1 :]
        return [block for name, block in leaves if step in ("", name.split(".")[0])]

    def _before(self, given: Mapping[str, Any]) -> PipelineState:
        names = frozenset(given)
        if names not in self._prepared_by:
            self._prepared_by[names] = self._preparing(set(self._loop.required_inputs), names)
        return self._prepared(self._prepared_by[names], given)

    def _prepared(self, blocks: Sequence[ModularPipelineBlocks], given: Mapping[str, Any]) -> PipelineState:
        state = state_of({**self.settings, **given}, self._kinds)
        for block in blocks:
            call(block, self._outlines, state)
        return state

    def _preparing(self, wanted: set[str], given: frozenset[str]) -> list[ModularPipelineBlocks]:
        """Blocks between the units and the loop that give what is wanted and nobody gave."""
        lacking, found = wanted - given, []
        for block in reversed(self._before_loop):
            if lacking & set(block.intermediate_output_names):
                found.append(block)
                lacking = (lacking - set(block.intermediate_output_names)) | set(block.required_inputs) - given
        return found[::-1]

    @cached_property
    def _denoising(self) -> ModularPipeline:
        return self._pipeline(())

    def _unit(self, name: str, blocks: Sequence[ModularPipelineBlocks], known: Collection[str]) -> Unit:
        made = {output for block in blocks[:-1] for output in block.intermediate_output_names}  # stay inside the step
        inputs = [n for n in _each(i.name for block in blocks for i in block.inputs) if n not in made]
        reads = tuple(n for n in inputs if n in known)
        outputs = blocks[-1].intermediate_output_names
        fixed = {n: self.settings[n] for n in inputs if n in self.settings and n not in known}
        components = _each(n for block in blocks for n in block.component_names)
        absent = sorted(n for n in components if n in self.configs and self.configs[n] is None)
        kinds = [f"{type(block).__module__}.{type(block).__qualname__}" for block in blocks]
        own = [inspect.getsource(type(block)) for block in blocks if not type(block).__module__.startswith("diffusers.")]
        for block in blocks:
            # its one message, the cut of a long text, is given before the run by whoever knows the rows
            logging.getLogger(type(block).__module__).setLevel(logging.ERROR)
            without_negatives(block)
        call = BlockCall(blocks, partial(self._pipeline, [n for n in components if n in self.names.parts]), fixed, outputs)
        return Unit(
            name=name,
            input_params=reads,
            output_params=_each((*outputs, *self.rewrites.get(name, reads))),
            onload_model_names=tuple(n for n in components if self.configs.get(n) is not None),
            may_write=name not in self.rewrites,
            process=call,
            process_rows=call.rows,
            settings={"block": ", ".join(kinds), "absent": absent, **fixed, **({"code": own} if own else {})},
        )

    def _pipeline(self, parts: Collection[str]) -> ModularPipeline:
        """The whole workflow's components: these parts, and configurations in place of all networks."""
        # making a guider logs that guiders may change in later releases; ours only passes predictions through
        with quiet("diffusers.guiders.guider_utils"):
            components = placed(self.blocks.init_pipeline())
        for name, config in self.configs.items():
            setattr(components, name, None if config is None else self._stand_in(name, config))
        for name in parts:
            setattr(components, name, self.part(name))
        for name in self.blocks.component_names:
            if isinstance(guider := getattr(components, name, None), BaseGuidance):
                guider.disable()  # whoever samples guides, and encodes the negative prompt as a prompt
        return components


class _Entered(Exception):
    def __init__(self, state: BlockState) -> None:
        self.state = state


def _stop(components: Any, state: BlockState, i: int, t: Tensor) -> NoReturn:
    raise _Entered(state)


def _each(names: Iterable[str]) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(names))
