"""What a split says: partition, storage, models, reasons - and what it refuses."""

from __future__ import annotations

import pytest

from flowrun.config import ConfigError
from flowrun.graph import EVERYTHING, Unit
from flowrun.splitters import Split, split

SPLITTERS = ("none", "closure", "ordered", "replay")


def unit(name: str, reads: str = "", writes: str = "", models: str = "", **more) -> Unit:
    """Names separated by spaces."""
    listed = {"input_params": reads, "output_params": writes, "onload_model_names": models}
    return Unit(name=name, **{key: tuple(value.split()) for key, value in listed.items()}, **more)


TEXT = unit("text", "prompt", "prompt_embeds pooled", "text_encoder")
MOMENTS = unit("moments", "image", "mean std", "vae")
LATENTS = unit("latents", "mean std", "target_latents", random="per_epoch")
UNUSED = unit("unused", "prompt", "length")


def pipeline(trained: tuple[str, ...] = ("dit",), live_out=("prompt_embeds", "target_latents")) -> Split:
    return split("replay", [TEXT, MOMENTS, LATENTS, UNUSED], trained, live_out=live_out)


def test_the_usual_case_trains_a_model_that_no_unit_uses():
    parts = pipeline()
    assert (parts.live, parts.cached, parts.needed) == ((2,), (0, 1, 3), (0, 1))
    shared = [("shared", name) for name in ("mean", "prompt_embeds", "std")]
    assert parts.kept == {0: (shared[1],), 1: (shared[0], shared[2])}
    assert parts.frontier == tuple(shared)
    assert (parts.models_cached, parts.models_live) == (("text_encoder", "vae"), ())
    assert parts.why == {
        0: "frozen: needed by the loss",
        1: "frozen: needed by latents",
        2: "draws anew each epoch",
        3: "its outputs are never read",
    }


def test_without_a_list_of_what_is_read_everything_is_live_at_the_end():
    parts = pipeline(live_out=None)
    assert parts.kept[0] == (("shared", "pooled"), ("shared", "prompt_embeds"))
    assert parts.kept[3] == (("shared", "length"),)
    assert parts.needed == (0, 1, 3)


def test_nothing_read_at_the_end_leaves_what_live_units_read():
    assert pipeline(live_out=()).kept == {1: (("shared", "mean"), ("shared", "std"))}


def test_a_trained_encoder_is_live_with_all_that_depends_on_it():
    parts = pipeline(trained=("vae",))
    assert parts.live == (1, 2)
    assert (parts.models_cached, parts.models_live) == (("text_encoder",), ("vae",))
    assert parts.why[1] == "uses trained model vae"


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_a_model_that_no_unit_uses_and_no_fresh_draw_leave_nothing_live(splitter):
    parts = split(splitter, [TEXT, MOMENTS], {"dit"})
    assert parts.live == ((0, 1) if splitter == "none" else ())


@pytest.mark.parametrize(
    ("used", "trained", "related"),
    [
        ("dit", "dit", True),
        ("dit", "dit.blocks.3", True),
        ("dit.text_proj", "dit", True),
        ("dit.text_proj", "dit.blocks", False),
        ("dit", "dit2", False),
        ("dit2", "dit", False),
        ("vae", "", True),
        ("", "vae", True),
        ("a.b", "a.b.c", True),
    ],
)
def test_trained_names_match_by_attribute_path(used, trained, related):
    graph = [Unit(name="u", output_params=("x",), onload_model_names=(used,))]
    assert (split("replay", graph, [trained]).live == (0,)) == related


def test_an_empty_trained_name_leaves_units_without_models_cached():
    assert split("replay", [TEXT, UNUSED, MOMENTS], [""]).live == (0, 2)


def test_a_part_of_a_model_counts_as_its_component_when_weights_are_loaded():
    graph = [unit("a", "x", "y", "dit.text_proj"), unit("b", "x", "z", "vae.encoder")]
    parts = split("replay", graph, {"dit.blocks"}, live_out=["y", "z"])
    assert parts.models_cached == ("dit", "vae")


def test_a_model_of_a_unit_that_is_not_needed_is_not_loaded():
    graph = [unit("a", "x", "y", "big"), unit("b", "x", "z", "small")]
    assert split("replay", graph, {"dit"}, live_out=["z"]).models_cached == ("small",)


def test_a_name_that_is_surely_overwritten_is_not_stored_unless_read_before():
    first, second, third = unit("first", "x", "p"), unit("second", "x", "p"), unit("use", "p", "q", "m")
    assert split("replay", [first, second], {"m"}, live_out=["p"]).kept == {1: (("shared", "p"),)}
    parts = split("replay", [first, third, second], {"m"}, live_out=["p", "q"])
    assert parts.kept == {0: (("shared", "p"),), 2: (("shared", "p"),)}
    may = unit("second", "x", "p", may_write=True)
    assert set(split("replay", [first, may], {"m"}, live_out=["p"]).kept) == {0, 1}


def test_a_cached_unit_is_run_for_another_one_but_not_stored():
    graph = [unit("ids", "prompt", "ids"), unit("embed", "ids", "e", "te"), unit("drop", "ids", "zzz")]
    parts = split("replay", graph, {"dit"}, live_out=["e"])
    assert (parts.needed, set(parts.kept)) == ((0, 1), {1})
    assert parts.why == {0: "frozen: needed by embed", 1: "frozen: needed by the loss", 2: "its outputs are never read"}


def test_names_at_the_end_are_pairs_and_a_bare_one_is_shared():
    cfg = unit("cfg", "", "e", separate_cfg=True, input_params_posi={"t": "t"}, input_params_nega={"t": "t"})
    assert split("replay", [cfg], (), live_out=["e"]).kept == {}
    assert split("replay", [cfg], (), live_out=[("nega", "e")]).frontier == (("nega", "e"),)


def test_a_live_barrier_keeps_everything_and_a_cached_one_is_stored_whole():
    barrier = unit("barrier", take_over=True)
    parts = split("replay", [TEXT, barrier, unit("last", "", "mean")], {"dit"}, live_out=["mean"])
    assert (parts.live, parts.needed, parts.kept) == ((), (2,), {2: (("shared", "mean"),)})
    parts = split("replay", [TEXT, barrier, MOMENTS], {"dit"}, live_out=["mean"])
    assert parts.needed == (0, 1, 2)  # the barrier may have written the image, from anything
    parts = split("replay", [TEXT, barrier], {"dit"}, live_out=["pooled"])
    assert (parts.needed, parts.kept) == ((0, 1), {0: (("shared", "pooled"),), 1: (EVERYTHING,)})
    live = unit("barrier", models="m", take_over=True)
    parts = split("replay", [TEXT, live, MOMENTS], {"m"}, live_out=["mean"])
    assert parts.live == (1, 2)
    assert parts.kept == {0: (("shared", "pooled"), ("shared", "prompt_embeds"))}
    assert parts.why[2] == "comes after barrier, which may write anything"


def test_a_barrier_before_a_barrier_is_needed():
    first, second = unit("first", take_over=True), unit("second", take_over=True)
    assert split("replay", [first, second], {"m"}, live_out=["x"]).needed == (0, 1)


def test_a_barrier_is_live_when_it_may_read_what_a_live_unit_left():
    source, barrier, cover = unit("source", "x", "y", "m"), unit("barrier", take_over=True), unit("cover", "x", "y")
    assert split("replay", [source, barrier], {"m"}).live == (0, 1)
    assert split("replay", [source, cover, barrier], {"m"}).live == (0,)
    maybe = unit("cover", "x", "y", may_write=True)
    assert split("replay", [source, maybe, barrier], {"m"}).live == (0, 2)
    trained = unit("trained", models="m", take_over=True)
    for splitter in ("replay", "ordered"):
        assert split(splitter, [trained, barrier, unit("other", "a", "b")], {"m"}).live == (0, 1, 2)


def test_ordered_keeps_a_barrier_behind_a_live_unit_that_only_reads():
    graph = [unit("reader", "x", "", "m"), unit("barrier", take_over=True)]
    assert split("ordered", graph, {"m"}).live == (0, 1)
    assert split("replay", graph, {"m"}).live == (0,)


def test_ordered_and_closure_know_barriers():
    reader = unit("reader", "x", "y", "m")
    barrier = unit("barrier", take_over=True)
    assert split("ordered", [reader, barrier], {"m"}).live == (0, 1)
    assert split("ordered", [unit("nothing", models="m"), barrier], {"m"}).live == (0,)
    hazards = split("closure", [reader, barrier], {"m"}, on_hazard="report").hazards
    assert [str(hazard) for hazard in hazards] == ["RAW *.* 0->1"]
    hazards = split("closure", [unit("reader", "x", "", "m"), barrier], {"m"}, on_hazard="report").hazards
    assert [str(hazard) for hazard in hazards] == ["WAR *.* 0->1"]


def test_reasons_name_the_source():
    graph = [unit("te", "p", "e", "te"), unit("mix", "e q", "f"), unit("w", "r", "q"), unit("w2", "r", "f")]
    assert split("ordered", graph, {"te"}).why == {
        0: "uses trained model te",
        1: "reads e of te",
        2: "writes q after mix has read it",
        3: "writes f after mix has written it",
    }
    assert split("none", graph, {"te"}).why[2] == "nothing is cached by this splitter"


def test_only_the_trained_ones_of_a_units_models_are_named_in_its_reason():
    assert split("replay", [unit("u", "x", "y", "vae te")], {"te"}).why == {0: "uses trained model te"}


@pytest.mark.parametrize(
    ("second", "kind", "param", "story"),
    [
        (unit("later", "y", "z"), "RAW", "shared.y", "reads shared.y, which the live unit first writes"),
        (unit("later", "z", "x"), "WAR", "shared.x", "writes shared.x after the live unit first has read it"),
        (unit("later", "z", "y"), "WAW", "shared.y", "writes shared.y after the live unit first has written it"),
    ],
)
def test_closure_refuses_naming_both_units_the_parameter_the_kind_and_the_right_splitter(second, kind, param, story):
    between = unit("hide", "a", "y", separate_cfg=True)
    graph = [unit("first", "x", "y", "m"), between, second]
    with pytest.raises(ConfigError) as error:
        split("closure", graph, {"m"})
    assert str(error.value) == (
        f"task.splitter: closure would cache the unit later, which {story} ({kind}), and the split run would differ; "
        "use task.splitter=replay"
    )
    assert f"{kind} {param} 0->2" in map(str, split("closure", graph, {"m"}, on_hazard="report").hazards)


@pytest.mark.parametrize("splitter", ["none", "ordered", "replay"])
def test_sound_splitters_report_no_hazards(splitter):
    graph = [unit("first", "x", "y", "m"), unit("second", "z", "x")]
    assert split(splitter, graph, {"m"}, on_hazard="report").hazards == ()


def test_an_unknown_splitter_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"task\.splitter: there is no splitter 'replya'.*replay"):
        split("replya", [TEXT], ())


def test_a_splitter_of_ones_own_is_taken_by_path():
    assert split("mutants:TooMuch", [MOMENTS, TEXT, UNUSED], {"text_encoder"}).live == (1, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"trained": "dit"}, TypeError, "trained is the text 'dit'"),
        ({"trained": (), "live_out": "latents"}, TypeError, "live_out is the text 'latents'"),
        ({"trained": (), "live_out": [("positive", "x")]}, ValueError, "scopes: shared, posi, nega"),
        ({"trained": (), "on_hazard": "ignore"}, ValueError, "refuse or report"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        split("replay", [TEXT], **arguments)


def test_an_empty_list_of_units_splits_into_nothing():
    parts = split("replay", [], {"dit"})
    assert (parts.live, parts.cached, parts.kept, parts.why) == ((), (), {}, {})
