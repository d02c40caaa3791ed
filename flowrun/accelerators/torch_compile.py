"""torch.compile of the denoisers, in place: parameters, names and wrappers stay as they are.

Rollout and training must compute alike where a loss re-reads log-probabilities. torch compiles one graph with gradients and
another without, and their kernels differ in last bits (1e-2 of an output of scale 2 in bf16). So there the network runs with
gradients on within a rollout's no_grad, and in both phases on inputs of the same strides.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from flowrun.accelerators import Accelerator, Undo
from flowrun.accelerators._compiles import Compiles
from flowrun.accelerators._networks import attributes_restored, loaded, outlines
from flowrun.config import ConfigError
from flowrun.paradigm import Rereads
from flowrun.spelling import suggest
from flowrun.wording import first_line

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline

log = logging.getLogger(__name__)

CALLS = ("forward", "_compiled_call_impl")  # the two ways on which nn.Module reaches its computation
OWN = ("model", "disable", "recompile_limit")  # arguments of torch.compile that are not forwarded


class Mode(Enum):
    auto = "auto"
    regional = "regional"
    full = "full"


class TorchCompile(Accelerator):
    stage, safety, after, rest = "both", "lossy", ("attention_backend",), "compile_kwargs"

    @dataclass(kw_only=True, slots=True)
    class Config:
        mode: Mode
        compile_kwargs: dict[str, Any]
        recompile_limit: int

        def __post_init__(self) -> None:
            known = [name for name in inspect.signature(torch.compile).parameters if name not in OWN]
            for name in self.compile_kwargs:
                if name not in known:
                    key = f"{TorchCompile.key()}.compile_kwargs.{name}"
                    raise ConfigError(key, "is no argument of torch.compile", suggest(str(name), known))
            if self.recompile_limit < 1:
                raise ConfigError(f"{TorchCompile.key()}.recompile_limit", f"is {self.recompile_limit}", "must be at least 1")

    def __init__(self, config: Config, rereads: Rereads = Rereads.nothing) -> None:
        super().__init__(config, rereads)
        self._compiles = Compiles(config.recompile_limit)

    @property
    def keeps_grad(self) -> bool:
        """Whether networks run with gradients on inside no_grad. It holds what a backward pass would need meanwhile, so not
        where nothing is compared."""
        return self.rereads.stepwise

    def check(self, pipeline: Pipeline) -> list[str]:
        key, given = f"{self.key()}.compile_kwargs", self.config.compile_kwargs
        try:
            torch.compile(_nothing, **given)
        except Exception as error:  # a bad value raises errors of many types here, before anything is compiled
            raise ConfigError(key, f"torch.compile refuses {given} ({first_line(error)})", "change it") from error
        if given.get("backend", "inductor") == "inductor":
            self._check_compiler()
        further = "".join(f", {name}={value}" for name, value in given.items())
        grad = ", gradients on in rollouts" if self.keeps_grad else ""
        return [f"{name} {_told(network, self._resolved(name, network))}{further}{grad}" for name, network in outlines(pipeline).items()]

    def setup(self, pipeline: Pipeline) -> Undo:
        with ExitStack() as made:
            made.enter_context(self._compiles.counted())
            for name, network in loaded(pipeline).items():
                mode = self._resolved(name, network)
                log.info("torch_compile: %s %s", name, _told(network, mode))
                made.enter_context(self._compiled(network, mode))
            return made.pop_all().close

    def report(self) -> dict[str, float]:
        return self._compiles.report()

    def _resolved(self, name: str, network: nn.Module) -> Mode:
        repeated = _repeated(network)
        if self.config.mode is Mode.regional and not repeated:
            what = f"{name} ({type(network).__name__}) names no repeated blocks"
            raise ConfigError(f"{self.key()}.mode", f"is regional, but {what}", "use auto or full")
        return Mode.full if self.config.mode is Mode.full or not repeated else Mode.regional

    @contextmanager
    def _compiled(self, network: nn.Module, mode: Mode) -> Iterator[None]:
        parts = [network] if mode is Mode.full else [m for m in network.modules() if type(m).__name__ in _repeated(network)]
        with attributes_restored([network, *parts], CALLS):
            for part in parts:
                part.compile(**self.config.compile_kwargs)
            for call in CALLS:
                if getattr(network, call) is not None:
                    setattr(network, call, steady(getattr(network, call), self.keeps_grad, self._compiles))
            yield

    @staticmethod
    def _check_compiler() -> None:
        """Inductor writes C++ for the CPU. Raises ConfigError where nothing translates it."""
        if torch.accelerator.is_available():
            return
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            what = "torch's compiler needs a C++ compiler on this machine, and there is none"
            raise ConfigError(TorchCompile.key(), what, "install g++, or set 'acceleration/shared=[]'") from error


def steady(call: Callable[..., Any], keeps_grad: bool, compiles: Compiles) -> Callable[..., Any]:
    """`call` on contiguous floating inputs, with gradients on if `keeps_grad`; one that is so already is returned as it is.

    Its output is not detached: torch would then choose kernels without gradients. Who keeps a tensor detaches it."""
    if getattr(call, "is_steady", False):
        return call

    @functools.wraps(call)
    def steadily(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # called by the other path, which is outside the graph
            return call(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _contiguous, (args, kwargs))
        began = time.perf_counter()
        with torch.set_grad_enabled(keeps_grad or torch.is_grad_enabled()):
            out = call(*args, **kwargs)
        compiles.called(time.perf_counter() - began)
        return out

    steadily.is_steady = True
    return steadily


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.contiguous() if tensor.is_floating_point() else tensor


def _repeated(network: nn.Module) -> list[str]:
    """Classes of the network's repeated blocks that are in it."""
    names = getattr(network, "_repeated_blocks", None) or ()
    there = {type(module).__name__ for module in network.modules()}
    return [name for name in names if name in there]


def _told(network: nn.Module, mode: Mode) -> str:
    return f"full ({type(network).__name__})" if mode is Mode.full else f"regional ({', '.join(_repeated(network))})"


def _nothing() -> None:
    """Stands in for a network whose compilation is only looked at."""
