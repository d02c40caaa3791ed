"""The table of model families in the README is what the probe finds.   pytest tests/test_families.py"""

from pathlib import Path

import pytest

from flowrun.families import families, table
from tests.pipelines.oracles import ORACLES

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- make families -->\n", "\n<!-- end of make families -->"


@pytest.mark.slow
def test_every_family_that_is_compared_with_diffusers_is_probed() -> None:
    assert set(ORACLES) <= {family.name for family in families()}


@pytest.mark.slow
def test_the_readmes_table_is_the_probes() -> None:
    shown = README.read_text(encoding="utf-8").split(START)[1].split(END)[0]
    assert shown == table([family.row() for family in families()])
