"""One optimiser step, on every rank; and steps one after the other, a generator, so that its caller owns the loop."""

from collections.abc import Callable, Iterator, Sequence

from unisono.parallel.player import Leaf
from unisono.sync import Verdict
from unisono.train.data.feed import Feed
from unisono.train.step.join import resize
from unisono.train.step.run import Run
from unisono.train.step.update import Report


def train(run: Run, feed: Feed, until: int, stop: Callable[[], bool] = lambda: False) -> Iterator[Report]:
    """Steps from where the run stands until it has made `until` updates, or a rank was asked to stop, or a step is bad
    (then nothing was changed, and the caller decides)."""
    while run.step < until:
        report = next_step(run, feed, stop)
        yield report
        if report.stop or report.bad:
            return


def next_step(
    run: Run,
    feed: Feed,
    stop: Callable[[], bool] = lambda: False,
    fetched: Callable[[Sequence[Leaf]], None] = lambda leaves: None,
) -> Report:
    """The next step, played again with a smaller scale while it overflows. fetched(leaves): hears of each batch."""
    while True:
        run.recorder.step = run.step + 1
        with run.recorder.span("data"):
            leaves = fetch(run, feed)
            fetched(leaves)
        report = train_step(run, leaves, stop)
        if not report.again:
            return report


def fetch(run: Run, feed: Feed, step: int | None = None) -> Sequence[Leaf]:
    """The leaves that this rank computes of a step, the next one if absent; they are divided anew where it has another
    number of them than the one before. Every rank calls it."""
    step = run.step if step is None else step
    if (count := feed.count(step)) != run.of_leaves:
        resize(run, count)
    return feed.fetch(step, run.leaves)


def train_step(run: Run, leaves: Sequence[Leaf], stop: Callable[[], bool] = lambda: False) -> Report:
    """Forward, backward, meet, clip, update. Every rank calls it, or it hangs. stop(): whether this rank was asked to;
    the report says whether any was. A bad step changes nothing."""
    run.sync.before_step(run.step)
    weight = run.sync.weigh(targets_of(run, leaves) / run.mesh.dp.size)
    with run.assigner.computing():
        losses = run.player.play(run.row, leaves, weight, run.seed)
    with run.recorder.span("backward", op="close"):
        verdict = run.gradients.close(losses, stop())
    with run.recorder.span("optim"):
        run.update.scaler.unscale(run.gradients.slots)
        local = run.gradients.numbers(run.measure)
        run.sync.deliver(run.step, local.norm, local.stop)
        numbers = run.shared.share(run.step, local)
        run.whole = False
    with run.gate:
        with run.recorder.span("optim"):
            report = run.update(run.step, verdict, numbers)
            run.gradients.forget()
            if run.step + 1 == run.replica.steps and not report.bad:
                _drain(run)
        if report.bad or report.again:
            run.sync.undone()
        if report.verdict is not Verdict.DISCARD or not numbers.met:
            run.step = run.sync.next_step(run.step)
        run.sync.after_update(report.step)
        run.whole = True
    if not run.sync.equal and not report.bad:
        run.sync.heed(stop)
        _come_together(run, report)
    if not report.bad and not report.again:
        run.assigner.stepped()
    return report


def _drain(run: Run) -> None:
    """In the last step of a run: the updates of gradients that are still on their way. Every rank calls it."""
    step = run.step
    while (numbers := run.gradients.next(run.measure)) is not None:
        step += 1
        run.update.make(step, numbers.norm)
        run.gradients.forget()


def _come_together(run: Run, report: Report) -> None:
    """After an update, where replicas have weights of their own. A rank that is lost while they communicate leaves each
    of the others with a state after that step, and with its report."""
    run.untold = report
    with run.recorder.span("sync"):
        run.sync.exchange(report.step)
    with run.gate:
        run.whole = False
        run.sync.merge(report.step)
        run.whole = True
    run.step = run.sync.proceed(run.step)
    run.untold = None


def targets_of(run: Run, leaves: Sequence[Leaf]) -> float:
    """Targets of the global batch, of which all leaves have as many; where some do not count, `Leaf.scale` says so. At
    least 1: batches of random size may be empty."""
    return max(1, sum(leaf.targets.numel() for leaf in leaves)) * run.of_leaves / len(leaves)
