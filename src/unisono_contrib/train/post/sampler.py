"""Who draws sequences: a role with weights of a version. Here the one that samples with the run's own weights.

Shapes: n sequences, T positions of a window, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from unisono_contrib.train.post.draw import draw, log_probs, uniforms


class Prompt(NamedTuple):
    """number: its position in the run's order, unique over steps. tokens: at least one."""

    number: int
    tokens: list[int]


class Rollouts(NamedTuple):
    """Sequences of a group for each prompt, prompt by prompt. tokens: int64 [n, T], the prompt, what was drawn, zeros.
    begins, ends: int64 [n], tokens of the prompt, and of all. logprobs: [n, T], at each drawn token that of it after
    those before; 0 elsewhere. version: updates that the weights had seen by which it was drawn."""

    tokens: Tensor
    begins: Tensor
    ends: Tensor
    logprobs: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How sequences are drawn. group: of each prompt. end: the token that ends one. window: positions of a forward,
    always as many, so that a sequence is computed in one shape wherever it is."""

    group: int
    temperature: float
    max_new_tokens: int
    end: int
    seed: int
    window: int


class Sampler(Protocol):
    """Draws sequences by weights that it was handed."""

    def sync(self, version: int) -> None:
        """Draw by the run's weights of now, which have seen `version` updates. Every rank calls it."""
        ...

    def generate(self, prompts: Sequence[Prompt], version: int) -> Rollouts:
        """A group for each of these prompts. Every rank calls it with the same ones, or it hangs."""
        ...

    def begin(self, prompts: Sequence[Prompt], version: int, step: int) -> Callable[[], Rollouts]:
        """As `generate`, of sequences that `step` will train: they may be drawn until what is returned is called."""
        ...

    def close(self) -> None:
        """Another one takes its place."""
        ...


class Logits(Protocol):
    """Tokens [n, T] and one position of each [n] → the logits there, [n, V]."""

    device: torch.device

    def __call__(self, inputs: Tensor, at: Tensor) -> Tensor: ...


class HereSampler:
    """Samples with the run's own weights, under its plan, in the shapes of its own micro-batches: so its
    log-probabilities have the bits of the trainer's. It has nothing to take over."""

    def __init__(self, model: Logits, how: Sampling) -> None:
        self._model, self._how = model, how

    def sync(self, version: int) -> None:
        """It has no others."""

    def generate(self, prompts: Sequence[Prompt], version: int) -> Rollouts:
        """As `Sampler` says; prompts × group are the global batch."""
        how, device = self._how, self._model.device
        begins = torch.tensor([len(prompt.tokens) for prompt in prompts]).repeat_interleave(how.group)
        rows = torch.zeros(len(prompts), how.window, dtype=torch.int64)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt.tokens)] = torch.tensor(prompt.tokens)
        tokens, ends = rows.repeat_interleave(how.group, 0).to(device), begins.clone()
        numbers = np.repeat([prompt.number for prompt in prompts], how.group)
        members = np.tile(np.arange(how.group), len(prompts))
        logprobs: Tensor | None = None
        going = (ends < how.window) & (ends - begins < how.max_new_tokens)
        while bool(going.any()):
            logits = self._model(tokens, at=(ends - 1).to(device))
            drawn = draw(logits, uniforms(how.seed, numbers, members, ends.numpy()), how.temperature)
            each = log_probs(logits, drawn, how.temperature)
            if logprobs is None:
                logprobs = each.new_zeros(tokens.shape)
            here = going.nonzero().squeeze(-1)
            at = here.to(device), ends[here].to(device)
            tokens[at], logprobs[at] = drawn[at[0]], each[at[0]]
            ends[here] += 1
            going &= (drawn != how.end).cpu() & (ends < how.window) & (ends - begins < how.max_new_tokens)
        if logprobs is None:
            logprobs = torch.zeros(tokens.shape, device=device)
        return Rollouts(tokens.cpu(), begins, ends, logprobs.cpu(), version)

    def begin(self, prompts: Sequence[Prompt], version: int, step: int) -> Callable[[], Rollouts]:
        """Drawn at once: the ranks themselves draw."""
        rollouts = self.generate(prompts, version)
        return lambda: rollouts

    def close(self) -> None:
        """It holds nothing."""
