"""Whole training steps of the program that `train` plays, timed by part."""

import gc
import statistics
import time
from collections.abc import Callable

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


def corpus(model: ModelConfig) -> Corpus:
    """Tokens, or pictures, without sense: what they are changes no time."""
    samples = 1024
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
    recipe: Recipe,
    plan: str,
    place: Place,
    largest_of_all: Callable[[float], float],
    least: float = 0.7,
    fewest: int = 5,
) -> dict[str, float]:
    """Play steps for about `least` seconds, `fewest` to 100 of them. Return the medians of their seconds, by part, and
    as `step` of the whole.

    Half as many steps come before and do not count: in a new process the first ones take up to twice as long.
    largest_of_all(number): the greatest of the numbers that all ranks give, who wait for each other.
    """
    resolved = resolve(recipe, plan, place.world)
    data = corpus(recipe.model)
    recorder = Recorder(place.rank)
    run = build(resolved.recipe, resolved.plan, place, data, recorder)
    feed, _ = feeds(resolved.recipe, resolved.plan, data, place.device, kept=run.update.keeps)
    playing = train(run, feed, _ENDLESS)

    def lap() -> dict[str, float]:
        recorder.lap()
        begun = time.perf_counter_ns()
        next(playing)
        seconds = (time.perf_counter_ns() - begun) * 1e-9
        parts = recorder.lap().seconds
        return {**{part: parts.get(part, 0.0) for part in PARTS}, "step": seconds}

    lap()
    count = round(min(100.0, max(float(fewest), least / largest_of_all(lap()["step"]))))
    for _ in range(count // 2):
        lap()
    largest_of_all(0.0)
    laps = [lap() for _ in range(count)]
    feed.close()
    return {part: statistics.median(seconds_by_part[part] for seconds_by_part in laps) for part in laps[0]}


def resident() -> float:
    """Peak of this rank's memory so far, in bytes."""
    gc.collect()
    return peak_rss_mib() * 2**20
