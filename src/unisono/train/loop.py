"""The loop: a generator of steps, so that its caller owns the loop."""

from collections.abc import Callable, Iterator

from unisono.train.data.feed import Feed
from unisono.train.run import Run
from unisono.train.step import train_step
from unisono.train.update import Report


def train(run: Run, feed: Feed, until: int, stop: Callable[[], bool] = lambda: False) -> Iterator[Report]:
    """Steps from where the run stands until it has made `until` updates, or a rank was asked to stop, or a number
    is not finite (then nothing was changed, and the caller decides)."""
    while run.step < until:
        run.recorder.step = run.step
        with run.recorder.span("data"):
            leaves = feed.fetch(run.step, run.leaves)
        report = train_step(run, leaves, stop())
        yield report
        if report.stop or not report.finite:
            return
