"""diffusers' feature caches in rollouts: a solver step takes over what hardly changed since the one before it.

A policy either decides for whole blocks, by guidance branch, or keeps one state for each attention layer. Our solver asks each
branch alone for the former and all in one call for the latter, since a second call would get the first one's values, and
guidance would be gone without a word. It also begins each walk anew (`flowrun.feature_cache`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffusers import CacheMixin
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import nn

from flowrun.accelerators import Accelerator
from flowrun.accelerators._networks import attributes_restored, loaded, outlines
from flowrun.accelerators._policies import Policy, check_params, settings
from flowrun.config import ConfigError
from flowrun.feature_cache import Tally
from flowrun.modular.blocks import quiet
from flowrun.paradigm import Rereads
from flowrun.wording import first_line

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline

log = logging.getLogger(__name__)

COUNTING = (Policy.magcache, Policy.faster)  # what they do in a step depends on how many came before


class DiffusersCache(Accelerator):
    stage, safety, rest = "rollout", "lossy", "policy_params"

    @dataclass(kw_only=True, slots=True)
    class Config:
        policy: Policy
        policy_params: dict[str, Any]

        def __post_init__(self) -> None:
            check_params(self.policy, self.policy_params, f"{DiffusersCache.key()}.policy_params")

    def __init__(self, config: Config, rereads: Rereads = Rereads.nothing) -> None:
        super().__init__(config, rereads)
        self._tally = Tally()

    def check(self, pipeline: Pipeline) -> list[str]:
        if self.config.policy in COUNTING and len(pipeline.denoisers) > 1:
            what = f"counts the steps of a walk from its first, and {' and '.join(pipeline.denoisers)} take a part of them each"
            raise ConfigError(f"{self.key()}.policy", f"{self.config.policy.value} {what}", "choose another policy")
        params = "".join(f", {name}={value}" for name, value in self.config.policy_params.items())
        lines = []
        for name, network in outlines(pipeline).items():
            with self._enabled(name, network, Tally()) as hooks:
                lines.append(f"{name} {self.config.policy.value}{params}, on {len(hooks)} of its parts")
        return lines

    @contextmanager
    def rollout_context(self, pipeline: Pipeline) -> Iterator[None]:
        self._tally = Tally()
        with ExitStack() as stack:
            for name, network in loaded(pipeline).items():
                stack.enter_context(self._enabled(name, network, self._tally))
            yield
        self._tell()

    def report(self) -> dict[str, float]:
        """Calls of the networks; hits: those in which something was left out; parts left out in all; seconds saved."""
        tally = self._tally
        return {"calls": tally.calls, "hits": tally.hits, "skipped": tally.skipped, "seconds_saved": tally.saved_seconds}

    def _tell(self) -> None:
        tally = self._tally
        if tally.hits:
            log.info("diffusers_cache: %d of %d calls left out %d parts and saved about %.3g s",
                     tally.hits, tally.calls, tally.skipped, tally.saved_seconds)  # fmt: skip
        else:
            log.warning("diffusers_cache: nothing was left out in %d calls: %s reuses nothing at these settings and this number of "
                        "steps; loosen policy_params or leave it out", tally.calls, self.config.policy.value)  # fmt: skip

    @contextmanager
    def _enabled(self, name: str, network: nn.Module, tally: Tally) -> Iterator[list[ModelHook]]:
        """The policy's hooks on the network, counted; afterwards, also after an error, none is left. Raises ConfigError."""
        policy, told = self.config.policy, f"{name} ({type(network).__name__})"
        if not isinstance(network, CacheMixin):
            raise ConfigError(self.key(), f"{told} has no feature caches", "leave it out for this model")
        if network.is_cache_enabled:
            raise ConfigError(self.key(), f"{told} has a cache already", "enable one cache")
        if policy is Policy.first_block:
            self._require_alike(told, network)
        config = settings(policy, self.config.policy_params, network)
        config.tally = tally
        with _hooks_restored(network) as new_hooks:
            try:
                with quiet("diffusers"):
                    network.enable_cache(config)
            except (ValueError, TypeError, AttributeError, IndexError) as error:
                raise self._unfit(told, first_line(error)) from error
            hooks = new_hooks()
            if not hooks:
                raise self._unfit(told, "it finds none of its parts there")
            with _counted(hooks, tally):
                yield hooks

    def _require_alike(self, told: str, network: nn.Module) -> None:
        """Between the first block and the last the policy carries one difference: of one stream, or of two."""
        blocks = [block for part in network.children() if isinstance(part, nn.ModuleList) for block in part]
        known = [TransformerBlockRegistry._registry.get(type(block)) for block in blocks]
        streams = {one.return_encoder_hidden_states_index is None for one in known if one is not None}
        if len(streams) > 1:
            raise self._unfit(told, "its first blocks return text and picture, its last ones the picture alone")

    def _unfit(self, told: str, why: str) -> ConfigError:
        policy = self.config.policy.value
        return ConfigError(f"{self.key()}.policy", f"{policy} does not fit {told}: {why}", "choose another policy, or leave it out")


@contextmanager
def _hooks_restored(network: nn.Module) -> Iterator[Callable[[], list[ModelHook]]]:
    """Gives a function that lists the hooks of diffusers on the network's modules that are new since. Afterwards all those are
    gone, and with them what diffusers would leave: registries and replaced `forward`s."""
    modules = list(network.modules())
    before = {id(module): set(module._diffusers_hook.hooks) for module in modules if hasattr(module, "_diffusers_hook")}

    def new() -> list[tuple[HookRegistry, str]]:
        registries = [module._diffusers_hook for module in modules if hasattr(module, "_diffusers_hook")]
        return [(r, name) for r in registries for name in r._hook_order if name not in before.get(id(r._module_ref), ())]

    with attributes_restored(modules, ["forward", "_diffusers_hook", "_cache_config"]):
        try:
            yield lambda: [registry.hooks[name] for registry, name in new() if registry._module_ref is not network]
        finally:
            for registry, name in reversed(new()):
                registry.remove_hook(name, recurse=False)
            HookRegistry.check_if_exists_or_initialize(network).invalidate_child_registries_cache()


@contextmanager
def _counted(hooks: list[ModelHook], tally: Tally) -> Iterator[None]:
    """Each hook tells when its part is reached and when it is computed. Its own calls stand again before it is removed."""
    references = [hook.fn_ref for hook in hooks]
    with attributes_restored(references, ["pre_forward", "original_forward"]):
        for reference in references:
            reference.pre_forward = _after(tally.reach, reference.pre_forward)
            reference.original_forward = _after(tally.compute, reference.original_forward)
        yield


def _after(first: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return call(*args, **kwargs)

    return both
