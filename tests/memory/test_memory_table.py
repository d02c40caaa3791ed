"""Recipes compose, fit their cards, and stand in the README.   pytest tests/memory/test_memory_table.py"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from flowrun.compose import compose
from flowrun.memory.__main__ import main
from flowrun.memory.table import COLUMNS, Row, markdown, recipes, row

README = Path(__file__).parents[2] / "README.md"
START, END = "<!-- make memory -->\n", "\n<!-- end of make memory -->"


@cache
def estimated(name: str) -> Row:
    return row(name, compose([f"experiment={name}"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes())
def test_a_recipe_fits_its_card(name: str) -> None:
    assert estimated(name).fits(recipes()[name])


@pytest.mark.slow
def test_the_readmes_table_is_the_commands() -> None:
    shown = README.read_text(encoding="utf-8").split(START)[1].split(END)[0]
    assert shown == markdown(COLUMNS, [estimated(name).cells() for name in recipes()])


@pytest.mark.slow
def test_a_card_of_the_next_size_is_not_asked_for_in_vain() -> None:
    """Recipes of one model are for cards of different sizes, and say so in their commands."""
    for name, card in recipes().items():
        assert card in (12, 24, 48, 80)
        run = compose([f"experiment={name}"])
        assert run.model["name"] == name.removesuffix(f"_lora_{card}gb")
        assert run.adapter["kind"] == "lora" and run.train.gradient_checkpointing


@pytest.mark.slow
def test_a_run_of_ones_own_is_estimated_with_and_without_checkpointing(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["model=flux_tiny", "adapter=lora", "data=folder", "data.geometry.size=[64,64]", "train.gradient_checkpointing=true"]
    assert main(settings) == 0
    header, _, with_, without = capsys.readouterr().out.strip().splitlines()
    assert header == f"| {' | '.join(COLUMNS)} |"
    assert with_.startswith("| flux_tiny | fp32 | 4 x 64x64 | ") and without.startswith("| the same without gradient checkpointing | ")
    assert with_.endswith("| estimate |") and without.endswith("| estimate |")


def test_a_run_that_is_not_estimated_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=flux_tiny", "adapter=lora", "data=folder", "data.geometry.size=null"]) == 2
    assert capsys.readouterr().err == (
        "flowrun: data.geometry.size: is not given; memory is estimated for one size of rows: give it\n"
    )
