"""Play one rank's row of a pipeline timetable: forwards, backwards and the messages between stages.

One rank on `pp` is the same program with one row and no messages.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unisono.comm.group import Group, Pending
from unisono.models.noise import Noise
from unisono.observe.span import Recorder
from unisono.parallel.cut import Stage
from unisono.programs.pipeline import COMPUTE, RECEIVES, Action


class Leaf(Protocol):
    """One micro-batch: inputs [b, ...], targets [b, ...], the global position of each sample [b] int64."""

    @property
    def inputs(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def samples(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Wires:
    """How a stage talks to its neighbours.

    ahead carries activations to the next stage, back gradients to the previous one; shapes and dtype are those of
    the tensors that arrive: `came` from the previous stage, and of the gradient of what this stage sends.
    """

    ahead: Group
    back: Group
    came: tuple[int, ...]
    sent: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Player:
    """Interprets rows for one stage; live only while a step is under way.

    computing() is the context of a forward (autocast or nothing). before_backward(last, losses) is told of each
    backward, last if it is the stage's last of the step; after_backward(micro) when its
    gradients are there.
    """

    def __init__(
        self,
        stage: Stage,
        wires: Wires,
        recorder: Recorder,
        computing: Callable[[], AbstractContextManager[object]],
        before_backward: Callable[[bool, Tensor], None],
        after_backward: Callable[[int], None] | None = None,
    ) -> None:
        self.stage, self.wires, self.recorder = stage, wires, recorder
        self.computing, self.before_backward = computing, before_backward
        self.after_backward = after_backward

    def play(self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        """The loss × weight of each leaf, [leaves], on the last stage; zeros elsewhere.

        weight: what one token's loss counts for. seed: None in evaluation, without dropout. Gradients accumulate on
        the parameters.
        """
        self._leaves, self._weight, self._seed = leaves, weight, seed
        self._arrived: dict[int, Tensor] = {}  # micro → input of this stage
        self._made: dict[int, Tensor] = {}  # micro → output, or the loss
        self._grads: dict[int, Tensor] = {}  # micro → gradient of the output
        self._sent: list[tuple[Tensor, Pending]] = []  # buffers must live until they have left
        self._asked: dict[Action, tuple[Tensor, Pending]] = {}  # receives under way, and where they arrive
        self._backwards = sum(action.kind == "B" for action in row)
        self._losses = torch.zeros(len(leaves), dtype=self.wires.dtype, device=self.wires.device)
        do = {
            "F": self._forward,
            "B": self._backward,
            "SEND_F": self._send_activation,
            "RECV_F": self._receive_activation,
            "SEND_B": self._send_gradient,
            "RECV_B": self._receive_gradient,
        }
        for at, action in enumerate(row):
            if action.kind in COMPUTE:
                self._ask_ahead(row[at + 1 :])
            do[action.kind](action)
        if self._sent:
            with self.recorder.span("wait", axis="pp", op="send"):
                for _, pending in self._sent:
                    pending.wait()
        self._arrived, self._made, self._sent = {}, {}, []
        return self._losses

    def _forward(self, action: Action) -> None:
        leaf = self._leaves[action.micro]
        noise = None if self._seed is None else Noise(self._seed, leaf.samples)
        with self.recorder.span("forward", micro=action.micro, stage=action.stage):
            x = leaf.inputs if self.stage.first else self._arrived[action.micro]
            with self.computing():
                y = self.stage(x, noise)
                if self.stage.last:
                    y = self.stage.loss(y, leaf.targets) * self._weight
                    if len(self._leaves) == 1:  # a look at it, and nothing to copy
                        self._losses = y.detach().view(1).to(self.wires.dtype)
                    else:
                        self._losses[action.micro] = y.detach()
                else:
                    y = y.to(self.wires.dtype)
        self._made[action.micro] = y

    def _backward(self, action: Action) -> None:
        self._backwards -= 1
        y = self._made.pop(action.micro)
        with self.recorder.span("backward", micro=action.micro, stage=action.stage):
            self.before_backward(self._backwards == 0, self._losses)
            torch.autograd.backward(y, self._grads.pop(action.micro, None))
            if self.after_backward is not None:
                self.after_backward(action.micro)

    def _send_activation(self, action: Action) -> None:
        y = self._made[action.micro].detach().contiguous()
        self._sent.append((y, self.wires.ahead.start_send(y, action.peer)))

    def _receive_activation(self, action: Action) -> None:
        x = self._received(action)
        self._arrived[action.micro] = x.requires_grad_(torch.is_grad_enabled())

    def _send_gradient(self, action: Action) -> None:
        grad = self._arrived.pop(action.micro).grad
        if grad is None:
            raise RuntimeError("a stage's output does not depend on its input")
        grad = grad.contiguous()
        self._sent.append((grad, self.wires.back.start_send(grad, action.peer)))

    def _receive_gradient(self, action: Action) -> None:
        self._grads[action.micro] = self._received(action)

    def _ask_ahead(self, rest: Sequence[Action]) -> None:
        """Ask for what the next computation needs before this one begins, so that the wire works meanwhile: large
        messages do not leave before their receiver asks. Each group's receives keep the order of the row."""
        for action in rest:
            if action.kind in COMPUTE:
                return
            if action.kind in RECEIVES:
                self._asked[action] = self._ask(action)

    def _ask(self, action: Action) -> tuple[Tensor, Pending]:
        ahead = action.kind == "RECV_F"
        group, shape = (self.wires.ahead, self.wires.came) if ahead else (self.wires.back, self.wires.sent)
        x = torch.empty(shape, dtype=self.wires.dtype, device=self.wires.device)
        return x, group.start_recv(x, action.peer)

    def _received(self, action: Action) -> Tensor:
        """What `action` receives, asked for now if it was not before."""
        with self.recorder.span("wait", axis="pp", op="recv", micro=action.micro, stage=action.stage):
            x, pending = self._asked.pop(action, None) or self._ask(action)
            pending.wait()
        return x
