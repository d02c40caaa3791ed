"""What is refused before weights are loaded is what does not work, family by family.

pytest tests/accelerators/test_families_accelerated.py"""

from __future__ import annotations

import pytest

from flowrun.accelerators._policies import Policy, settings
from flowrun.accelerators.attention_backend import AttentionBackend
from flowrun.accelerators.diffusers_cache import DiffusersCache, _hooks_restored
from flowrun.accelerators.torch_compile import Mode, TorchCompile
from flowrun.compose import CONF
from flowrun.config import ConfigError
from flowrun.families import CACHES, Family
from tests.accelerators.tiny import made_of

OPTIONS = sorted(file.stem for file in (CONF / "model").glob("*_tiny.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_a_family_is_refused_what_it_cannot_do_and_nothing_else(option: str) -> None:
    family = Family(option.removesuffix("_tiny"), option, ())
    network, unloaded = family.denoiser, family._unloaded
    family._computed()  # some networks keep what they made at their first call
    before, several = made_of(network), len(unloaded.denoisers) > 1
    wrong = []
    for given in CACHES.values():
        name, params = given["policy"], given["policy_params"]
        if several and name in ("faster", "magcache"):
            continue  # they may skip there, and wrongly: they count steps that the network has not taken
        one = DiffusersCache(DiffusersCache.Config(policy=Policy(name), policy_params=params))
        try:
            one.check(unloaded)
        except ConfigError as error:
            wrong += [f"{name} is refused: {error}"] if skips_in_diffusers(family, one) else []
        else:
            wrong += [] if skips(family, one) else [f"{name} is let in"]
        assert made_of(network) == before
    assert not wrong
    regional = TorchCompile(TorchCompile.Config(mode=Mode.auto, compile_kwargs={"backend": "eager"}, recompile_limit=64))
    assert ("regional" in regional.check(unloaded)[0]) == bool(getattr(network, "_repeated_blocks", None))
    backend = AttentionBackend(AttentionBackend.Config(backend="native"))
    assert accepted(backend, unloaded) == family.switches_attention()


def accepted(backend: AttentionBackend, unloaded: object) -> bool:
    try:
        return bool(backend.check(unloaded))
    except ConfigError:
        return False


def skips(family: Family, one: DiffusersCache) -> bool:
    """Whether something is left out in a walk with the cache."""
    try:
        with one.rollout_context(family.pipeline):
            family._computed()
        return one.report()["hits"] > 0
    except Exception:  # whatever a policy that does not fit raises in a network
        return False


def skips_in_diffusers(family: Family, one: DiffusersCache) -> bool:
    """Whether a walk computes fewer layers when the cache is enabled without a question."""
    network, whole = family.denoiser, family._computed()
    with _hooks_restored(network):
        try:
            network.enable_cache(settings(one.config.policy, one.config.policy_params, network))
            return family._computed() < whole
        except Exception:  # as above
            return False
