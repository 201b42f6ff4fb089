"""Whole training steps of the program that `train` plays, and where their time goes."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from unisono.config import ModelConfig, Recipe, resolve
from unisono.observe.memory import peak_rss_mib
from unisono.observe.span import PARTS, Recorder
from unisono.spec.model import Facts
from unisono.train.build.build import Place, build, feeds
from unisono.train.data.dataset import Corpus, Images, TokenWindows
from unisono.train.step.train_step import train

_ENDLESS = 1 << 40  # steps: as many as are asked for, whatever the recipe says


@dataclass(frozen=True, slots=True)
class StepTimes:
    """laps: seconds of each step by part, and `step` for the whole. calls: (operation, bytes that this rank sent,
    seconds) of every collective that the step waited for."""

    laps: list[dict[str, float]]
    calls: list[tuple[str, int, float]]

    @property
    def medians(self) -> dict[str, float]:
        return {part: statistics.median(one[part] for one in self.laps) for part in self.laps[0]}

    @property
    def quiet(self) -> dict[str, float]:
        """The lower quartile of every part: what the machine does while nothing else disturbs it."""
        return {part: statistics.quantiles([one[part] for one in self.laps], n=4)[0] for part in self.laps[0]}


def corpus(model: ModelConfig, samples: int = 1024) -> Corpus:
    """Tokens, or pictures, without sense: what they are changes no time."""
    sizes, draw = model.sized(Facts(vocab=256)), np.random.default_rng(0)
    if sizes.sample_shape and sizes.classes:
        inputs = torch.from_numpy(draw.random((samples, *sizes.sample_shape), dtype=np.float32))
        images = Images(inputs, torch.from_numpy(draw.integers(0, sizes.classes, samples)))
        return Corpus(images, images, None, sizes.classes, sizes.sample_shape, None, None, "made up")
    vocab, context = sizes.vocab or 256, model.window
    tokens = draw.integers(0, vocab, samples * context + 1).astype(np.int32)
    windows = TokenWindows(tokens, context)
    return Corpus(windows, windows, vocab, vocab, (context,), None, None, "made up")


def play(
    given: Recipe,
    plan: str,
    place: Place,
    agree: Callable[[float], float],
    least: float = 0.7,
    fewest: int = 5,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> StepTimes:
    """Steps for about `least` seconds, `fewest` to 100 of them, after half as many that do not count: in a new process
    the first ones take up to twice as long. agree(number) is the greatest of what all ranks give, who wait for each
    other. clock: in nanoseconds.
    """
    resolved = resolve(given, plan, place.world)
    data = corpus(given.model)
    recorder = Recorder(place.rank, clock)
    run = build(resolved.recipe, resolved.plan, place, data, recorder)
    feed, _ = feeds(resolved.recipe, resolved.plan, data, place.device)
    playing = train(run, feed, _ENDLESS)

    def lap() -> dict[str, float]:
        recorder.lap()
        begun = clock()
        next(playing)
        seconds = (clock() - begun) * 1e-9
        parts = recorder.lap().seconds
        return {**{part: parts.get(part, 0.0) for part in PARTS}, "step": seconds}

    lap()
    count = round(min(100.0, max(float(fewest), least / agree(lap()["step"]))))
    for _ in range(count // 2):
        lap()
    agree(0.0)
    recorder.keep = True
    laps = [lap() for _ in range(count)]
    feed.close()
    calls = [
        (span.tags["op"], int(span.tags["bytes"]), (span.stop_ns - span.start_ns) * 1e-9)
        for span in recorder.take()
        if span.kind == "comm" and "bytes" in span.tags
    ]
    return StepTimes(laps, calls)


def means(calls: Sequence[tuple[str, int, float]]) -> list[tuple[str, int, float]]:
    """(operation, bytes, seconds), one line for each operation and size: the mean, since a step waits for all of them,
    without the slowest tenth, in which another program used the CPU."""
    groups: dict[tuple[str, int], list[float]] = {}
    for op, nbytes, seconds in calls:
        groups.setdefault((op, nbytes), []).append(seconds)
    return [
        (op, nbytes, statistics.fmean(sorted(took)[: max(1, len(took) * 9 // 10)]))
        for (op, nbytes), took in sorted(groups.items())
    ]


def resident() -> float:
    """Peak of this rank's memory so far, in bytes."""
    gc.collect()
    return peak_rss_mib() * 2**20
