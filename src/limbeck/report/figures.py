"""The geometry of the page's figures: numbers in, SVG coordinates out. `figures.html` draws them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Frame(NamedTuple):
    """A panel's size, and where its plotting area lies in it."""

    width: int = 300
    height: int = 150
    left: int = 46
    right: int = 292
    top: int = 8
    bottom: int = 128


FRAME = Frame()
MOST_POINTS = 240
NOT_A_CURVE = {"epoch", "step"}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One curve over steps; ticks are (coordinate, label)."""

    name: str
    points: list[tuple[float, float]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    last: str
    guide: float | None  # where the dashed teacher line runs

    @property
    def polyline(self) -> str:
        """The points, as SVG has them."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


@dataclass(frozen=True)
class Stage:
    """The curves of one stage: `losses` were logged while training, `scores` at evaluations."""

    name: str
    losses: list[Panel]
    scores: list[Panel]


@dataclass(frozen=True)
class Bar:
    """A metric's scores; `percent` is how long the bar is, from zero."""

    metric: str
    side: str
    value: float
    percent: float


def stages(metrics: Iterable[dict[str, Any]], teacher: dict[str, float]) -> list[Stage]:
    """Every number a run logged, as one small panel each; `teacher` holds the scores to draw as guides."""
    losses: dict[str, dict[str, list[tuple[float, float]]]] = {}
    scores: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for position, record in enumerate(metrics):
        name, step = record.get("stage", ""), record.get("step", position)
        _collect(losses.setdefault(name, {}), step, record)
        _collect(scores.setdefault(name, {}), step, record.get("eval") or {})
    return [
        Stage(
            name=name,
            losses=[panel(part, points) for part, points in losses[name].items()],
            scores=[panel(metric, points, teacher.get(metric)) for metric, points in scores[name].items()],
        )
        for name in losses
    ]


def panel(name: str, points: Points, guide: float | None = None) -> Panel:
    """Scale `points` (step, value) to the panel; the value axis spans what is shown, guide included."""
    thinned = _thin(points)
    steps = [step for step, _ in thinned]
    values = [value for _, value in thinned] + ([] if guide is None else [guide])
    first, last = _widen(min(steps), max(steps))
    low, high = _widen(min(values), max(values))

    def x(step: float) -> float:
        return FRAME.left + (step - first) / (last - first) * (FRAME.right - FRAME.left)

    def y(value: float) -> float:
        return FRAME.bottom - (value - low) / (high - low) * (FRAME.bottom - FRAME.top)

    return Panel(
        name=name,
        points=[(x(step), y(value)) for step, value in thinned],
        x_ticks=[(x(tick), _label(tick)) for tick in _ticks(first, last)],
        y_ticks=[(y(tick), _label(tick)) for tick in _ticks(low, high)],
        last=_label(points[-1][1]),
        guide=None if guide is None else y(guide),
    )


def bars(metrics: dict[str, Any], lower: Sequence[str] = ()) -> list[Bar]:
    """Teacher and student, metric by metric; the axis runs from 0 to 100, or further where a score does. Metrics of
    which less is better have an axis each, that ends at the worse of the two."""
    measured = [
        (metric, side, metrics[side][metric])
        for metric in metrics.get("student") or {}
        for side in ("teacher", "student")
        if metric in (metrics.get(side) or {})
    ]
    worst = {name: max(value for metric, _, value in measured if metric == name) for name, _, _ in measured}
    shared = max((100.0, *(value for name, value in worst.items() if name not in lower)))

    def bar(metric: str, side: str, value: float) -> Bar:
        end, mark = (worst[metric] or 1.0, " ↓") if metric in lower else (shared, "")
        return Bar(metric + mark, side, value, max(0.0, 100 * value / end))

    return [bar(*one) for one in measured]


def _collect(curves: dict[str, list[tuple[float, float]]], step: float, values: dict[str, Any]) -> None:
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in NOT_A_CURVE and math.isfinite(value):
            curves.setdefault(name, []).append((step, value))


def _thin(points: Points) -> Points:
    """Means of equal runs of points: a panel is 250 pixels wide, and a long run logs far more."""
    size = math.ceil(len(points) / MOST_POINTS)
    chunks = (points[start : start + size] for start in range(0, len(points), size))
    return [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def _widen(low: float, high: float) -> tuple[float, float]:
    """A range with extent, for a single point or a constant curve."""
    margin = 0.0 if high > low else (abs(low) * 0.1 or 1.0)
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """A few round numbers within the range."""
    rough = (high - low) / 2.5
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (5, 2, 1) if size * factor <= rough)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _label(value: float) -> str:
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.3g}"
