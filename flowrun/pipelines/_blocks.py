"""Which modular blocks a user means, and what can be told of them without running any.

A set of blocks can be trained without a file of its own when it has a step `denoise` with one loop, in which one network
predicts the velocity of a flow.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks, SequentialPipelineBlocks
from torch import nn

from flowrun.config import ConfigError
from flowrun.modular import component_names, leaves_of
from flowrun.modular.blocks import StandIn
from flowrun.spelling import suggest

KEY = "model.blocks"


def blocks_of(name: str | None, workflow: str | None) -> SequentialPipelineBlocks:
    """name: a class of diffusers, `LTXAutoBlocks`, or of one's own, pkg.module:Class. Raises ConfigError."""
    if name is None:
        raise ConfigError(KEY, "names no blocks", "give a class of diffusers, e.g. LTXAutoBlocks, or pkg.module:Class")
    blocks = _class(name)()
    if workflow is None:
        return blocks
    known = getattr(blocks, "_workflow_map", None) or {}
    if workflow not in known:
        raise ConfigError("model.workflow", f"is {workflow}", suggest(workflow, known) if known else f"{name} has one only: set it to null")
    return blocks.get_workflow(workflow)


def denoiser_of(workflow: SequentialPipelineBlocks) -> str:
    """The network that the loop calls. Raises ConfigError for blocks that cannot be trained as they are."""
    leaves = [(name.split(".")[0], block) for name, block in leaves_of(workflow)]
    loops = [block for step, block in leaves if step == "denoise" and isinstance(block, LoopSequentialPipelineBlocks)]
    if len(loops) != 1:
        what = f"has the steps {', '.join(dict.fromkeys(step for step, _ in leaves))}, and {len(loops)} loops in denoise"
        raise ConfigError(KEY, what, "there must be a step of that name with one; model.workflow chooses among several")
    names = component_names(workflow)
    called = [name for name in loops[0].component_names if name in names.networks]
    if len(called) != 1:
        raise ConfigError(KEY, f"calls {', '.join(called) or 'no network'} in its loop", "a family with two needs a file of its own")
    scheduler = names.parts.get("scheduler")
    if scheduler is None or not issubclass(scheduler, FlowMatchEulerDiscreteScheduler):
        what = f"has {'no scheduler' if scheduler is None else f'a {scheduler.__name__}'}"
        raise ConfigError(KEY, what, "only FlowMatchEulerDiscreteScheduler says that what is predicted is a flow's velocity")
    return called[0]


class Outline(StandIn):
    """Beside its settings it has whatever the network derives from them: sides of its patches, precision."""

    def __init__(self, name: str, config: Mapping[str, Any], network: nn.Module) -> None:
        super().__init__(name, config)
        self._network = network

    def __getattr__(self, attribute: str) -> Any:
        network = self.__dict__["_network"]
        return getattr(network, attribute) if hasattr(network, attribute) else super().__getattr__(attribute)


def _class(name: str) -> type:
    module, _, cls = name.rpartition(":")
    if not module:
        found = getattr(diffusers, name, None)
        if not (isinstance(found, type) and issubclass(found, SequentialPipelineBlocks)):
            known = [known for known in dir(diffusers) if known.endswith("Blocks")]
            raise ConfigError(KEY, f"is {name}, which is no blocks of diffusers", f"{suggest(name, known)}, or give pkg.module:Class")
        return found
    try:
        found = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise ConfigError(KEY, f"is {name}: {error}", "give pkg.module:Class of blocks that can be imported") from error
    if not (isinstance(found, type) and issubclass(found, SequentialPipelineBlocks)):
        raise ConfigError(KEY, f"is {name}, which is no SequentialPipelineBlocks", "give the class of a whole workflow")
    return found
