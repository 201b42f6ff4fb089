"""What crosses the boundaries of a pipeline: of each stage what came in, and the gradient of what it hands on."""

from collections.abc import Mapping, Sequence

import torch

from unisono.parallel.play import Key, StagePlayer
from unisono.parallel.player import Leaf
from unisono.parallel.post import Carried
from unisono.programs.pipeline import Action


class CrossedPlayer(StagePlayer):
    """Plays a row without gradients of weights. After it, `inputs` has what came into each stage but the first, and
    `grads` the gradients of what each stage but the last hands on, by stage and micro-batch. A sample's numbers are of
    that sample alone, as long as no layer mixes samples."""

    def __init__(self, inner: StagePlayer) -> None:
        """inner: the run's own player, whose stages and messages this one uses between two of its steps."""
        self.stages, self.recorder, self.computing = inner.stages, inner.recorder, inner.computing
        self.post, self.dtype, self.device = inner.post, inner.dtype, inner.device
        self.halves, self.scale = False, None

    def play_across(
        self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None
    ) -> tuple[Mapping[Key, Carried], Mapping[Key, Carried]]:
        """(inputs, grads); the sum of each leaf's loss counts `weight`. Every rank of the pipeline calls it."""
        self.inputs: dict[Key, Carried] = {}
        self.grads: dict[Key, Carried] = {}
        learning = [p for stage in self.stages.values() for p in stage.parameters() if p.requires_grad]
        for p in learning:
            p.requires_grad_(False)
        try:
            self.play(row, leaves, weight, seed)
        finally:
            for p in learning:
                p.requires_grad_(True)
        return self.inputs, self.grads

    def _backward(self, action: Action) -> None:
        key = action.stage, action.micro
        self.inputs[key] = tuple(x.detach() for x in self._inputs.get(key, ()))
        if not self.stages[action.stage].last:
            self.grads[key] = tuple(g for g in self._grads[key] if g is not None)
        with self.recorder.span("backward", micro=action.micro, stage=action.stage, op="inputs"):
            outputs, grads = self._roots(action)
            if outputs:  # none on the first stage
                torch.autograd.backward(outputs, grads)
        self._hand_back(action)
