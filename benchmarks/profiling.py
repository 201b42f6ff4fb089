"""What a profile costs, by turns on one CPU; and what Python's garbage collections do.

`python benchmarks/profiling.py` plays steps of a small GPT in this process: without anything, with the sampler of
lines alone, with a whole profile, and again: a busy minute meets all alike. Then steps with collections whenever
Python decides, and with none within a step. Medians, in milliseconds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.observe.host_time import HostMeter
from unisono.observe.span import Recorder
from unisono.spec.sink import RunFacts
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.step.train_step import train_step
from unisono.train.watch.collections import StepCollections
from unisono_contrib.train.watch.line_sampler import LineSampler
from unisono_contrib.train.watch.profiling import Profiling


@contextmanager
def nothing(run: Any, step: int) -> Iterator[None]:
    """A step as it is."""
    yield


@contextmanager
def lines(run: Any, step: int) -> Iterator[None]:
    """A step beside the sampler."""
    sampler = LineSampler()
    sampler.start()
    yield
    sampler.stop()


def rows_of(text: Path, width: int, rounds: int) -> None:
    """Play and print."""
    recipe = Recipe(
        model=ModelConfig(n_layer=4, n_head=4, d_model=width, context=64),
        data=DataConfig(source=f"text:{text}"),
        train=TrainConfig(steps=10**6, global_batch=8, micro_batch=4),
    )
    resolved = resolve(recipe, "dp=1", 1)
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    run = build(resolved.recipe, resolved.plan, place_of(0, 1, 0, "gloo", 60.0), corpus, Recorder(0))
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, run.local.device)

    def step() -> float:
        leaves = feed.fetch(run.step, run.leaves)
        begun = time.perf_counter()
        run.recorder.step = run.step + 1
        train_step(run, leaves)
        return 1e3 * (time.perf_counter() - begun)

    def profiled(folder: Path) -> list[float]:
        facts = RunFacts(folder, 0, 1, "", "gloo", {}, run.step, 10**6, run.recorder, live=run)
        observer, first = Profiling(facts, run.step + 1, run.step + 3, stack=False), run.step
        times = []
        for number in range(1, 4):
            times.append(step())
            observer.ended(first + number, False)
        return times

    def beside(around: Callable[[Any, int], Any]) -> list[float]:
        with around(run, run.step):
            return [step() for _ in range(3)]

    for _ in range(5):
        step()
    kinds: dict[str, list[float]] = {"without": [], "lines sampled": [], "profiled": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            kinds["without"] += beside(nothing)
            kinds["lines sampled"] += beside(lines)
            kinds["without"] += beside(nothing)
            kinds["profiled"] += profiled(Path(folder))
    base = statistics.median(kinds["without"])
    print(f"{'steps':16} {'ms':>8} {'more':>8}")
    for kind, times in kinds.items():
        middle = statistics.median(times)
        print(f"{kind:16} {middle:8.2f} {100 * (middle / base - 1):7.1f} %", flush=True)
    collected(step, run, rounds)
    feed.close()


def collected(step: Callable[[], float], run: Any, rounds: int) -> None:
    """Steps with Python's own collections, and with collections between steps."""
    print(f"\n{'collections':16} {'ms':>8} {'99 %':>8} {'collecting, ms a step':>22}")
    for every in (0, 1, 10, 100):
        meter, spent, times = HostMeter(), 0.0, []
        held = StepCollections(every)
        count = max(100, 3 * rounds)
        for _ in range(count):
            times.append(step())
            held.stepped(run.step)
            spent += meter.lap(0.0)["gc_s"]
        held.close()
        meter.close()
        name = f"every {every} steps" if every else "Python's own"
        high = statistics.quantiles(times, n=100)[-1]
        print(
            f"{name:16} {statistics.median(times):8.2f} {high:8.2f} {1e3 * spent / count:22.3f}", flush=True
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        text = Path(place, "text.txt")
        text.write_text("to be or not to be, that is the question. " * 2000)
        rows_of(text, asked.width, asked.rounds)
