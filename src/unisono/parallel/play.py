"""Play one rank's row of a pipeline timetable: forwards, backwards and the messages between stages.

One rank on `pp` is the same program with one row and no messages.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from unisono.observe.span import Recorder
from unisono.parallel.cut import Stage
from unisono.parallel.player import BackwardCall, Leaf, Player, noise_of
from unisono.parallel.post import Carried, Post, Wire
from unisono.parallel.split import backward_in_halves
from unisono.programs.pipeline import COMPUTE, Action

Key = tuple[int, int]  # stage, micro-batch


class StagePlayer(Player):
    """Plays with the stages of one rank; holds tensors only while a step is under way.

    wires: by the stage before the boundary. computing() is the context of a forward. dtype: of a loss.
    before_backward(turn) is told of each backward towards weights; after_backward(micro) when its gradients are there.
    halves: whether backward may go in two, as W asks; else B does all. scale: with what a loss begins its backward.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        wires: Mapping[int, Wire],
        recorder: Recorder,
        computing: Callable[[], AbstractContextManager[object]],
        before_backward: Callable[[BackwardCall], None],
        after_backward: Callable[[int], None] | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        halves: bool = True,
        scale: Tensor | None = None,
    ) -> None:
        self.stages, self.recorder, self.computing = stages, recorder, computing
        self.post = Post(wires, recorder, device)
        self.before_backward, self.after_backward = before_backward, after_backward
        self.dtype, self.device, self.halves, self.scale = dtype, device, halves, scale

    def play(self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        self._leaves, self._weight, self._seed = leaves, weight, seed
        self._inputs: dict[Key, Carried] = {}  # what came from the stage before
        self._outputs: dict[Key, Carried] = {}  # what was made of it, or the loss
        self._grads: dict[Key, Sequence[Tensor | None]] = {}  # of those outputs that are floating
        self._halves: dict[Key, Callable[[], None]] = {}  # backwards that have not gone towards weights yet
        halves = self.halves and any(action.kind == "W" for action in row)
        self._turns = Counter(action.stage for action in row if action.kind == ("W" if halves else "B"))
        self._losses = torch.zeros(len(leaves), dtype=self.dtype, device=self.device)
        do: dict[str, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward_to_inputs if halves else self._backward,
            "W": self._backward_to_weights if halves else lambda action: None,
            "SEND_F": self._send_activation,
            "RECV_F": self._receive_activation,
            "SEND_B": self._send_gradient,
            "RECV_B": self._receive_gradient,
        }
        for at, action in enumerate(row):
            if action.kind in COMPUTE:
                self.post.ask_ahead(row, at + 1)
            do[action.kind](action)
        self.post.finish()
        self._inputs, self._outputs = {}, {}
        return self._losses

    def _forward(self, action: Action) -> None:
        key = action.stage, action.micro
        stage, leaf = self.stages[action.stage], self._leaves[action.micro]
        noise = noise_of(leaf, self._seed, self._weight, action.micro)
        with self.recorder.span("forward", micro=action.micro, stage=action.stage):
            x = leaf.inputs if stage.first else self.post.wires[key[0] - 1].unpacked(self._inputs[key])
            with self.computing():
                y = stage(x, noise)
                if stage.last:
                    stage.beside(leaf.inputs, noise)
                    y = stage.loss(y, stage.dealt(leaf.targets)) * (self._weight * leaf.scale)
                    if len(self._leaves) == 1:  # a look at it, and nothing to copy
                        self._losses = y.detach().view(1).to(self.dtype)
                    else:
                        self._losses[action.micro] = y.detach()
                    self._outputs[key] = (y,)
                    return
                tensors = self.post.wires[action.stage].packed(y)
        self._outputs[key] = tensors
        if action.stage + 1 in self.stages:  # no message: both are here
            self._enter(action.stage + 1, action.micro, [t.detach() for t in tensors])

    def _backward(self, action: Action) -> None:
        self._take_turn(action, partial(torch.autograd.backward, *self._roots(action)))
        self._hand_back(action)

    def _backward_to_inputs(self, action: Action) -> None:
        with self.recorder.span("backward", micro=action.micro, stage=action.stage):
            inputs = [x for x in self._inputs.get((action.stage, action.micro), ()) if x.requires_grad]
            self._halves[action.stage, action.micro] = backward_in_halves(*self._roots(action), inputs)
        self._hand_back(action)

    def _backward_to_weights(self, action: Action) -> None:
        self._take_turn(action, self._halves.pop((action.stage, action.micro)), op="weights")

    def _take_turn(self, action: Action, backward: Callable[[], None], **tags: str) -> None:
        """A backward after which weights have their gradients."""
        self._turns[action.stage] -= 1
        last, final = not self._turns[action.stage], not any(self._turns.values())
        with self.recorder.span("backward", micro=action.micro, stage=action.stage, **tags):
            self.before_backward(BackwardCall(action.stage, action.micro, last, final))
            backward()
            if self.after_backward is not None:
                self.after_backward(action.micro)

    def _roots(self, action: Action) -> tuple[list[Tensor], list[Tensor | None]]:
        """What backward begins from: outputs that depend on what learns, and their gradients."""
        outputs = [y for y in self._outputs.pop((action.stage, action.micro)) if y.is_floating_point()]
        grads = self._grads.pop((action.stage, action.micro), [self.scale] * len(outputs))
        pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
        return [y for y, _ in pairs], [g for _, g in pairs]

    def _hand_back(self, action: Action) -> None:
        """Gradients for the stage before, if it is here too."""
        if action.stage - 1 in self.stages and not self.stages[action.stage].first:
            self._grads[action.stage - 1, action.micro] = self._input_grads(action)

    def _enter(self, stage: int, micro: int, tensors: Sequence[Tensor]) -> None:
        """The inputs of a stage, which collect gradients where any are wanted."""
        on = torch.is_grad_enabled()
        self._inputs[stage, micro] = tuple(x.requires_grad_(on and x.is_floating_point()) for x in tensors)

    def _input_grads(self, action: Action) -> list[Tensor]:
        """The gradient of each floating tensor that came in."""
        inputs = [x for x in self._inputs.pop((action.stage, action.micro)) if x.requires_grad]
        if all(x.grad is None for x in inputs):
            raise RuntimeError("a stage's output does not depend on its input")
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]

    def _send_activation(self, action: Action) -> None:
        outputs = self._outputs[action.stage, action.micro]
        self.recorder.mark("send", way="F", stage=action.stage, micro=action.micro)
        self.post.send([y.detach() for y in outputs], self.post.wires[action.stage].ahead, action.peer)

    def _receive_activation(self, action: Action) -> None:
        self._enter(action.stage, action.micro, self.post.received(action))

    def _send_gradient(self, action: Action) -> None:
        self.recorder.mark("send", way="B", stage=action.stage, micro=action.micro)
        self.post.send(self._input_grads(action), self.post.wires[action.stage - 1].back, action.peer)

    def _receive_gradient(self, action: Action) -> None:
        self._grads[action.stage, action.micro] = self.post.received(action)
