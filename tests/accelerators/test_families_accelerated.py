"""What is refused before weights are loaded is what does not work, family by family.

pytest tests/accelerators/test_families_accelerated.py"""

from __future__ import annotations

import pytest

from flowrun.accelerators._policies import Policy
from flowrun.accelerators.attention_backend import AttentionBackend
from flowrun.accelerators.diffusers_cache import DiffusersCache
from flowrun.accelerators.torch_compile import Mode, TorchCompile
from flowrun.compose import CONF
from flowrun.config import ConfigError
from flowrun.families import RANGE, STEPS, Family, yes
from tests.accelerators.tiny import made_of

LOOSE = {  # settings under which a policy leaves something out wherever it can
    "first_block": {"threshold": 100.0},
    "magcache": {"threshold": 10.0, "mag_ratios": [1.0] * STEPS},
    "taylorseer": {"cache_interval": 3, "disable_cache_before_step": 1},
    "pyramid": {name: list(value) if isinstance(value, tuple) else value for name, value in RANGE.items()},
    "faster": {name: list(value) if isinstance(value, tuple) else value for name, value in RANGE.items()},
}
OPTIONS = sorted(file.stem for file in (CONF / "model").glob("*_tiny.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_a_family_is_refused_what_it_cannot_do_and_nothing_else(option: str) -> None:
    family = Family(option.removesuffix("_tiny"), option, ())
    network, unloaded = family.denoiser, family._unloaded
    family._computed()  # some networks keep what they made at their first call
    before, several = made_of(network), len(unloaded.denoisers) > 1
    wrong = []
    for name, params in LOOSE.items():
        if several and name in ("pyramid", "faster", "magcache"):
            continue  # refused for their counting, or with too few steps of each network here
        one = DiffusersCache(DiffusersCache.Config(policy=Policy(name), policy_params=params))
        try:
            one.check(unloaded)
        except ConfigError as error:
            wrong += [f"{name} is refused: {error}"] if skips(family, one) else []
        else:
            wrong += [] if skips(family, one) else [f"{name} is let in"]
        assert made_of(network) == before
    assert not wrong
    regional = TorchCompile(TorchCompile.Config(mode=Mode.auto, compile_kwargs={"backend": "eager"}, recompile_limit=64))
    assert ("regional" in regional.check(unloaded)[0]) == (family.row()[6] == yes(True))
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
