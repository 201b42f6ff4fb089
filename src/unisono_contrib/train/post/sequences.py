"""The documents of a data set one by one, as a step of post-training takes them: a prompt for each group, or a pair."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unisono.comm.device import numbered
from unisono.spec.errors import UsageError
from unisono.spec.training import IGNORED
from unisono.train.data.dataset import Dataset, Thinned, require_samples
from unisono.train.data.feed import Feed, Micro
from unisono.train.data.order import samples_at
from unisono.train.data.packing import PackedWindows


class Question(NamedTuple):
    """What stands before the first answer of a document, and the tokens of that answer."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class AnswerDocuments:
    """Documents of which answers count, one a window; pairs: each two belong together."""

    windows: PackedWindows
    pairs: bool

    @classmethod
    def of(cls, dataset: Dataset, pairs: bool, origin: str) -> "AnswerDocuments":
        """From windows of any packing. Raises UsageError D21 where nobody knows what is an answer, D22 where documents
        are no pairs."""
        while isinstance(dataset, Thinned):  # a prompt is known by its place in the whole data
            dataset = dataset.inner
        if not isinstance(dataset, PackedWindows) or dataset.marks is None:
            raise UsageError(
                "the data does not say which of its tokens are an answer",
                where=origin,
                fix='data.source = "sums", or "jsonl:FILE" of prompts with completions or of chats, not streamed',
                code="D21",
            )
        count = len(dataset.pieces.size)
        alone = replace(
            dataset, order=np.arange(count), begins=np.arange(count + 1), sums=dataset.pieces.counted, several=False
        )  # fmt: skip
        if pairs and count % 2:
            raise UsageError(
                f"the data has {count:,} documents, which are no pairs of a chosen and a rejected answer",
                where=origin,
                fix="one record with the chosen answer, then one with the rejected answer to the same prompt",
                code="D22",
            )
        return cls(alone, pairs)

    def __len__(self) -> int:
        """Prompts, or pairs."""
        return len(self.windows) // (1 + self.pairs)

    def question(self, number: int) -> Question:
        """The prompt of this number, with its answer."""
        inputs, targets = (row[0].tolist() for row in self.windows.fetch(np.array([number])))
        first = next(i for i, target in enumerate(targets) if target != IGNORED)
        after = next((i for i in range(first, len(targets)) if targets[i] == IGNORED), len(targets))
        return Question(inputs[: first + 1], targets[first:after])

    def rows(self, numbers: np.ndarray, group: int) -> np.ndarray:
        """The windows of a step: of each prompt `group` times its own, of each pair both."""
        if self.pairs:
            return np.stack((2 * numbers, 2 * numbers + 1), 1).reshape(-1)
        return np.repeat(numbers, group)

    def check_pairs(self, origin: str) -> None:
        """Raises UsageError D22 for a pair whose prompts differ."""
        for number in range(len(self)):
            chosen, rejected = (self.question(2 * number + i).prompt for i in range(2))
            if chosen != rejected:
                raise UsageError(
                    f"records {2 * number + 1} and {2 * number + 2} are a pair with two prompts",
                    where=origin,
                    fix="the chosen answer, then the rejected answer, to the same prompt",
                    code="D22",
                )


class Sequences(Feed):
    """Steps of `global_batch` sequences, a group of each prompt side by side, in leaves of `micro_batch` of them. Which
    prompts a step has depends on nothing but the seed and its number. Raises UsageError D05 for too few."""

    def __init__(
        self,
        documents: AnswerDocuments,
        seed: int,
        global_batch: int,
        group: int,
        micro_batch: int,
        device: torch.device | str = "cpu",
        origin: str = "",
    ) -> None:
        require_samples(len(documents), global_batch // group, origin)
        self.documents, self.global_batch, self.group, self.micro_batch = (
            documents,
            global_batch,
            group,
            micro_batch,
        )
        self._seed, self._device = seed, numbered(torch.device(device))

    def positions(self, step: int) -> np.ndarray:
        """Positions of the step's prompts in the run's order, int64."""
        prompts = self.global_batch // self.group
        return step * prompts + np.arange(prompts, dtype=np.int64)

    def numbers(self, step: int) -> np.ndarray:
        """Which prompts, or pairs, those are, int64."""
        return samples_at(self._seed, self.positions(step), len(self.documents))

    def fetch(self, step: int, leaves: range) -> list[Micro]:
        rows = self.documents.rows(self.numbers(step), self.group)
        inputs, targets = (x.to(self._device) for x in self.documents.windows.fetch(rows))
        samples = torch.arange(self.global_batch, device=self._device) + step * self.global_batch
        cut = [slice(leaf * self.micro_batch, (leaf + 1) * self.micro_batch) for leaf in leaves]
        return [Micro(inputs[part], targets[part], samples[part]) for part in cut]

    def count(self, step: int) -> int:
        return self.global_batch // self.micro_batch

    def samples_of(self, step: int, leaf: int) -> list[int]:
        rows = self.documents.rows(self.numbers(step), self.group)
        return rows[leaf * self.micro_batch : (leaf + 1) * self.micro_batch].tolist()

    def samples_before(self, step: int) -> int:
        return step * self.global_batch


@dataclass(frozen=True, slots=True)
class PostLeaf:
    """A micro-batch of post-training, as `parallel.player.Leaf` says. lengths: int64 [m], inputs of each sequence that
    matter. by_token: [m, T] each, what the loss is to know of each target. by_sequence: [m] each."""

    inputs: Tensor
    targets: Tensor
    samples: Tensor
    scale: float
    lengths: Tensor
    by_token: dict[str, Tensor]
    by_sequence: dict[str, Tensor]
    documents: Tensor | None = None

    @property
    def counted(self) -> Tensor:
        """int64 [m], on the CPU: targets of each sequence that the loss counts."""
        counts = self.targets != IGNORED
        if self.documents is None:
            return counts.sum(1).cpu()
        return torch.bincount(self.documents[counts].cpu(), minlength=len(self.lengths))

    def packed(self, fixed: bool) -> "PostLeaf":
        """The same sequences, several in a row, in their order. fixed: as many rows as before, the last ones empty."""
        window, places, row, at = self.inputs.shape[1], list[tuple[int, int]](), 0, 0
        for length in self.lengths.tolist():
            if at + length > window:
                row, at = row + 1, 0
            places.append((row, at))
            at += length
        rows = len(self.inputs) if fixed else row + 1
        targets = torch.full_like(self.targets[:1], IGNORED).repeat(rows, 1)
        inputs = torch.zeros_like(targets)
        documents = torch.full_like(inputs, len(places))  # padding is one by itself
        by_token = {name: x.new_zeros((rows, window)) for name, x in self.by_token.items()}
        for number, ((row, at), length) in enumerate(zip(places, self.lengths.tolist(), strict=True)):
            here = row, slice(at, at + length)
            documents[here] = number
            inputs[here], targets[here] = self.inputs[number, :length], self.targets[number, :length]
            for name, x in by_token.items():
                x[here] = self.by_token[name][number, :length]
        samples = self.samples[:rows]
        return replace(
            self, inputs=inputs, targets=targets, samples=samples, documents=documents, by_token=by_token
        )
