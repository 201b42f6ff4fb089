"""What `[post]` of a recipe changes of a run: its batches, its player, its loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.config import Recipe
from unisono.parallel.player import Leaf, Player
from unisono.plan import Plan
from unisono.sync import POLICIES, Verdict
from unisono.train.data.dataset import Corpus, Dataset
from unisono.train.data.packing import PackedWindows
from unisono.train.step.played_model import PlayedModel
from unisono.train.step.run import Run
from unisono_contrib.config.sections.post import PostConfig
from unisono_contrib.train.build.ema import copies_of
from unisono_contrib.train.post.beside import BesideSampler, DrawnLog, draw_asked
from unisono_contrib.train.post.losses import PolicyLoss, PreferenceLoss
from unisono_contrib.train.post.player import LossDesk, PostPlayer
from unisono_contrib.train.post.rewards import rewards_of
from unisono_contrib.train.post.sampler import HereSampler, Sampler, Sampling
from unisono_contrib.train.post.sequences import AnswerDocuments, PostLeaf, Sequences
from unisono_contrib.train.post.work import Answering, Drawing, Preferring
from unisono_contrib.train.samplers.process import Draws
from unisono_contrib.train.samplers.run import RunSamplers
from unisono_contrib.train.samplers.weights import holder_of


def batches(
    section: PostConfig,
    recipe: Recipe,
    plan: Plan,
    dataset: Dataset,
    device: torch.device,
    kept: Mapping[str, Tensor],
) -> Sequences:
    """Sequences by groups. Raises UsageError D05, D21, D22."""
    return sequences_of(section, recipe, plan, dataset, device)


def sequences_of(
    section: PostConfig, recipe: Recipe, plan: Plan, dataset: Dataset, device: torch.device
) -> Sequences:
    """The sequences of each step. Where sums over leaves are to have the same bits however ranks divide them, a leaf is
    one group, whatever the micro-batch. Raises UsageError D05, D21, D22."""
    train, pairs = recipe.train, section.kind == "dpo"
    documents = AnswerDocuments.of(dataset, pairs, recipe.data.source)
    micro = section.sequences if POLICIES.read(plan.sync).leafwise else train.micro_batch or 1
    return Sequences(
        documents, recipe.seed, train.global_batch, section.sequences, micro, device, recipe.data.source
    )


def around(section: PostConfig, recipe: Recipe, corpus: Corpus) -> Callable[[Run], Run]:
    """The run plays sequences in the place of documents. Raises UsageError C03, C06, D05, D21, D22."""
    return PostTraining(section, recipe, corpus).attach


class PostTraining:
    """All of it that outlives a change of members."""

    def __init__(self, section: PostConfig, recipe: Recipe, corpus: Corpus) -> None:
        self.section, self.recipe, self.corpus = section, recipe, corpus
        preferring = section.kind == "dpo"
        loss = PreferenceLoss(section) if preferring else PolicyLoss(section)
        self.desk = LossDesk(loss, 1.0 if preferring else section.temperature)
        self.work: Drawing | Preferring | Answering | None = None
        self._first: dict[str, Tensor] = {}

    def attach(self, run: Run) -> Run:
        """Called when the run's ranks have met, each time."""
        if self.work is None:
            self.work = self._work(run)
            if self.section.refers:
                self._first, _ = copies_of(run)
        if isinstance(self.work, Drawing):
            self.work.rejoined(self._sampler(run, self.work.micro_batch))
        run.player = PostPlayer(
            run.player, self.desk, lambda player, leaves: self._leaves(run, player, leaves)
        )
        if isinstance(self.work, Answering):
            return run
        self.desk.attach(run)
        averages = self._first if self.section.refers else run.update.averages
        tell = lambda verdict: self._tell(run, verdict)
        run.update = replace(run.update, averages=averages, after=(*run.update.after, tell))
        return run

    def _work(self, run: Run) -> Drawing | Preferring | Answering:
        section, recipe, corpus = self.section, self.recipe, self.corpus
        sequences = sequences_of(section, recipe, run.replica.plan, corpus.train, run.local.device)
        if section.kind == "sft":
            return Answering(sequences)
        if section.kind == "dpo":
            sequences.documents.check_pairs(recipe.data.source)
            return Preferring(sequences, self.desk)
        reward = rewards_of(section.reward, corpus.decode)
        return Drawing(section, sequences, reward, self.desk, recipe.train.steps)

    def _sampler(self, run: Run, micro_batch: int) -> Sampler:
        """Of these ranks, or of processes beside them; where none can stand there, as in a proof, it makes no
        difference."""
        section, how = self.section, sampling_of(self.section, self.recipe, self.corpus)
        if not section.samplers or run.replica.beside is None:
            wide = torch.promote_types(run.replica.dtype, torch.float32)
            return HereSampler(PlayedModel(run, self.corpus, wide, run.player), how)
        holder = lambda: holder_of(self.recipe, self.corpus, run.replica.dtype)
        samplers = RunSamplers(run, section.samplers, section.max_staleness, holder)
        return BesideSampler(samplers, how, micro_batch)

    def _leaves(self, run: Run, player: Player, leaves: Sequence[Leaf]) -> Sequence[PostLeaf]:
        """Packed where the recipe packs documents; a pipeline's messages have one size."""
        if self.work is None:
            raise RuntimeError("no run has been joined yet")
        plan, data = run.replica.plan, self.corpus.train
        several = isinstance(data, PackedWindows) and data.several and not POLICIES.read(plan.sync).leafwise
        pack = lambda built: [leaf.packed(fixed=plan.pp > 1) for leaf in built] if several else built
        return self.work.leaves(run, player, leaves, pack)

    def _tell(self, run: Run, verdict: Verdict) -> Mapping[str, Any]:
        """After an update, on every rank."""
        if self.work is None or isinstance(self.work, Answering):
            return {}
        sums = torch.cat((self.desk.measured, self.work.lengths.to(self.desk.measured.device)))
        measures, sums = self.desk.loss.measures, run.mesh.world.all_reduce(sums).tolist()
        measured = dict(zip(measures, sums, strict=False))
        return self.work.says(measured, sums[len(measures) :])


def draws(section: PostConfig, recipe: Recipe, corpus: Corpus, log: Path) -> Draws:
    """How a process beside the ranks draws sequences. log: the file into which it writes what it has drawn."""
    return partial(draw_asked, sampling_of(section, recipe, corpus), DrawnLog(log))


def sampling_of(section: PostConfig, recipe: Recipe, corpus: Corpus) -> Sampling:
    """How sequences are drawn, wherever that is."""
    end = AnswerDocuments.of(corpus.train, False, recipe.data.source).question(0).answer[-1]
    return Sampling(
        section.group, section.temperature, section.max_new_tokens, end, recipe.seed, recipe.model.window
    )
