"""`loss.html`: the curves of a run on one page that needs nothing else, drawn by plotly where it is installed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilestack.files import whole_file
from tilestack.train.metrics.log import curve

Curve = tuple[Sequence[float], Sequence[float]]


def plot_run(folder: Path, title: str) -> Path | None:
    """Draw the loss of a run, with that on held-out text; None where plotly is missing."""
    curves = {"training": curve(folder, "loss"), "held out": curve(folder, "validation_loss")}
    return plot_curves(folder / "loss.html", title, {name: points for name, points in curves.items() if points[0]})


def plot_curves(path: Path, title: str, curves: Mapping[str, Curve], y: str = "loss", log: bool = False) -> Path | None:
    """Curves over steps, long ones with a smoothed line over their points."""
    try:
        import plotly.graph_objects as objects
    except ImportError:
        return None
    traces: list[Any] = []
    for name, (xs, ys) in curves.items():
        noisy = len(xs) > 50
        if noisy:
            traces.append(objects.Scatter(x=xs, y=ys, mode="lines", name=f"{name}, each step", opacity=0.3))
        line = smooth(ys, max(1, len(xs) // 50)) if noisy else ys
        traces.append(objects.Scatter(x=xs, y=line, mode="lines" if noisy else "lines+markers", name=name))
    figure = objects.Figure(traces)
    figure.update_layout(
        title=title, xaxis_title="step", yaxis_title=y, template="plotly_white", hovermode="x unified",
        yaxis_type="log" if log else "linear",
    )  # fmt: skip
    with whole_file(path) as hidden:
        figure.write_html(hidden, include_plotlyjs=True)
    return path


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it in a window."""
    return [sum(part := values[max(0, i - window + 1) : i + 1]) / len(part) for i in range(len(values))]
