"""From the forms of the configuration to accelerators in order.   pytest tests/accelerators/test_choosing.py"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from flowrun.accelerators import Accelerator, Chosen, applied, choose, report, rollout_applied
from flowrun.accelerators._policies import Policy, settable
from flowrun.algorithms import Algorithm, Paradigm, Rereads
from flowrun.algorithms.sft import Sft
from flowrun.compose import CONF, compose
from flowrun.config import Acceleration, ConfigError
from flowrun.entries import normalised
from flowrun.registry import ACCELERATORS, WrongKind
from tests.accelerators import noted
from tests.accelerators.noted import Cautious, Circling, Noted, Sampled

UNSET = dict.fromkeys(("backend", "dynamic", "fullgraph", "mode", "options"))  # compile_kwargs as its option file lists them
COMPILE = {"torch_compile": {"mode": "full", "compile_kwargs": UNSET, "recompile_limit": 64}}
ENTRY = "{name:torch_compile,params:{mode:full}}"
BOTH = {"attention_backend": {"backend": "native"}, "torch_compile": COMPILE["torch_compile"] | {"mode": "auto"}}
ENTRIES = "[{name:attention_backend,params:{backend:native}},{name:torch_compile}]"
GROUP = ("acceleration/shared=[attention_backend,torch_compile]", "acceleration.shared.attention_backend.backend=native")


class Grpo(Algorithm):
    paradigm, rereads = Paradigm.coupled, Rereads.log_probs


class Nft(Algorithm):
    paradigm, rereads = Paradigm.decoupled, Rereads.final_latent


def shared(*texts: str) -> Any:
    return compose([*texts]).acceleration.shared


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (("acceleration/shared=[torch_compile]", "acceleration.shared.torch_compile.mode=full"), COMPILE),
        (("acceleration/shared=torch_compile", "acceleration.shared.torch_compile.mode=full"), COMPILE),
        ((f"acceleration.shared=[{ENTRY}]",), COMPILE),
        ((f"acceleration.shared={ENTRY}",), COMPILE),
        (("+acceleration.shared.torch_compile={mode:full}",), COMPILE),
        ((f"acceleration.shared={ENTRIES}",), BOTH),
        (GROUP, BOTH),
        (("acceleration/shared=[]",), None),
        (("acceleration.shared=[]",), None),
        (("acceleration.shared={}",), None),
        (("acceleration.shared=null",), None),
    ],
)
def test_all_forms_come_to_the_same(texts: tuple[str, ...], found: Any) -> None:
    run = shared(*texts)
    assert run == found
    assert run is None or list(run) == list(found)


def test_order_is_as_typed() -> None:
    assert list(shared("acceleration/shared=[torch_compile,attention_backend]", GROUP[1])) == ["torch_compile", "attention_backend"]
    assert list(shared(*GROUP)) == ["attention_backend", "torch_compile"]


def test_a_file_may_have_the_list_form(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\nacceleration:\n  shared:\n    - name: torch_compile\n      params: {mode: full}\n"
                    "  rollout:\n    name: diffusers_cache\n    params: {policy: first_block, threshold: 0.08}\n")  # fmt: skip
    monkeypatch.setenv("FLOWRUN_CONF", str(tmp_path))
    found = compose(["experiment=mine"]).acceleration
    assert found.shared == COMPILE
    assert found.rollout["diffusers_cache"]["threshold"] == 0.08 and found.rollout["diffusers_cache"]["policy_params"]["threshold"] is None
    (cache,) = choose(Acceleration(rollout=found.rollout), Nft).rollout
    assert cache.config.policy_params == {"threshold": 0.08}  # flat parameters go to the field for them


@pytest.mark.parametrize(
    ("slot", "texts", "field", "given"),
    [
        ("rollout", ("threshold=0.1",), "policy_params", {"threshold": 0.1}),
        ("rollout", ("cache_interval=3", "max_order=2"), "policy_params", {"cache_interval": 3, "max_order": 2}),
        ("rollout", (), "policy_params", {}),
        ("shared", ("mode=max-autotune", "dynamic=true"), "compile_kwargs", {"mode": "max-autotune", "dynamic": True}),
        ("shared", ("options={max_autotune:true}",), "compile_kwargs", {"options": {"max_autotune": True}}),
    ],
)
def test_what_goes_to_a_library_is_set_like_any_setting(slot: str, texts: tuple[str, ...], field: str, given: dict[str, Any]) -> None:
    """Without +; what is not given is not handed on."""
    name = {"rollout": "diffusers_cache", "shared": "torch_compile"}[slot]
    key, policy = f"acceleration.{slot}.{name}", "taylorseer" if "max_order=2" in texts else "first_block"
    policies = [f"{key}.policy={policy}"] if slot == "rollout" else []
    run = compose([f"acceleration/{slot}=[{name}]", *policies, *(f"{key}.{field}.{text}" for text in texts)])
    (one,) = getattr(choose(run.acceleration, Nft), slot)
    assert getattr(one.config, field) == given


def test_the_file_lists_what_the_policies_can_be_told() -> None:
    listed = normalised("rollout", [{"name": "diffusers_cache"}], CONF)["diffusers_cache"]["policy_params"]
    assert listed == dict.fromkeys({name for policy in Policy for name in settable(policy)})


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (("acceleration/rollout=[diffusers_cache]", "acceleration.rollout.diffusers_cache.policy_params.treshold=0.1"),
         "acceleration.rollout.diffusers_cache.policy_params.treshold: is no setting; did you mean "),
        (("acceleration/shared=[torch_compile]", "acceleration.shared.torch_compile.compile_kwargs.backen=eager"),
         "acceleration.shared.torch_compile.compile_kwargs.backen: is no setting; did you mean "),
        ((GROUP[0], f"acceleration.shared={ENTRY}"), "acceleration.shared: is set as a value while acceleration/shared chooses"),
        ((f"acceleration.shared=[{ENTRY},{ENTRY}]",), "acceleration.shared: torch_compile is chosen twice; "),
        (("acceleration/shared=[torch_compile]", "+acceleration/shared=[torch_compile]"),
         "acceleration/shared: torch_compile is chosen twice; name each option once"),
        (("acceleration.shared={name:torch_compile,mode:full}",), "acceleration.shared: has mode beside name and params; "),
        (("acceleration.shared={name:torch_compile,attention_backend:{backend:native}}",),
         "acceleration.shared: has attention_backend beside name and params; settings stand in params; or choose by "),
        (("acceleration.shared=[{params:{}}]",), "acceleration.shared: an entry has the name None; "),
        (("acceleration.shared=[{name:torch_compile,params:3}]",), "acceleration.shared.torch_compile: is 3; give a mapping"),
        (("acceleration.shared=torch_compile",), "acceleration.shared: is 'torch_compile', not a mapping of options; choose options with"),
        (("acceleration.shared=3",), "acceleration.shared: is 3, not a mapping of options; "),
        (("acceleration/shared=[attention_backend]",), "acceleration.shared.attention_backend.backend: is not given; "),
        (("acceleration/shared=[torch_compile]", "acceleration.shared.torch_compile.mod=full"),
         "acceleration.shared.torch_compile.mod: is no setting; did you mean acceleration.shared.torch_compile.mode?"),
        (("acceleration/shared=[compile]",), "acceleration/shared: there is no option 'compile'; did you mean torch_compile?"),
        (("acceleration/rollout=null",), "acceleration/rollout: null is no option; acceleration/rollout=[] chooses none"),
    ],
)  # fmt: skip
def test_mistakes_of_form_are_one_line(texts: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose([*texts])
    assert str(error.value).startswith(line)


def entry(name: str, **params: Any) -> dict[str, Any]:
    return {"name": name, "params": params}


@pytest.mark.parametrize(
    ("slot", "value", "line"),
    [
        ("shared", [entry("torch_compile"), entry("attention_backend", backend="native")],
         ": attention_backend must come before torch_compile; the right order is [attention_backend, torch_compile]"),
        ("shared", entry("diffusers_cache"),
         ".diffusers_cache: works in rollouts only; choose it with 'acceleration/rollout=[diffusers_cache]'"),
        ("rollout", entry("torch_compile"),
         ".torch_compile: changes training too, so as a change of rollouts it would do nothing; choose it with"),
        ("rollout", entry("diffusers_cache"),
         ".diffusers_cache: Sft has no rollouts, so it would do nothing; set 'acceleration/rollout=[]'"),
        ("shared", entry("torch_compil"), ".torch_compil: there is no accelerator 'torch_compil'; did you mean torch_compile?"),
        ("shared", entry("zzz"), ".zzz: there is no accelerator 'zzz'; known: attention_backend, diffusers_cache, torch_compile"),
        ("shared", entry("torch_compile", dynamik=True),
         ".torch_compile.compile_kwargs.dynamik: is no argument of torch.compile; did you mean dynamic?"),
        ("shared", entry("torch_compile", mode="fast"), ".torch_compile.mode: there is no 'fast'; "),
        ("shared", entry("torch_compile", dynamic=True, compile_kwargs={"dynamic": False}),
         ".torch_compile.dynamic: stands in compile_kwargs too; give it once"),
        ("shared", entry("torch_compile", recompile_limit=0), ".torch_compile.recompile_limit: is 0; must be at least 1"),
        ("shared", entry("attention_backend"), ".attention_backend.backend: is not given; "),
        ("shared", entry("attention_backend", backend="native", k=1), ".attention_backend.k: is no setting; "),
        ("shared", entry("tests.accelerators.noted.Noted", k="x"), ".Noted.k: 'x' has the wrong type; give a whole number"),
        ("shared", entry("tests.plugins:NoPicture"), ".tests.plugins:NoPicture: tests.plugins:NoPicture is no accelerator; derive it"),
    ],
)  # fmt: skip
def test_mistakes_of_content_are_one_line(slot: str, value: Any, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose(Acceleration(**{slot: normalised(slot, value, CONF)}), Sft)
    assert str(error.value).startswith(f"acceleration.{slot}{line}"), error.value


@pytest.mark.parametrize("name", ["tests.accelerators.noted:Noted", "tests.accelerators.noted.Noted"])
def test_a_class_of_ones_own_is_named_by_its_path(name: str) -> None:
    node = normalised("shared", [{"name": name, "params": {"k": 3}}], CONF)
    mine = normalised("shared", {"mine": {"target": name, "k": 3}}, CONF)
    for form in (node, mine):
        (found,) = choose(Acceleration(shared=form), None).shared
        assert (type(found), found.config.k) == (Noted, 3)


def test_another_kind_of_class_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="is no accelerator"):
        ACCELERATORS.find("tests.plugins:NoPicture", "k")
    assert issubclass(WrongKind, ConfigError)


def chosen(*classes: type[Accelerator], rollout: tuple[type[Accelerator], ...] = ()) -> Chosen:
    entries = [[{"name": f"{cls.__module__}:{cls.__name__}", "params": {"k": 1}} for cls in slot] for slot in (classes, rollout)]
    return choose(Acceleration(shared=normalised("shared", entries[0], CONF), rollout=normalised("rollout", entries[1], CONF)), Nft)


def test_conflicts_circles_and_twins_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Cautious: cannot be together with Noted; choose one of the two"):
        chosen(Noted, Cautious)
    with pytest.raises(ConfigError, match=r"each of Noted, Circling must come before another; leave one out"):
        chosen(Noted, Circling)
    twice = {name: {"target": "tests.accelerators.noted:Noted", "k": 1} for name in ("a", "b")}
    with pytest.raises(ConfigError, match=r"acceleration\.shared\.b: Noted is chosen twice"):
        choose(Acceleration(shared=twice), None)


def test_a_conflict_reaches_over_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampled, "conflicts", ("Noted",))
    with pytest.raises(ConfigError, match=r"acceleration\.rollout\.Sampled: cannot be together with Noted"):
        chosen(Noted, rollout=(Sampled,))


def test_any_order_of_three_is_put_right_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = type("First", (Noted,), {"before": ("Noted", "Last")}), type("Last", (Noted,), {"after": ("Noted",)})
    for cls in (first, last):
        cls.__module__ = Noted.__module__
        monkeypatch.setattr(noted, cls.__name__, cls, raising=False)
    for order in itertools.permutations((first, Noted, last)):
        if order == (first, Noted, last):
            assert [type(one) for one in chosen(*order).shared] == [first, Noted, last]
            continue
        with pytest.raises(ConfigError, match=r"the right order is \[First, Noted, Last\]"):
            chosen(*order)


def test_they_are_undone_in_reverse_also_after_an_error_and_a_setup_that_fails() -> None:
    first, second, broken = (Noted(Noted.Config(k=k)) for k in (1, 2, -1))
    Noted.notes.clear()
    with pytest.raises(RuntimeError, match="stop"), applied([first, second], None):
        assert report([first]) == {"Noted/k": 1}
        raise RuntimeError("stop")
    assert Noted.notes == ["+1", "+2", "-2", "-1"]
    Noted.notes.clear()
    with pytest.raises(ConfigError), applied([first, broken, second], None):
        raise AssertionError("entered")
    assert Noted.notes == ["+1", "+-1", "-1"]
    Noted.notes.clear()
    with pytest.raises(RuntimeError, match="stop"), rollout_applied([Sampled(Noted.Config(k=k)) for k in (1, 2)], None):
        raise RuntimeError("stop")
    assert Noted.notes == ["(1", "(2", "2)", "1)"]


def test_warnings_are_those_of_the_table() -> None:
    slots = Acceleration(shared=normalised("shared", [{"name": "torch_compile"}], CONF))
    (warning,) = choose(slots, Grpo).warnings
    assert warning.startswith("acceleration.shared.torch_compile: is lossy: the importance ratio")
    assert choose(slots, None).warnings == ()
    cache = Acceleration(rollout=normalised("rollout", [{"name": "diffusers_cache"}], CONF))
    with pytest.raises(ConfigError, match=r"acceleration\.rollout\.diffusers_cache: is lossy, and Grpo takes log-probabilities"):
        choose(cache, Grpo)
    assert [w.partition(":")[0] for w in choose(cache, Nft).warnings] == ["acceleration.rollout.diffusers_cache"]
