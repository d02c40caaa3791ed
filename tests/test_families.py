"""The table of model families in the README is what the probe finds.   pytest tests/test_families.py"""

from pathlib import Path

import pytest

from flowrun.families import families, table
from tests.pipelines.oracles import ORACLES

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- make families -->\n", "\n<!-- end of make families -->"


@pytest.mark.slow
def test_what_a_family_cannot_do_is_found_by_trying() -> None:
    """SD3's blocks are of several kinds, and its layers compute attention in their own way: diffusers sets what they never ask."""
    sd3 = next(family for family in families() if family.name == "sd3")
    assert not sd3.compiles_by_blocks() and not sd3.skips("first block")
    assert sd3.attention() == "none: diffusers' setter does nothing"
    assert sd3.learns_from_rewards("nft")


@pytest.mark.slow
def test_every_family_that_is_compared_with_diffusers_is_probed() -> None:
    assert set(ORACLES) <= {family.name for family in families()}


@pytest.mark.slow
def test_the_readmes_table_is_the_probes() -> None:
    shown = README.read_text(encoding="utf-8").split(START)[1].split(END)[0]
    assert shown == table([family.row() for family in families()])
