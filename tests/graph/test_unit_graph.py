"""What follows from declarations: dependences, conflicts, chains, what a trained model reaches, what must run."""

from __future__ import annotations

import pytest
from declared import unit

from flowrun.graph import EVERYTHING, Conflict, Unit, UnitGraph

P = ("shared", "p")


def cfg(name: str, reads: str, writes: str) -> Unit:
    """Reads and writes a name of each side."""
    sides = {"input_params_posi": {"x": reads}, "input_params_nega": {"x": reads}}
    return Unit(name=name, **sides, output_params=(writes,), separate_cfg=True)


def barrier(name: str = "all") -> Unit:
    return Unit(name=name, take_over=True)


def test_a_certain_write_hides_the_earlier_ones():
    graph = UnitGraph([unit("a", [], ["p"]), unit("b", [], ["p"]), unit("c", ["p"])])
    assert graph.edges == ((1, 2, P),)


def test_every_may_write_back_to_the_certain_one_is_a_source():
    maybe = {"may_write": True}
    graph = UnitGraph(
        [
            unit("a", [], ["p"]),
            unit("b", [], ["p"]),
            unit("c", [], ["p"], **maybe),
            unit("d", [], ["p"], **maybe),
            unit("e", ["p"]),
        ]
    )
    assert graph.edges == ((1, 4, P), (2, 4, P), (3, 4, P))


def test_a_unit_that_reads_what_it_writes_depends_on_the_earlier_writer_only():
    assert UnitGraph([unit("a", [], ["p"]), unit("b", ["p"], ["p"])]).edges == ((0, 1, P),)


def test_one_name_in_two_scopes_is_two_parameters():
    graph = UnitGraph(
        [unit("shared", [], ["e"]), cfg("sides", "q", "e"), cfg("reads sides", "e", "z"), unit("reads shared", ["e"])]
    )
    assert graph.edges == ((1, 2, ("nega", "e")), (1, 2, ("posi", "e")), (0, 3, ("shared", "e")))


def test_a_barrier_depends_on_all_that_was_written_and_everything_later_on_it():
    graph = UnitGraph(
        [
            unit("a", [], ["p"]),
            unit("b", [], ["q"]),
            barrier(),
            unit("c", ["r"]),
            unit("d", [], ["p"]),
            unit("e", ["p"]),
        ]
    )
    assert set(graph.edges) == {(0, 2, P), (1, 2, ("shared", "q")), (2, 3, ("shared", "r")), (4, 5, P)}


def test_a_barrier_depends_on_a_barrier():
    assert UnitGraph([barrier("one"), barrier("two")]).edges == ((0, 1, EVERYTHING),)


def test_conflicts_are_named_by_kind_and_parameter():
    graph = UnitGraph([unit("a", ["p"], ["q"]), unit("b", ["q"], ["p"]), unit("c", [], ["p", "q"])])
    q = ("shared", "q")
    assert set(graph.conflicts) == {
        Conflict("RAW", q, 0, 1), Conflict("WAR", P, 0, 1),
        Conflict("WAR", P, 0, 2), Conflict("WAW", q, 0, 2),
        Conflict("WAR", q, 1, 2), Conflict("WAW", P, 1, 2),
    }  # fmt: skip


def test_conflicts_of_a_barrier_are_about_everything():
    graph = UnitGraph(
        [unit("r", ["p"]), unit("w", [], ["q"]), unit("none"), barrier(), unit("later", [], ["r"]), unit("none")]
    )
    assert set(graph.conflicts) == {
        Conflict("WAR", EVERYTHING, 0, 3), Conflict("RAW", EVERYTHING, 1, 3), Conflict("WAW", EVERYTHING, 3, 4),
    }  # fmt: skip


def test_a_conflict_reads_as_kind_parameter_and_places():
    assert str(Conflict("WAR", ("posi", "e"), 2, 5)) == "WAR posi.e 2->5"


def test_chains_list_all_writers_in_order():
    graph = UnitGraph([unit("a", [], ["p"]), unit("b", ["p"], ["q"]), unit("c", [], ["p"], may_write=True)])
    assert graph.chains == {P: (0, 2), ("shared", "q"): (1,)}


@pytest.mark.parametrize(
    ("model", "trained", "related"),
    [
        ("dit", "dit", True),
        ("dit", "dit.blocks.3", True),
        ("dit.text_proj", "dit", True),
        ("dit.blocks.3", "dit.blocks.3.attn", True),
        ("dit.blocks.3", "dit.blocks.30", False),
        ("dit.blocks.30", "dit.blocks.3", False),
        ("dit.text_proj", "dit.blocks", False),
        ("dit2", "dit", False),
        ("dit", "dit2", False),
        ("vae", "dit", False),
        ("vae", "", True),
        ("", "vae", True),
    ],
)
def test_a_model_is_trained_by_attribute_path_both_ways(model, trained, related):
    graph = UnitGraph([unit("uses", models=[model]), unit("uses none")])
    assert graph.related([trained]) == ({0} if related else set())


def test_nothing_trained_relates_nothing():
    assert UnitGraph([unit("uses", models=["dit"])]).related([]) == set()


def test_trained_names_come_in_a_collection():
    with pytest.raises(TypeError, match=r"trained is the text 'dit'; give a collection of names: \['dit'\]"):
        UnitGraph([unit("uses", models=["dit"])]).related("dit")


def test_gradients_flow_through_what_depends_on_a_trained_model():
    graph = UnitGraph([
        unit("frozen", ["image"], ["latents"], models=["vae"]),
        unit("trained", ["latents"], ["e"], models=["text"]),
        unit("noise", [], ["noise"], random="per_epoch"),
        unit("depends", ["e"], ["f"]),
        unit("hides", [], ["e"]),
        unit("no longer depends", ["e"], ["g"]),
        unit("maybe", ["noise"], ["f"], may_write=True),
        unit("may depend", ["f"], ["h"]),
    ])  # fmt: skip
    assert graph.gradient_units(["text.layers.1"]) == {1, 3, 7}


def test_what_runs_for_a_value_is_its_writers_and_theirs():
    graph = UnitGraph([
        unit("a", [], ["p"]),
        unit("hidden", [], ["p"]),
        unit("b", ["p"], ["q"]),
        unit("unread", ["q"], ["z"]),
        unit("maybe", ["r"], ["q"], may_write=True),
        unit("c", ["q"], ["out"]),
    ])  # fmt: skip
    assert graph.needed_for([("shared", "out")]) == {1, 2, 4, 5}
    assert graph.needed_for([("shared", "q")]) == {1, 2, 4}
    assert graph.needed_for([("shared", "out"), ("shared", "z")]) == {1, 2, 3, 4, 5}
    assert graph.needed_for([]) == set()
    assert graph.needed_for([], roots=[3]) == {1, 2, 3}
    assert graph.needed_for(None) == {1, 2, 3, 4, 5}


def test_a_barrier_runs_for_anything_and_needs_all_before_it():
    graph = UnitGraph([unit("a", [], ["p"]), unit("b", [], ["q"]), barrier(), unit("c", [], ["out"])])
    assert graph.needed_for([("shared", "out")]) == {3}
    assert graph.needed_for([("shared", "r")]) == {0, 1, 2}


@pytest.mark.parametrize("random", ["frozen", "per_epoch"])
def test_two_drawing_units_of_one_name_are_refused(random):
    drawing = unit("noise", [], ["n"], random=random)
    with pytest.raises(ValueError, match="unit noise: 2 units of this name would draw the same random numbers; rename"):
        UnitGraph([drawing, unit("other"), drawing])
    assert UnitGraph([drawing, unit("noise"), unit("noise")]).units[0] is drawing
