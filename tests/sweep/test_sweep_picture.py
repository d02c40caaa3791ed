"""sweep.png: what stands where."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.container import BarContainer
from matplotlib.figure import Figure as Canvas
from matplotlib.text import Annotation
from PIL import Image

from flowrun.config import Best
from flowrun.sweep.labels import write_labels
from flowrun.sweep.picture import draw, drawn
from flowrun.sweep.settings import Figure
from flowrun.sweep.table import Row
from tests.sweep.test_recommend import FOUR, other

LOSS = Figure("loss_mean", Best.least)


def texts(canvas: Canvas) -> list[str]:
    return [text.get_text() for text in canvas.axes[0].texts if isinstance(text, Annotation) and text.get_text()]


def dots(canvas: Canvas) -> set[tuple[float, float]]:
    return {
        (float(line.get_xdata()[0]), float(line.get_ydata()[0]))
        for line in canvas.axes[0].lines
        if line.get_marker() == "o"
    }


def test_each_setting_of_accelerators_is_a_named_point_at_its_speed_and_deviation() -> None:
    canvas = drawn(FOUR, None)
    assert dots(canvas) == {(2.0, 0.0), (1.2, 0.5), (1.5, 0.01), (0.9, 0.6)}
    assert {text.splitlines()[0] for text in texts(canvas)} == {
        "none",
        "diffusers_cache",
        "torch_compile",
        "diffusers_cache + torch_compile",
        "bound 0.1",
    }
    assert canvas.axes[0].get_title() == "fastest within its bound: torch_compile"
    assert [line for line in canvas.axes[0].lines if list(line.get_ydata()) == [0.1, 0.1]], "the bound is a line"


def test_names_stand_clear_of_one_another_and_of_the_points() -> None:
    crowd = [{**FOUR[0], "job": str(n), "acceleration/shared": f"[{name}]", "result.s_per_epoch": str(1 + n / 100)}
             for n, name in enumerate(("attention_backend", "fused_qkv", "quantised", "fused", "offloaded"))]  # fmt: skip
    canvas = drawn([*FOUR, *crowd], None)
    canvas.draw_without_rendering()
    boxes = [
        text.get_window_extent() for text in canvas.axes[0].texts if text.get_text() and "bound" not in text.get_text()
    ]
    assert len(boxes) == 9
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.overlaps(b)]


def test_one_number_is_a_line_over_it_on_a_logarithmic_axis_where_it_spans_much() -> None:
    canvas = drawn([other(n, lr, 0, loss_mean=n) for n, lr in enumerate(("1e-2", "1e-4", "1e-3"))], LOSS)
    (line,) = [line for line in canvas.axes[0].lines if line.get_marker() == "o"]
    assert list(line.get_xdata()) == [1e-4, 1e-3, 1e-2] and list(line.get_ydata()) == [1, 2, 0]
    assert canvas.axes[0].get_xscale() == "log" and canvas.axes[0].get_xlabel() == "lr"


def test_two_settings_are_a_line_for_each_value_of_the_second() -> None:
    rows = [
        {**other(2 * i + j, str(lr), 0, loss_mean=lr * rank), "rank": rank_name}
        for i, lr in enumerate((1, 2, 3))
        for j, (rank, rank_name) in enumerate(((5, "low"), (7, "high")))
    ]
    canvas = drawn(rows, LOSS)
    found = {tuple(line.get_ydata()) for line in canvas.axes[0].lines if line.get_marker() == "o"}
    assert found == {(5, 10, 15), (7, 14, 21)}
    assert [text.get_text() for text in canvas.axes[0].get_legend().get_texts()] == ["rank=low", "rank=high"]


def test_names_are_bars_and_the_best_one_stands_in_the_title() -> None:
    canvas = drawn([other(n, name, n % 2, loss_mean=n) for n, name in enumerate(("b", "b", "a", "a"))], LOSS)
    (bars,) = [container for container in canvas.axes[0].containers if isinstance(container, BarContainer)]
    assert [bar.get_width() for bar in bars] == [0.5, 2.5]
    assert [label.get_text() for label in canvas.axes[0].get_yticklabels()] == ["lr=b", "lr=a"]
    assert canvas.axes[0].get_title() == "least loss_mean: lr=b"


def test_seeds_alone_are_points_with_mean_and_deviation() -> None:
    canvas = drawn([other(n, "1", n, loss_mean=value) for n, value in enumerate((1.0, 2.0, 3.0))], LOSS)
    assert canvas.axes[0].get_title() == "loss_mean: 2 +- 1 over 3 seeds"
    (points,) = [line for line in canvas.axes[0].lines if line.get_marker() == "o"]
    assert list(points.get_ydata()) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("rows", [[{**one, "status": "failed"} for one in FOUR], [other(0, "1", 0), other(1, "2", 0)]])
def test_there_is_no_file_without_anything_to_draw(rows: list[Row], tmp_path: Path) -> None:
    assert draw(rows, None, tmp_path / "sweep.png") is None and not list(tmp_path.iterdir())


def test_the_file_is_a_picture(tmp_path: Path) -> None:
    assert Image.open(draw(FOUR[:1] + FOUR[2:], None, tmp_path / "sweep.png")).size[0] > 800


def test_long_names_of_points_at_one_height_do_not_lie_on_one_another() -> None:
    """Bounding boxes, measured by matplotlib, of the settings of a sweep over three networks and three caches."""
    figure = Canvas(figsize=(10, 6), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0.47, 0.98), ylim=(1e-8, 3), yscale="log")
    kinds = (
        ("cache(threshold=0.4)", 1.17, (0.522, 0.545, 0.557)),
        ("cache(threshold=0.1)", 0.0352, (0.687, 0.734, 0.879)),
        ("none", 1e-6, (0.69, 0.74, 0.92)),
    )
    networks = ("", " + torch_compile", " + attention_backend(backend=_native_math)")
    named = [(x, y, f"diffusers_{name}{more}\n{x} s") for name, y, places in kinds for x, more in zip(places, networks, strict=True)]
    write_labels(axes, named)
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
    assert len(boxes) == 9
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
