"""Log-likelihoods and continuations of text, by a language model on one device, as benchmarks ask for them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

_TOGETHER = 16  # windows of equal length that are computed at once
Window = tuple[int, list[int], int]  # (number of the text, tokens, how many of the last are scored)


@dataclass(frozen=True, slots=True)
class TextScorer:
    """A model of tokens, [n, t] → logits [n, t, vocab].

    window: tokens that the model takes. encode: raises UsageError for text that it has no tokens for. start: the tokens
    before a text without context. seed: of draws.
    """

    model: nn.Module
    window: int
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    start: Sequence[int]
    seed: int = 0

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Score (context, continuation) pairs: (log-likelihood in nats, whether each token is the likeliest)."""
        return self._score([self._cut(context, text) for context, text in pairs])

    def whole(self, texts: Sequence[str]) -> list[float]:
        """Log-likelihoods of whole texts, in nats. Each token counts once, with as much context as fits."""
        return [score for score, _ in self._score([([*self.start], self.encode(text)) for text in texts])]

    def _cut(self, context: str, text: str) -> tuple[list[int], list[int]]:
        """Tokens of both. Spaces between them belong to the continuation, as tokenizers have it."""
        bare = context.rstrip(" ")
        whole = self.encode(context + text)
        head = len(self.encode(bare))
        return ([*self.start], whole) if not head else (whole[:head], whole[head:])

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Score (tokens before, tokens) pairs. Windows of equal length go together, so none is padded."""
        sums, likeliest = [0.0] * len(pairs), [True] * len(pairs)
        windows = [window for number, pair in enumerate(pairs) for window in self._windows(number, *pair)]
        device = next(self.model.parameters()).device
        for _, alike in groupby(sorted(windows, key=_length), key=_length):
            same = list(alike)
            for group in (same[i : i + _TOGETHER] for i in range(0, len(same), _TOGETHER)):
                rows = torch.tensor([tokens for _, tokens, _ in group], device=device)
                logits = self.model(rows[:, :-1]).double()
                chances, targets = logits.log_softmax(-1), rows[:, 1:]
                taken = chances.gather(-1, targets[..., None])[..., 0]
                hits = logits.argmax(-1) == targets
                for i, (number, _, scored) in enumerate(group):
                    sums[number] += float(taken[i, -scored:].sum())
                    likeliest[number] &= bool(hits[i, -scored:].all())
        return list(zip(sums, likeliest, strict=True))

    def _windows(self, number: int, before: list[int], tokens: list[int]) -> Iterator[Window]:
        """Windows of at most `window` inputs, in which each of `tokens` is scored once."""
        row, at = [*before, *tokens], len(before)
        while at < len(row):
            end = min(at + self.window, len(row))
            yield number, row[max(0, end - 1 - self.window) : end], end - at
            at = end

    @torch.no_grad()
    def go_on(self, context: str, until: Sequence[str], most: int, temperature: float = 0.0) -> str:
        """Continue a context until one of the texts `until`, which is cut off, or for `most` tokens. temperature: of
        the softmax that is drawn from; the likeliest tokens where it is 0."""
        generator, device = torch.Generator().manual_seed(self.seed), next(self.model.parameters()).device
        tokens, drawn = self.encode(context) or [*self.start], list[int]()
        for _ in range(most):
            row = torch.tensor([[*tokens, *drawn][-self.window :]], device=device)
            logits = self.model(row)[0, -1].float().cpu()
            if temperature:
                drawn.append(
                    int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
                )
            else:
                drawn.append(int(logits.argmax()))
            text = self.decode(drawn)
            ends = [at for stop in until if stop and (at := text.find(stop)) >= 0]
            if ends:
                return text[: min(ends)]
        return self.decode(drawn)


def _length(window: Window) -> int:
    return len(window[1])


def stops_of(options: dict[str, Any]) -> list[str]:
    """The texts at which a task's generation ends."""
    until = options.get("until") or []
    return [until] if isinstance(until, str) else list(until)
