"""pytest tests/cache/test_keyplan.py: what must change a key, and what must not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.cache.code import code_identity
from flowrun.cache.key import digest
from flowrun.cache.keyplan import ABSENT, KeyPlan
from flowrun.graph import Unit
from flowrun.splitters import split

IDENTITIES = {"text_encoder": b"T" * 16, "vae": b"V" * 16, "transformer": b"D" * 16}
INPUTS = {("shared", "prompt"): b"p" * 16, ("shared", "image"): b"i" * 16, ("shared", "negative"): b"n" * 16}


def process(ctx: Any, **inputs: Any) -> dict[str, Any]:
    return {}


def unit(name: str, reads: str = "", writes: str = "", models: str = "", **more: Any) -> Unit:
    more.setdefault("process", process)
    return Unit(name=name, input_params=tuple(reads.split()), output_params=tuple(writes.split()),
                onload_model_names=tuple(models.split()), **more)  # fmt: skip


def text(**more: Any) -> Unit:
    return unit("text", "prompt", "embeds pooled", "text_encoder", **more)


def latents(**more: Any) -> Unit:
    return unit("latents", "image", "moments", "vae", **more)


def keys(units: Sequence[Unit], inputs: dict = INPUTS, identities: dict = IDENTITIES, context: bytes = b"c" * 16,
         seed: int = 0, row: str = "row", live_out: set[str] | None = None) -> dict[str, str]:  # fmt: skip
    """unit.scope.name -> key."""
    plan = KeyPlan(split("replay", units, {"transformer"}, live_out), identities, context, seed)
    made = plan.keys(inputs, row)
    return {f"{units[i].name}.{'.'.join(param)}": key.hex() for (i, param), key in made.items()}


LIVE = unit("live", "moments", "z", random="per_epoch")


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name.split(".")[0] for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, set()),
        ({"inputs": INPUTS | {("shared", "prompt"): b"q" * 16}}, {"text"}),
        ({"inputs": INPUTS | {("shared", "image"): b"j" * 16}}, {"latents"}),
        ({"inputs": INPUTS | {("shared", "negative"): b"x" * 16, ("shared", "size"): b"y" * 16}}, set()),
        ({"identities": IDENTITIES | {"text_encoder": b"t" * 16}}, {"text"}),
        ({"identities": IDENTITIES | {"transformer": b"d" * 16, "other": b"o" * 16}}, set()),
        ({"context": b"d" * 16}, {"text", "latents"}),
        ({"seed": 1}, set()),
        ({"row": "another"}, set()),
        ({"units": [text(version=2), latents()]}, {"text"}),
        ({"units": [text(), latents(settings={"size": 64})]}, {"latents"}),
        ({"units": [text(), latents(process=lambda ctx, image: None)]}, {"latents"}),
        ({"units": [unit("before", "prompt", "unused"), text(), latents(), LIVE]}, set()),
    ],
    ids=["nothing", "caption", "picture", "other inputs", "text encoder", "other models", "context", "seed", "row id",
         "version", "settings", "source", "other units"],
)  # fmt: skip
def test_a_change_reaches_the_keys_that_it_must_and_no_others(change: dict[str, Any], expected: set[str]) -> None:
    live_out = {"embeds", "pooled", "moments"}
    before = keys([text(), latents()], live_out=live_out)
    assert len(set(before.values())) == 3
    assert changed(before, keys(**({"units": [text(), latents()], "live_out": live_out} | change))) == expected


def test_the_order_of_independent_units_and_their_names_do_not_count() -> None:
    before = keys([text(), latents()])
    assert keys([latents(), text()]) == before
    renamed = keys([unit("other", "prompt", "embeds pooled", "text_encoder"), latents()])
    assert renamed["other.shared.embeds"] == before["text.shared.embeds"]


def test_outputs_of_one_unit_differ_and_equal_work_has_equal_keys() -> None:
    one = keys([unit("a", "prompt", "x y")])
    assert one["a.shared.x"] != one["a.shared.y"]
    assert keys([unit("a", "prompt", "x")])["a.shared.x"] == one["a.shared.x"]


def test_a_change_reaches_what_depends_on_it_and_nothing_else() -> None:
    chain = [unit("a", "prompt", "x"), unit("b", "x image", "y"), unit("c", "image", "z"), unit("d", "y", "w")]
    later = [unit("a", "prompt", "x", version=2), *chain[1:]]
    assert changed(keys(chain), keys(later)) == {"a", "b", "d"}
    assert changed(keys(chain), keys(chain, INPUTS | {("shared", "image"): b"j" * 16})) == {"b", "c", "d"}


def test_the_argument_names_under_which_inputs_arrive_count() -> None:
    def sides(posi: dict[str, str]) -> str:
        return keys([unit("a", "", "y", input_params_posi=posi)], {("posi", "u"): b"u" * 16, ("posi", "v"): b"v" * 16})[
            "a.shared.y"
        ]

    assert sides({"first": "u", "second": "v"}) != sides({"first": "v", "second": "u"})
    assert sides({"first": "u"}) != sides({"other": "u"})


def test_an_input_has_the_keys_of_all_its_possible_writers() -> None:
    """Computed here from the definition: the latest certain writer, or the data, and every may-writer since."""

    def h(prefix: bytes, *parts: bytes) -> bytes:
        return blake2b(prefix + b"".join(parts), digest_size=16).digest()

    def call(u: Unit, names: list[str], *inputs: bytes) -> bytes:
        models = {name: IDENTITIES[name] for name in u.onload_model_names}
        own = digest("unit", code_identity(u), models, b"c" * 16, u.take_over)
        return h(digest(own, [["shared", name] for name in names]), *inputs)

    def out(key: bytes, name: str) -> bytes:
        return h(digest("output", "shared", name), key)

    certain, maybe, reader = (
        unit("c", "image", "p"),
        unit("m", "prompt", "p", may_write=True, version=2),
        unit("r", "p", "y"),
    )
    data, image, prompt = b"P" * 16, INPUTS["shared", "image"], INPUTS["shared", "prompt"]
    inputs = INPUTS | {("shared", "p"): data}
    c, m = out(call(certain, ["image"], image), "p"), out(call(maybe, ["prompt"], prompt), "p")
    both = h(digest("writers"), data, m), h(digest("writers"), c, m)
    expected = [([], data), ([certain], c), ([maybe], both[0]), ([certain, maybe], both[1]), ([maybe, certain], c)]
    for units, key in expected:
        assert keys([*units, reader], inputs)["r.shared.y"] == out(call(reader, ["p"], key), "y").hex()


def test_what_nothing_provides_is_not_what_something_provides() -> None:
    reader = [unit("r", "p", "y")]
    assert keys(reader, {})["r.shared.y"] != keys(reader, {("shared", "p"): b"P" * 16})["r.shared.y"]
    assert keys(reader, {}) == keys(reader, {("shared", "p"): ABSENT})


def test_frozen_draws_belong_to_run_seed_row_and_name_and_so_does_what_depends_on_them() -> None:
    units = [unit("noise", "image", "n", random="frozen"), unit("mix", "n", "m"), latents()]
    base = keys(units)
    assert changed(base, keys(units)) == set()
    assert changed(base, keys(units, seed=1)) == changed(base, keys(units, row="b")) == {"noise", "mix"}
    renamed = keys([unit("other", "image", "n", random="frozen"), *units[1:]])
    assert (
        renamed["other.shared.n"] != base["noise.shared.n"]
        and renamed["latents.shared.moments"] == base["latents.shared.moments"]
    )


def test_seed_and_row_cannot_be_taken_for_one_another() -> None:
    units = [unit("noise", "", "n", random="frozen")]
    assert keys(units, seed=1, row="2")["noise.shared.n"] != keys(units, seed=12, row="")["noise.shared.n"]


def both_sides(**more: Any) -> Unit:
    return unit("text", "size", "embeds", "text_encoder", separate_cfg=True, input_params_posi={"prompt": "prompt"},
                input_params_nega={"prompt": "negative"}, **more)  # fmt: skip


def test_each_side_depends_on_its_own_inputs() -> None:
    inputs = {("posi", "prompt"): b"p" * 16, ("nega", "negative"): b"n" * 16, ("shared", "size"): b"s" * 16}
    base = keys([both_sides()], inputs)
    differing = {
        part: {name for name in base if keys([both_sides()], inputs | {part: b"x" * 16})[name] != base[name]}
        for part in inputs
    }
    assert differing == {
        ("posi", "prompt"): {"text.posi.embeds"},
        ("nega", "negative"): {"text.nega.embeds"},
        ("shared", "size"): set(base),
    }


def test_sides_that_draw_from_one_generator_depend_on_both() -> None:
    inputs = {("posi", "prompt"): b"p" * 16, ("nega", "negative"): b"n" * 16}
    frozen = [both_sides(random="frozen")]
    after = keys(frozen, inputs | {("posi", "prompt"): b"x" * 16})
    assert all(after[name] != key for name, key in keys(frozen, inputs).items())


def test_a_take_over_unit_depends_on_its_names_in_all_scopes() -> None:
    units = [unit("t", "p", "q", take_over=True)]
    base = keys(units)
    assert set(base) == {"t.shared.q", "t.posi.q", "t.nega.q"}
    for scope in ("shared", "posi", "nega"):
        assert all(keys(units, {(scope, "p"): b"x" * 16})[name] != base[name] for name in base)


def test_a_barrier_depends_on_everything_before_it_and_later_readers_on_it() -> None:
    def units(version: int = 1, barrier: int = 1) -> list[Unit]:
        return [
            unit("a", "prompt", "x", version=version),
            unit("all", take_over=True, version=barrier),
            unit("r", "x", "y"),
            unit("z", "", "w"),
            unit("all2", take_over=True),
        ]

    base = keys(units())
    assert changed(base, keys(units(version=2))) == {"a", "all", "r", "all2"}
    assert changed(base, keys(units(barrier=2))) == {"all", "r", "all2"}
    assert changed(base, keys(units(), INPUTS | {("shared", "negative"): b"x" * 16})) == {"all", "r", "all2"}


def test_a_barrier_depends_on_an_earlier_one_whose_writes_nobody_declared() -> None:
    def units(version: int) -> list[Unit]:
        return [unit("all", take_over=True, version=version), unit("all2", take_over=True)]

    assert changed(keys(units(1)), keys(units(2))) == {"all", "all2"}


def test_a_part_of_a_model_has_its_components_identity_and_an_empty_path_every_models() -> None:
    part = [unit("a", "prompt", "x", "vae.encoder")]
    assert changed(keys(part), keys(part, identities=IDENTITIES | {"vae": b"w" * 16})) == {"a"}
    everything = [Unit(name="a", output_params=("x",), onload_model_names=("",), process=process)]
    plans = [KeyPlan(Kept(everything), IDENTITIES | more, b"", 0).keys({}, "row") for more in ({}, {"vae": b"w" * 16})]
    assert plans[0] != plans[1]


class Kept:
    """A split by which everything is cached and kept."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units, self.needed = tuple(units), tuple(range(len(units)))
        self.kept = {i: tuple(sorted(u.writes)) for i, u in enumerate(units)}


def test_only_needed_models_need_an_identity() -> None:
    units = [text(), latents()]
    plan = KeyPlan(split("replay", units, {"vae"}, {"embeds"}), {"text_encoder": b"T" * 16}, b"", 0)
    assert [units[i].name for i, _ in plan.keys(INPUTS, "row")] == ["text"]
    with pytest.raises(KeyError, match="text_encoder"):
        KeyPlan(split("replay", units, {"vae"}, {"embeds"}), {}, b"", 0)


@pytest.mark.parametrize("inputs", [{"prompt": b"p" * 16}, {("shared", "prompt"): b"short"}])
def test_inputs_in_another_form_are_refused(inputs: dict) -> None:
    with pytest.raises(ValueError, match=r"inputs map \(scope, name\) to 16 bytes"):
        keys([text()], inputs)


def test_many_rows_have_the_keys_that_each_has_alone() -> None:
    """Also when another input replaces theirs, of whose keys those that depend on no change are not made anew."""
    units = [text(), latents(), unit("draw", "embeds", "noise", random="frozen"), unit("nothing", "", "one"),
             unit("all", take_over=True), unit("last", "moments absent", "end")]  # fmt: skip
    plan = KeyPlan(Kept(units), IDENTITIES, b"", 0)
    prompts, images, rows = [b"p" * 16, b"q" * 16, b"p" * 16], [b"i" * 16, b"j" * 16, b"k" * 16], ["a", "b", "c"]
    given = {("shared", "prompt"): prompts, ("shared", "image"): images}
    before: list = []
    for inputs in (given, given | {("shared", "prompt"): [b"e" * 16] * 3}, given | {("shared", "more"): images}):
        before = plan.columns(inputs, rows, before)
        for n, row in enumerate(rows):
            alone = plan.keys({param: column[n] for param, column in inputs.items()}, row)
            assert {output: before[place][n] for output, place in plan.outputs.items()} == alone


names = st.sampled_from("abc")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sets(names), st.sets(names, min_size=1), st.booleans()), min_size=1, max_size=6), st.data()
)
def test_a_unit_key_changes_exactly_when_something_changes_among_its_ancestors(
    drawn: list, data: st.DataObject
) -> None:
    """Truth: reachability over possible writers, found by walking back from each reader."""
    units = [unit(f"u{i}", " ".join(sorted(r)), " ".join(sorted(w)), may_write=m) for i, (r, w, m) in enumerate(drawn)]
    touched = data.draw(st.integers(0, len(units) - 1))
    edited = [replace(u, version=2) if i == touched else u for i, u in enumerate(units)]

    def ancestors(i: int) -> set[int]:
        found = {i}
        for name in drawn[i][0]:
            for j in reversed(range(i)):
                if name in drawn[j][1]:
                    found |= ancestors(j)
                    if not drawn[j][2]:
                        break
        return found

    before, after = (KeyPlan(Kept(us), {}, b"", 0).keys({}, "row") for us in (units, edited))
    for output, key in before.items():
        assert (after[output] != key) == (touched in ancestors(output[0]))
