"""A run's player with sequences in the place of documents: it hands them to the loss, and asks a reference."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.models.noise import Noise
from unisono.parallel.cut import Stage
from unisono.parallel.player import Leaf, Player
from unisono.programs.pipeline import Action
from unisono.train.step.evaluate import weights_being
from unisono.train.step.run import Run
from unisono_contrib.train.post.losses import PostLoss, counted_log_probs, size_of
from unisono_contrib.train.post.sequences import PostLeaf


class LossDesk:
    """Knows, where the loss of a micro-batch is computed, what there is to know of its sequences. measured: measures of
    the last step, summed over this rank's micro-batches, float64. sizes: of its micro-batches, by `losses.size_of`, if
    it is a dict."""

    def __init__(self, loss: PostLoss, temperature: float) -> None:
        self.loss, self._temperature = loss, temperature
        self._leaves: Sequence[PostLeaf] | None = None
        self._micro, self._counts = 0, True
        self._known: dict[int, Tensor] | None = None  # while the reference is played
        self.references: dict[int, Tensor] = {}
        self._hooked = set[int]()
        self.sizes: dict[int, float] | None = None
        self.measured = torch.zeros(len(loss.measures), dtype=torch.float64)

    def attach(self, run: Run) -> None:
        """Compute the losses of this run's last stages."""
        self._counts = run.mesh.tp.index == 0
        self.measured = self.measured.to(run.local.device)
        for stage in run.local.stages.values():
            if stage.last and id(stage) not in self._hooked:
                self._hooked.add(id(stage))
                self._listen(stage)

    def _listen(self, stage: Stage) -> None:
        usual = stage.loss

        def note(inputs: Tensor, noise: Noise | None) -> None:
            self._micro = noise.micro if noise is not None else 0

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            if self._leaves is None:
                return usual(logits, targets)
            leaf = self._leaves[self._micro]
            by_token = {name: stage.dealt(x) for name, x in leaf.by_token.items()}
            by_sequence = {"length": leaf.lengths, **leaf.by_sequence}
            lp, counted = counted_log_probs(stage.whole(logits), targets, self._temperature)
            if self._known is not None:
                self._known[self._micro] = self.loss.known(lp, counted, by_token, by_sequence)
                return lp.new_zeros(())
            if self._micro in self.references:
                by_token["reference"] = self.references[self._micro]
            terms, measured = self.loss.terms(lp, counted, by_token, by_sequence)
            self.measured += measured if self._counts else 0.0
            if self.sizes is not None:
                self.sizes[self._micro] = size_of(self.loss, lp, counted, by_token, by_sequence)
            return terms.sum()

        stage.beside, stage.loss = note, loss

    def played(self, leaves: Sequence[PostLeaf], play: Callable[[], Tensor]) -> Tensor:
        """What play() gives, which computes these leaves."""
        self._leaves = leaves
        self.measured.zero_()
        try:
            return play()
        finally:
            self._leaves = None

    @torch.no_grad()
    def known(self, run: Run, player: Player, leaves: Sequence[PostLeaf]) -> dict[int, Tensor]:
        """What the reference model, whose weights are the run's averages, gives these leaves, by their numbers; nothing
        on ranks without a loss. Every rank calls it, or it hangs."""
        self._known = {}
        run.local.train(False)
        try:
            with weights_being(run, run.update.averages):
                self.played(leaves, lambda: player.play(run.eval_row, leaves, 1.0, run.seed))
            return self._known
        finally:
            self._known = None
            run.local.train(True)


class PostPlayer(Player):
    """Plays what `make` makes of the leaves of a step; validations as they are."""

    def __init__(
        self, inner: Player, desk: LossDesk, make: Callable[[Player, Sequence[Leaf]], Sequence[PostLeaf]]
    ) -> None:
        self._inner, self._desk, self._make = inner, desk, make

    def play(self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        if seed is None:
            return self._inner.play(row, leaves, weight, seed)
        built, sizes = self._make(self._inner, leaves), self._desk.sizes
        if sizes is not None:
            sizes.clear()
        losses = self._desk.played(built, lambda: self._inner.play(row, built, weight, seed))
        if sizes is not None:
            sizes.update({micro: size * weight * built[micro].scale for micro, size in sizes.items()})
        return losses

    def watch_sizes(self) -> dict[int, float]:
        self._desk.sizes = {}
        return self._desk.sizes

    def __getattr__(self, name: str) -> Any:
        """What else the player inside has: its wires, its stages."""
        return getattr(self._inner, name)
