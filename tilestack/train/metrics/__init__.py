"""What a run shows: its figures in files, a bar at the terminal, curves on a page, and programs that follow them."""

from tilestack.train.metrics.log import METRICS, SPEED, Log, NoLog, curve, finite, rows
from tilestack.train.metrics.plot import plot_curves, plot_run, smooth
from tilestack.train.metrics.progress import Progress
from tilestack.train.metrics.trackers import Tracker, load_trackers, open_trackers

__all__ = [
    "METRICS",
    "SPEED",
    "Log",
    "NoLog",
    "Progress",
    "Tracker",
    "curve",
    "finite",
    "load_trackers",
    "open_trackers",
    "plot_curves",
    "plot_run",
    "rows",
    "smooth",
]
