"""What every sink owes: it looks and changes nothing, and tells each step once, through a resume too."""

import copy
import gzip
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from unisono.observe.metrics import read_steps
from unisono.observe.span import PARTS, Recorder
from unisono.spec.sink import Observer, RunFacts, Sink, StepRecord
from unisono.train.sinks.metrics import MetricsSink
from unisono_contrib.trackers import Tracker
from unisono_contrib.trackers.mirror import TrackerMirror
from unisono_contrib.trackers.run_folder import tracked


def facts(run_dir: Path, step: int = 0, steps: int = 12) -> RunFacts:
    """A run of two ranks as rank 0 sees it, at update `step`."""
    coords = {"dp": 0, "pp": 0}
    return RunFacts(run_dir, 0, 2, "host", "gloo", coords, step, steps, Recorder())


def records(first: int, last: int) -> list[StepRecord]:
    """Steps first .. last, no two of which share a number: what of them is written can be told apart."""
    return [
        StepRecord(
            step, 3.0 + step / 1024, 1e-3 + step / 4096, 1.0 + step / 512, 640, 0.5 + step / 256,
            {part: 0.01 * n + step / 2048 for n, part in enumerate(PARTS, 1)}, {"dp.all_reduce": 7000 + step}, 300.0,
        )
        for step in range(first, last + 1)
    ]  # fmt: skip


def play(sink: Sink, run: RunFacts, steps: Sequence[StepRecord], together: int = 3) -> None:
    """A run of these steps, told `together` at once, as a session tells them. Raises what the sink raises."""
    observer = sink.open(run)
    try:
        for begin in range(0, len(steps), together):
            burst = steps[begin : begin + together]
            for record in burst[:-1]:
                _end(observer, run, record)
            observer.observe(burst)
            _end(observer, run, burst[-1])
    finally:
        observer.close()


def _end(observer: Observer, run: RunFacts, record: StepRecord) -> None:
    with run.recorder.span("forward", step=record.step):
        pass
    observer.ended(record.step, False)


def faults(sink: Sink, folder: Path, text: str = "") -> Iterator[str]:
    """What is wrong with a sink, a sentence each; none for one that may be used. folder: empty, to write into.

    1. It leaves what it is told as it is. 2. It writes something of a run. 3. Resumed at a step, it has each step once,
    in order, and those before it unchanged.
    """
    if isinstance(sink, Tracker):
        yield from _faults_of_tracker(sink, folder)
        return
    whole, resumed = folder / "whole", folder / "resumed"
    steps = records(1, 12)
    before = copy.deepcopy(steps)
    play(sink, facts(whole), steps)
    if steps != before:
        yield "it changes the records that other observers get"
    if not any(path.stat().st_size for path in whole.rglob("*") if path.is_file()):
        yield "it leaves nothing of a run of 12 steps in the run folder"
    play(sink, facts(resumed), steps[:8])  # killed after step 8, gone on from the checkpoint after step 5
    play(sink, facts(resumed, step=5), steps[5:])
    for name, text in _texts(resumed).items():
        written, wanted = _steps(text), _steps(_texts(whole).get(name, ""))
        if written != wanted:
            yield f"{name}: resumed at step 5 it holds steps {written}, a run without a break {wanted}"


def _faults_of_tracker(tracker: Tracker, folder: Path) -> Iterator[str]:
    """The same of a tracker, which reads a run folder, asked of the tracker itself: it has each number of each step
    once; after a resume too; and where the run goes on with other numbers, those."""
    run_dir, metrics = folder / "out" / "conformance" / "run", MetricsSink()
    for step, last, shift in ((0, 8, 0), (5, 12, 0), (9, 12, 1000)):
        steps = [replace(record, loss=record.loss + shift) for record in records(step + 1, last)]
        play(metrics, facts(run_dir, step=step), steps)
        mirror = TrackerMirror(tracker, run_dir)
        mirror.catch_up(final=True)
        mirror.catch_up(final=True)
        generation = mirror.cursor.generation
        connection = tracker.connect(tracked(run_dir, last, generation))
        held = connection.held(0)
        connection.close()
        known = {line["step"]: line["loss"] for line in read_steps(run_dir / "metrics.jsonl")[0]}
        if sorted(held) != sorted(known):
            yield f"resumed at step {step} it has the steps {sorted(held)}, the run {sorted(known)}"
        elif off := [k for k in known if not math.isclose(held[k].get("loss", 0.0), known[k], rel_tol=1e-6)]:
            yield f"resumed at step {step} it has another loss of the steps {off} than the run"
    tracker.connect(tracked(run_dir, 12, generation)).forget()


def _steps(text: str) -> list[int]:
    """The steps that a text tells of, by a number that only their records have."""
    marks = {
        f"{value!r}": record.step
        for record in records(1, 12)
        for value in (record.loss, record.times["forward"])
    }
    lines = [
        {marks[word] for word in re.findall(r"\d+\.\d+", line) if word in marks} for line in text.splitlines()
    ]
    return [step for line in lines for step in sorted(line)]


def _texts(folder: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            data = gzip.decompress(data) if path.suffix == ".gz" else data
            texts[str(path.relative_to(folder))] = data.decode("utf-8", "replace")
    return texts
