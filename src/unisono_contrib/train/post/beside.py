"""Sequences that are drawn by processes beside the ranks, in the shapes of the trainer's own micro-batches."""

import time
from collections.abc import Callable, Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.observe.metrics import JsonLines
from unisono.train.state.writing import writing
from unisono_contrib.train.post.sampler import HereSampler, Prompt, Rollouts, Sampling
from unisono_contrib.train.samplers.run import RunSamplers
from unisono_contrib.train.samplers.weights import Compute


class BesideSampler:
    """A `Sampler` whose sequences come from other processes. micro: sequences of a micro-batch."""

    def __init__(self, samplers: RunSamplers, how: Sampling, micro: int) -> None:
        self._samplers, self._how, self._micro = samplers, how, micro
        self._version = -1

    def sync(self, version: int) -> None:
        """The run's own weights go out, once for each version. Raises WeightsNotHeld, SamplerLost."""
        if version != self._version:
            self._version = version
            self._samplers.sync(version)

    def generate(self, prompts: Sequence[Prompt], version: int) -> Rollouts:
        """As `Sampler` says."""
        return self.begin(prompts, version, version)()

    def begin(self, prompts: Sequence[Prompt], version: int, step: int) -> Callable[[], Rollouts]:
        """They are drawn while the ranks train."""
        size = lcm(self._micro, self._how.group) // self._how.group
        cuts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        said = {"micro": self._micro, "step": step}
        self._samplers.ask(step, [(said, _as_tensors(cut)) for cut in cuts])
        return lambda: self._taken(step)

    def close(self) -> None:
        """Processes wait for the next one that calls."""
        self._samplers.close()

    def _taken(self, step: int) -> Rollouts:
        drawn = self._samplers.collect(step)
        parts = (torch.cat(each).cpu() for each in zip(*(answer.tensors for answer in drawn), strict=True))
        return Rollouts(*parts, version=min(answer.version for answer in drawn))


class MicroBatches:
    """A whole model as `HereSampler` calls one: so many sequences in each forward."""

    def __init__(self, compute: Compute, micro: int, device: torch.device) -> None:
        self._compute, self._micro, self.device = compute, micro, device

    @torch.no_grad()
    def __call__(self, inputs: Tensor, at: Tensor) -> Tensor:
        """Tokens [n, T], one position of each [n] → logits [n, V]."""
        parts = zip(inputs.split(self._micro), at.split(self._micro), strict=True)
        logits = [
            self._compute(rows)[torch.arange(len(rows), device=rows.device), where] for rows, where in parts
        ]
        whole = torch.cat(logits)
        return whole.to(torch.promote_types(whole.dtype, torch.float32))


class DrawnLog:
    """A file of JSON lines in which a sampler says of each request what it has drawn, before the ranks hear of it:
    which step asked, the prompts' numbers, the tokens drawn for each member of their groups, and when. The next process
    in a lost sampler's place goes on with it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, step: int, prompts: Sequence[Prompt], rollouts: Rollouts) -> None:
        """Raises UsageError O01 where nothing can be written."""
        lengths = (rollouts.ends - rollouts.begins).tolist()
        numbers = [prompt.number for prompt in prompts]
        line = {"step": step + 1, "at": round(time.time(), 3), "prompts": numbers, "lengths": lengths}
        with writing(self._path.parent), JsonLines(self._path) as lines:
            lines.write(line)


def draw_asked(
    how: Sampling, log: DrawnLog, compute: Compute, said: Mapping[str, Any], tensors: Sequence[Tensor]
) -> Sequence[Tensor]:
    """In a sampler: what it answers to one request."""
    numbers, lengths, tokens = tensors
    rows = (row.tolist() for row in tokens.split(lengths.tolist()))
    prompts = [Prompt(number, row) for number, row in zip(numbers.tolist(), rows, strict=True)]
    model = MicroBatches(compute, int(said["micro"]), torch.device("cpu"))
    rollouts = HereSampler(model, how).generate(prompts, 0)
    log.note(int(said["step"]), prompts, rollouts)
    return rollouts[:4]


def _as_tensors(prompts: Sequence[Prompt]) -> list[Tensor]:
    """Numbers, lengths, and all tokens one after the other."""
    return [
        torch.tensor([prompt.number for prompt in prompts]),
        torch.tensor([len(prompt.tokens) for prompt in prompts]),
        torch.tensor([token for prompt in prompts for token in prompt.tokens]),
    ]
