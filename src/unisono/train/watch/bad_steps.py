"""Steps whose numbers are bad: what makes one bad, and what a run does about it.

A step is *bad* where its loss or its gradient norm is not a number or, with `train.spike`, far above those of the steps
before it. Both are numbers that all ranks have alike when the update is due, so all decide the same, without asking.
A bad step changes nothing. What follows is `train.on_bad`:

    stop       the run ends with an error
    skip       the step counts, without an update: samples and learning rate go on
    roll_back  the run is put back to its newest whole checkpoint before the step; when the step comes again, it is
               skipped, and `train.skip_around` steps before and after it too (as PaLM was trained)

Under fp16 an overflow that a smaller scale cures is not bad. Where replicas meet in every k-th step (`sync=period`), a
bad step between adds nothing to its period, which ends one step later; a bad step in which they meet gives up all of
its period.
"""

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unisono.config import TrainConfig
from unisono.observe.files import write_whole
from unisono.observe.metrics import JsonLines, read_lines
from unisono.spec.errors import UserCodeError
from unisono.spec.runs import CHECKPOINTS
from unisono.sync import Verdict
from unisono.train.data.filtered import FilteredFeed
from unisono.train.state.checkpoint.find import LATEST, by_age, first_whole, latest, step_of
from unisono.train.state.run_state import restore
from unisono.train.state.writing import writing
from unisono.train.step.numbers import Numbers, not_numbers
from unisono.train.step.run import Run
from unisono.train.step.update import Report
from unisono.train.watch.locate_nan import odd_leaves

WINDOW, LEAST = 128, 16
"""Good steps of which the median is taken, and before which nothing is a spike."""
DEVIATION = 1.4826  # of a normal distribution, in medians of what lies between it and its median
FLOOR = 1e-3  # of the median: a deviation below it is noise of nothing
RETURNS, QUARANTINE = "rollbacks.jsonl", "quarantine.jsonl"

Note = Callable[[str], None]


class Judge:
    """Why a step is bad, from what all ranks have alike. spike: in robust standard deviations, 0: off. avoided: steps
    (from 0) that are bad whatever they come to, by the step because of which."""

    def __init__(self, spike: float) -> None:
        self.spike = spike
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.avoided: dict[int, int] = {}

    def __call__(self, step: int, verdict: Verdict, numbers: Numbers) -> str:
        whole = verdict is Verdict.APPLY  # else the norm is not that of an update, or not known yet
        if step in self.avoided:
            cause = self.avoided[step]
            return "it was bad before" if cause == step else f"beside step {cause + 1}, which was bad"
        if wrong := not_numbers(step, verdict, numbers):
            return wrong
        if self.spike:
            wrong = self._spike("loss", numbers.loss, self.losses)
            wrong = wrong or (self._spike("gradient norm", numbers.norm, self.norms) if whole else "")
            if wrong:
                return wrong
            self.losses.append(numbers.loss)
            self.norms.extend([numbers.norm] if whole else [])
        return ""

    def _spike(self, name: str, value: float, before: Sequence[float]) -> str:
        if len(before) < LEAST:
            return ""
        median, deviation = spread(before)
        above = (value - median) / deviation if deviation else 0.0
        if above <= self.spike:
            return ""
        return (
            f"the {name} is {value:.4g}, {above:.3g} deviations above {median:.4g},"
            f" the median of {len(before)} steps"
        )


def spread(values: Sequence[float]) -> tuple[float, float]:
    """(median, robust standard deviation), the latter never below `FLOOR` of the former."""
    median = statistics.median(values)
    return median, max(DEVIATION * statistics.median(abs(v - median) for v in values), FLOOR * abs(median))


@dataclass(frozen=True, slots=True)
class Return:
    """The run went back. step: the bad one, from 1. to: updates made then. left_out: steps that are skipped when they
    come again, from 1."""

    step: int
    reason: str
    to: int
    left_out: tuple[int, ...]


class BadSteps:
    """What a run does about bad steps, on one rank. Every rank makes one and makes the same calls, or it hangs."""

    def __init__(
        self, run: Run, feed: FilteredFeed, how: TrainConfig, run_dir: Path, resumed: bool, note: Note
    ) -> None:
        self.run, self.feed, self.how, self.run_dir, self.note = run, feed, how, run_dir, note
        self.judge = Judge(how.spike)
        run.update.judge = run.replica.update.judge = self.judge
        self.skipped: list[dict[str, Any]] = []
        self.returns: list[Return] = []  # since there was progress
        self.all_returns: list[Return] = []
        self._in_a_row = 0
        if resumed:
            self._recall()
        if run.sync.kept is not None:
            run.sync.kept.holds = how.on_bad != "stop" or how.quarantine or bool(self.judge.avoided)

    @property
    def _first(self) -> bool:
        """Whether this rank writes."""
        return self.run.mesh.world.index == 0

    def _recall(self) -> None:
        """What the run left out before it was resumed."""
        known: list[int] = []
        if self._first:
            path = self.run_dir / RETURNS
            for line in read_lines(path)[0] if path.is_file() else ():
                known += [number for step in line["left_out"] for number in (step - 1, line["step"] - 1)]
        world, device = self.run.mesh.world, self.run.local.device
        count = world.broadcast(torch.tensor([len(known)], device=device))
        numbers = torch.tensor(known or [0] * int(count), dtype=torch.int64, device=device)
        pairs = world.broadcast(numbers).tolist() if int(count) else []
        self.judge.avoided = dict(zip(pairs[::2], pairs[1::2], strict=True))

    def handle(self, report: Report) -> Report | None:
        """The report of a step, marked where the step is skipped; None where the step is to be played again, without
        micro-batches that are left out from now on. A report that is bad and not skipped cannot be passed over."""
        if report.bad and self._quarantine(report):
            return None
        if (without := self.feed.without(report.step)) and not report.bad:
            report = replace(report, says={**report.says, "quarantined": sorted(without)})
        if not report.bad:
            self._in_a_row = 0
            return report
        avoided = report.step in self.judge.avoided
        self._in_a_row += not avoided
        if not avoided and (self.how.on_bad != "skip" or self._in_a_row > self.how.bad_limit):
            return report
        self.run.update.scaler.take_back()
        self.run.step += 1
        self.skipped.append({"step": report.step + 1, "reason": report.bad})
        return replace(report, skipped=True, says={**report.says, "skipped": report.bad})

    def _quarantine(self, report: Report) -> bool:
        """Name the micro-batches whose loss is not a number; whether the step is to be played again without them.

        Nothing is left out unless `train.quarantine`, nor where nothing would be left, nor where more than losses
        follows from all leaves of a step: votes of routers, running statistics.
        """
        run, feed, step = self.run, self.feed, report.step
        known = step in self.judge.avoided or feed.without(step)
        if known or report.loss - report.loss == 0.0:
            return False
        losses = odd_leaves(run, feed.fetch(step, run.leaves)[: len(run.leaves)])
        records = [
            {"step": step + 1, "leaf": leaf, "samples": feed.samples_of(step, leaf), "loss": str(loss)}
            for leaf, loss in sorted(losses.items())
        ]
        if records and self._first:
            path = self.run_dir / QUARANTINE
            before = read_lines(path)[0] if path.is_file() else []  # a step may come again
            with writing(self.run_dir), JsonLines(path) as file:
                file.write(*(record for record in records if record not in before))
        for record in records[:3]:
            self.note(f"step {record['step']}: the loss of micro-batch {record['leaf']} is {record['loss']},"
                      f" of samples {_few(record['samples'])}; {QUARANTINE} names them")  # fmt: skip
        if not (self.how.quarantine and losses) or feed.share(step, losses) >= 1.0:
            return False
        follows = torch.tensor([len(run.update.after)], device=run.local.device)
        if bool(run.mesh.world.all_gather(follows).any()):  # on some stage
            return False
        feed.leave_out(step, losses)
        run.update.scaler.take_back()
        return True

    def goes_back(self, report: Report) -> bool:
        """Whether the run is to be put back because of this report."""
        return bool(report.bad) and not report.skipped and self.how.on_bad == "roll_back"

    def go_back(self, report: Report) -> Mapping[str, Any] | None:
        """Put the run back; what the checkpoint says beside its tensors. None where there is none to go back to.

        Raises UserCodeError N03 on the first rank where that helped too often not; the others wait to be stopped.
        """
        around, step = self.how.skip_around, report.step
        to, faults = self._target(step)
        for fault in faults:
            self.note(fault)
        if to is None:
            return None
        if self.returns and to > max(back.step for back in self.returns):
            self.returns.clear()
        left = list(range(max(0, step - around), step + around + 1))
        if len(self.returns) >= self.how.bad_limit:
            self.give_up(report)
        back = Return(step + 1, report.bad, to, tuple(at + 1 for at in left))
        self.returns.append(back)
        self.all_returns.append(back)
        self.judge.avoided |= {at: step for at in left if at not in self.judge.avoided}
        state = self._restored(back)
        self.note(
            f"step {back.step}: {back.reason}; back to step {to},"
            f" and without step{'s' * (len(left) > 1)} {_span(back.left_out)}"
        )
        return state

    def _restored(self, back: Return) -> Mapping[str, Any]:
        run, folder = self.run, self.run_dir / CHECKPOINTS
        target = next(path for path in by_age(self.run_dir) if step_of(path) == back.to)
        if self._first:
            with writing(self.run_dir):
                with JsonLines(self.run_dir / RETURNS) as file:
                    file.write(asdict(back))
                write_whole(self.run_dir / LATEST, f"{folder.name}/{target.name}\n")
        if run.sync.kept is not None:
            run.sync.kept.spoiled = False
        run.whole = False  # should a rank be lost meanwhile, nobody takes this for a state of the run
        state = restore(run, target)
        self.load(state.get("bad", {}))
        self.feed.forget_from(back.to)
        run.mesh.world.barrier()
        run.whole = True
        return state

    def _target(self, step: int) -> tuple[int | None, list[str]]:
        """The updates made in the checkpoint to go back to, as the first rank finds them, and what is wrong with
        others. Where the last return did not help, an older one, if there is one."""
        run, step_there, faults = self.run, -1, list[str]()
        world = run.mesh.world
        if self._first:
            newest = latest(self.run_dir)
            top = step_of(newest) if newest is not None else None
            ages = [(at, path) for path in by_age(self.run_dir) if (at := step_of(path)) is not None]
            ages = [(at, path) for at, path in ages if at <= step and (top is None or at <= top)]
            bad = max((back.step for back in self.returns), default=0)
            before = [pair for pair in ages if pair[0] <= step - self.how.skip_around] or ages
            last = self.returns[-1].to if self.returns else step + 1
            older = [pair for pair in before if pair[0] > bad or pair[0] < last]
            older = older or [pair for pair in before if pair[0] == last]
            folder, faults = first_whole(path for _, path in older or before)
            step_there = -1 if folder is None else step_of(folder) or 0
        target = world.broadcast(torch.tensor([step_there], device=run.local.device))
        return (int(target) if int(target) >= 0 else None), faults

    def give_up(self, report: Report) -> None:
        """Raises UserCodeError on the first rank, N02 for a spike, N03 where what was tried did not help; the others
        wait to be stopped."""
        run = self.run
        if not self._first:
            run.mesh.world.barrier()
            return
        what, where = f"step {report.step + 1}: {report.bad}", ""
        code = "N02"
        if self.returns:
            tries = [f"step {back.step} ({back.reason}): back to {back.to}" for back in self.returns]
            code = "N03"
            what += f"; the run went back {_times(len(tries))} and came no further"
            where = "; ".join(tries)
        elif self.tried:
            last = self.skipped[1 - self._in_a_row :]
            code = "N03"
            what += f"; the {len(last)} bad steps before it were skipped"
            where = "; ".join(f"step {back['step']} ({back['reason']})" for back in last)
        raise UserCodeError(
            what,
            where=where,
            likely="a learning rate that is too high, or bad input",
            fix="a lower --train.lr, more --train.warmup_steps, or --train.clip; or a higher --train.spike"
            if report.finite
            else "a lower --train.lr, more --train.warmup_steps, or --train.clip",
            code=code,
        )

    @property
    def tried(self) -> bool:
        """Whether skipping or going back has been tried on what is bad now."""
        return bool(self.returns) or (self.how.on_bad == "skip" and self._in_a_row > 1)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {"losses": list(self.judge.losses), "norms": list(self.judge.norms), "skipped": self.skipped}

    def load(self, state: Mapping[str, Any]) -> None:
        """What `state` gave, from a checkpoint."""
        for values, key in ((self.judge.losses, "losses"), (self.judge.norms, "norms")):
            values.clear()
            values.extend(state.get(key, ()))
        self.skipped[:] = state.get("skipped", ())

    def summary(self) -> dict[str, Any]:
        """For summary.json."""
        return {"skipped": self.skipped, "rolled_back": [asdict(back) for back in self.all_returns]}


def _few(samples: Sequence[int]) -> str:
    return ", ".join(map(str, samples[:8])) + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")


def _span(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
