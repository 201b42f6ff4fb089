"""What a step of post-training is built of: drawn sequences with rewards, pairs with their reference, or answers.

Shapes: B sequences of a step, T positions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.parallel.player import Leaf, Player
from unisono.spec.errors import UsageError
from unisono.spec.training import IGNORED
from unisono.train.step.run import Run
from unisono_contrib.config.sections.post import PostConfig
from unisono_contrib.train.post.player import LossDesk
from unisono_contrib.train.post.rewards import advantages
from unisono_contrib.train.post.sampler import Prompt, Rollouts, Sampler
from unisono_contrib.train.post.sequences import PostLeaf, Question, Sequences

Pack = Callable[[list[PostLeaf]], list[PostLeaf]]
"""Lays sequences of each micro-batch into as few windows as they fit in, or leaves them."""


class DrawnBatch(NamedTuple):
    """The sequences of a step, and the reward of each, float64 [B]."""

    rollouts: Rollouts
    rewards: Tensor


class Drawing:
    """GRPO: sequences are drawn `max_staleness` steps before they are trained on, no further, and none is left out.

    sampler: of a live run. reward: of a question and what was drawn. heard(step, batch): of each batch that is trained.
    lengths: of this rank's leaves of the last step, how many sequences have 0, 1, 2 ... tokens that the loss counts.
    """

    def __init__(
        self,
        section: PostConfig,
        sequences: Sequences,
        reward: Callable[[Question, list[int]], float],
        desk: LossDesk,
        steps: int,
        heard: Callable[[int, DrawnBatch], None] = lambda step, batch: None,
    ) -> None:
        self._how, self._sequences, self._reward, self._desk = section, sequences, reward, desk
        self._steps, self.heard = steps, heard
        self._queue: dict[int, Callable[[], DrawnBatch]] = {}
        self.sampler: Sampler | None = None
        self._says: dict[str, float] = {}
        self.lengths = torch.zeros(section.max_new_tokens + 1, dtype=torch.float64)

    @property
    def micro_batch(self) -> int:
        """Sequences of a leaf."""
        return self._sequences.micro_batch

    def rejoined(self, sampler: Sampler) -> None:
        """The ranks have met, with this sampler. A new process knows of no sequences that others have, so that all ask
        for them anew."""
        if self.sampler is not None:
            self.sampler.close()
        self.sampler = sampler
        self._queue.clear()

    def leaves(self, run: Run, player: Player, leaves: Sequence[Leaf], pack: Pack) -> list[PostLeaf]:
        """The sequences that stand in the places of these leaves. Every rank calls it, or it hangs."""
        step, how = run.step, self._how
        self._says = {}
        self.lengths.zero_()
        if step < how.sft_steps:
            return pack(_answers(leaves, self._sequences, step))
        batch = self._batch(run, step)
        built = pack(self._trained(run, batch, leaves))
        if how.kl > 0.0:
            self._desk.references = self._desk.known(run, player, built)
        for leaf in built if _counts(run) else ():
            self.lengths += torch.bincount(leaf.counted, minlength=len(self.lengths))
        self.heard(step, batch)
        drawn = (batch.rollouts.ends - batch.rollouts.begins).double()
        self._says = {
            "reward": float(batch.rewards.mean()),
            "staleness": float(step - batch.rollouts.version),
            "drawn_tokens": float(drawn.mean()),
        }
        return built

    def says(self, measured: Mapping[str, float], lengths: Sequence[float]) -> Mapping[str, Any]:
        """What there is to tell of the last step. measured, lengths: summed over all ranks."""
        if not self._says:
            return {}
        tokens = max(1.0, measured["tokens"])
        return {
            **self._says,
            "kl_sampler": measured["kl"] / tokens,
            "logprob_gap": measured["apart"] / tokens,
            "truncated_share": measured["truncated"] / tokens,
            "lengths": {str(length): int(count) for length, count in enumerate(lengths) if count},
        }

    def _batch(self, run: Run, step: int) -> DrawnBatch:
        """The batch of this step. Those after it that the bound admits begin too, and no others."""
        last = max(step, min(step + self._how.max_staleness, self._steps - 1))
        for number in range(step, last + 1):
            if number not in self._queue:
                self._queue[number] = self._begun(run, number, step)
        for past in [number for number in self._queue if number < step]:
            del self._queue[past]
        batch = self._queue[step]()
        self._queue[step] = lambda: batch  # for a step that is played again
        return batch

    def _begun(self, run: Run, number: int, version: int) -> Callable[[], DrawnBatch]:
        sequences = self._sequences
        questions = [sequences.documents.question(n) for n in sequences.numbers(number).tolist()]
        places = sequences.positions(number).tolist()
        prompts = [Prompt(place, question.prompt) for place, question in zip(places, questions, strict=True)]
        if self.sampler is None:
            raise RuntimeError("no run has been joined yet")
        self.sampler.sync(version)
        begun = self.sampler.begin(prompts, version, number)
        return lambda: self._drawn(run, questions, begun())

    def _drawn(self, run: Run, questions: Sequence[Question], rollouts: Rollouts) -> DrawnBatch:
        if bool((rollouts.ends == rollouts.begins).any()):
            window = rollouts.tokens.shape[1]
            raise UsageError(
                f"a prompt fills the window of {window} tokens, and leaves no room for an answer",
                where="model.context, data.source",
                fix="a larger model.context, or shorter prompts",
                code="D21",
            )
        return DrawnBatch(rollouts, self._rewards(run, questions, rollouts, self._how.group))

    def _rewards(self, run: Run, questions: Sequence[Question], rollouts: Rollouts, group: int) -> Tensor:
        """Each rank judges the sequences of its own leaves, and all hear of all."""
        rewards = torch.zeros(len(rollouts.tokens), dtype=torch.float64)
        size = self._sequences.micro_batch
        for leaf in run.leaves if _counts(run) else ():
            for row in range(leaf * size, (leaf + 1) * size):
                begin, end = int(rollouts.begins[row]), int(rollouts.ends[row])
                rewards[row] = self._reward(questions[row // group], rollouts.tokens[row, begin:end].tolist())
        return run.mesh.world.all_reduce(rewards.to(run.local.device)).cpu()

    def _trained(self, run: Run, batch: DrawnBatch, leaves: Sequence[Leaf]) -> list[PostLeaf]:
        tokens, begins, ends, logprobs, _ = batch.rollouts
        window, size = tokens.shape[1], tokens.shape[0]
        at = torch.arange(window)
        counted = (at >= begins[:, None] - 1) & (at < ends[:, None] - 1)
        following = torch.cat((tokens[:, 1:], torch.zeros(size, 1, dtype=torch.int64)), 1)
        targets = torch.where(counted, following, IGNORED)
        each = (ends - begins).double()
        weight = torch.ones_like(each) if self._how.over == "tokens" else 1.0 / each
        advantage = advantages(batch.rewards, self._how.group, self._how.advantage == "std")
        sampled = torch.cat((logprobs[:, 1:], torch.zeros(size, 1, dtype=logprobs.dtype)), 1)
        by_token = {
            "weight": weight[:, None].expand(-1, window),
            "advantage": advantage[:, None].expand(-1, window),
            "sampled": sampled,
        }
        scale = size * window / float((weight * each).sum())
        return _cut(leaves, run.step, tokens, targets, ends - 1, by_token, scale)


class Preferring:
    """DPO: pairs with what the first weights gave both, which is computed once, at a start."""

    def __init__(self, sequences: Sequences, desk: LossDesk) -> None:
        self._sequences, self._desk = sequences, desk
        self._table: Tensor | None = None
        self.lengths = torch.zeros(0, dtype=torch.float64)  # nothing is drawn

    def leaves(self, run: Run, player: Player, leaves: Sequence[Leaf], pack: Pack) -> list[PostLeaf]:
        """The pairs of these leaves. Every rank calls it, or it hangs."""
        if self._table is None:
            self._table = self._references(run, player, pack)
        sequences, step = self._sequences, run.step
        rows = sequences.documents.rows(sequences.numbers(step), 2)
        return pack(self._pairs(leaves, step, self._table[torch.from_numpy(rows)]))

    def says(self, measured: Mapping[str, float], lengths: Sequence[float]) -> Mapping[str, float]:
        """Share of pairs whose chosen answer has gained more, and by how much, times beta."""
        pairs = max(1.0, measured["pairs"])
        return {"preferred_share": measured["right"] / pairs, "margin": measured["margin"] / pairs}

    def _pairs(self, leaves: Sequence[Leaf], step: int, reference: Tensor) -> list[PostLeaf]:
        """reference: [B]."""
        sequences = self._sequences
        size, window = sequences.global_batch, leaves[0].inputs.shape[1]
        built = _answers(leaves, sequences, step, size * window / (size // 2))
        for leaf in built:
            first = int(leaf.samples[0]) - step * size
            m = len(leaf.lengths)
            leaf.by_token["sequence"] = torch.arange(m)[:, None].expand(-1, window).to(leaf.inputs.device)
            leaf.by_sequence["reference"] = reference[first : first + m].to(leaf.inputs.device)
        return built

    def _references(self, run: Run, player: Player, pack: Pack) -> Tensor:
        """[sequences of the data], float64: of each the reference's log-probability."""
        sequences, documents = self._sequences, self._sequences.documents
        table = torch.zeros(2 * len(documents), dtype=torch.float64, device=run.local.device)
        size, m = sequences.global_batch, sequences.micro_batch
        for first in range(0, len(table), size):
            rows = torch.arange(first, first + size)
            inputs, targets = documents.windows.fetch((rows % len(table)).numpy())
            inputs, targets = inputs.to(table.device), targets.to(table.device)
            cut = [slice(leaf * m, (leaf + 1) * m) for leaf in run.leaves]
            questions = [_Rows(inputs[part], targets[part], rows[part] - first) for part in cut]
            known = self._desk.known(run, player, pack(self._pairs(questions, 0, torch.zeros(size))))
            for micro, sums in known.items() if run.mesh.tp.index == 0 else ():
                there = rows[cut[micro]]
                inside = there < len(table)
                table[there[inside].to(table.device)] = sums.double()[inside.to(table.device)]
        return run.mesh.world.all_reduce(table).cpu()


def _counts(run: Run) -> bool:
    """Whether this rank counts what it has of a leaf: other ranks of its replica have the same leaves."""
    return all(run.mesh.at[axis] == 0 for axis in ("pp", "cp", "tp"))


class Answering:
    """SFT: the data's own answers, a document a sequence. Their loss is the run's own."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences

    def leaves(self, run: Run, player: Player, leaves: Sequence[Leaf], pack: Pack) -> list[PostLeaf]:
        """The documents of these leaves."""
        return pack(_answers(leaves, self._sequences, run.step))


class _Rows(NamedTuple):
    """A leaf without documents."""

    inputs: Tensor
    targets: Tensor
    samples: Tensor
    documents: None = None
    scale: float = 1.0


def _answers(
    leaves: Sequence[Leaf], sequences: Sequences, step: int, scale: float | None = None
) -> list[PostLeaf]:
    """The data's own answers. scale: such that the loss is a mean over those of the global batch, if absent."""
    if scale is None:
        rows = sequences.documents.rows(sequences.numbers(step), sequences.group)
        window = leaves[0].inputs.shape[1]
        scale = len(rows) * window / float(sequences.documents.windows.counted(rows).sum())
    built = list[PostLeaf]()
    for leaf in leaves:
        counted, window = leaf.targets != IGNORED, leaf.targets.shape[1]
        places = torch.arange(1, window + 1, device=counted.device)
        lengths = torch.where(counted, places, 0).amax(1)
        weight = torch.ones(counted.shape, dtype=torch.float64, device=counted.device)
        built.append(
            PostLeaf(leaf.inputs, leaf.targets, leaf.samples, scale, lengths, {"weight": weight}, {})
        )
    return built


def _cut(
    leaves: Sequence[Leaf],
    step: int,
    tokens: Tensor,
    targets: Tensor,
    lengths: Tensor,
    by_token: Mapping[str, Tensor],
    scale: float,
) -> list[PostLeaf]:
    """The sequences of a step, [B, T], in the places of these leaves."""
    built, size = list[PostLeaf](), len(tokens)
    for leaf in leaves:
        rows, device = (leaf.samples - step * size).cpu(), leaf.inputs.device
        each = {name: x[rows].to(device) for name, x in by_token.items()}
        inputs, wanted, length = (x[rows].to(device) for x in (tokens, targets, lengths))
        built.append(PostLeaf(inputs, wanted, leaf.samples, scale, length, each, {}))
    return built
