"""The picture of an advice: what is on the front, and labels that cover nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from evidence.advice.plots import draw, drawn, front, picture
from evidence.advice.schema import Entry
from tests.evidence.advice.made import advice, measured


def many() -> list[Entry]:
    """A cloud around the winner and the baseline, and a front with a long tail."""
    cloud = [measured(f"bf16, cloud {n}", 1 + 0.19 * (n % 9), 640 + 37 * n, half=0.1) for n in range(14)]
    return cloud + [
        measured(
            f"bf16, chunked_loss=true, attention=eager, optimizer.fused=false, {n} threads", 0.3 + n / 7, 200 + 9 * n
        )
        for n in range(12)
    ]


def words(figure: Any) -> dict[str, Any]:
    """The places of all texts within the axes and beside them."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    return {text.get_text(): Text.get_window_extent(text, renderer) for text in figure.axes[0].texts}


def test_the_front_is_what_no_other_beats_in_speed_and_memory() -> None:
    made = advice(measured("small", 0.5, 300), measured("dominated", 2.0, 800), measured("same memory", 2.8, 620))
    assert [entry.candidate.label for entry in front(drawn(made))] == ["small", "bf16 + compile"]


def test_only_what_was_measured_is_drawn(tmp_path: Path) -> None:
    assert picture(advice(entries=advice().entries[-4:]), tmp_path / "advice.png") is None  # the baseline alone
    path = picture(advice(), tmp_path / "new" / "advice.png")
    assert path == tmp_path / "new" / "advice.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_winner_and_baseline_are_labelled_and_labels_cover_nothing() -> None:
    # Where the nearest places of the labels would be.
    beside = [measured(f"bf16, {n}", 2.95 if n % 2 else 1.06, (640 if n % 2 else 1010) + 20 * n) for n in range(6)]
    made = advice(*many(), *beside)
    figure = draw(made)
    places = words(figure)
    assert {"bf16 + compile: 2.90x", "fp32"} <= places.keys()
    winner, baseline = places["bf16 + compile: 2.90x"], places["fp32"]
    assert not winner.overlaps(baseline)
    axes = figure.axes[0]
    points = axes.transData.transform([(entry.memory_bytes / 2**20, entry.speed.mean) for entry in drawn(made)])
    assert not any(place.contains(x, y) for place in (winner, baseline) for x, y in points)


def test_the_front_has_numbers_and_a_list_that_fits_beside_the_axes() -> None:
    figure = draw(advice(*many()))
    places = words(figure)
    (text, place) = next((text, place) for text, place in places.items() if "MiB" in text)
    numbers = {line.split()[0] for line in text.splitlines() if not line.startswith(" ")}
    assert len(numbers) > 3
    assert numbers <= places.keys()
    assert text.startswith("1   bf16, chunked_loss=true")
    assert place.x0 > figure.axes[0].get_window_extent().x1
    assert place.y0 > 0
    assert place.x1 < figure.bbox.x1
