"""What happens around a prepared model's forward, and what is looked at until the first updates have been made.

Around every forward: which batch it computes on, and whose random numbers. In the first steps also: losses that are no
mean over samples, buffers that part, random numbers. Later the looking is switched off.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.library.hand import Hand
from unisono.library.losses import Backwards, Node, complaint
from unisono.library.noise import Streams
from unisono.library.notices import Notices
from unisono.library.small import Small
from unisono.library.whole import digest_of, leaves_of
from unisono.spec.errors import UsageError

STEPS = 2  # of each model; an odd batch or a second kind of loss often comes with the second
PATIENCE = 16  # steps of any model after which a model that has made none is waited for no longer


class FirstSteps:
    """Looks at losses and models until each model has made STEPS steps."""

    def __init__(self, hand: Hand, streams: Streams, small: Small, told: Notices) -> None:
        self._hand, self._streams, self._small, self._told = hand, streams, small, told
        self._made: list[int] = []
        self._outputs: dict[Node, None] = {}
        self._losses = Backwards(self._loss)

    @property
    def looking(self) -> bool:
        return (
            self._small.group.size > 1 and sum(self._made) < PATIENCE and min(self._made, default=0) < STEPS
        )

    def one_more(self) -> int:
        """Another model is prepared; its number."""
        self._made.append(0)
        self.look(True)
        return len(self._made) - 1

    def look(self, on: bool) -> None:
        self._losses.switch(on and self.looking)
        self._streams.looking = self.looking

    def forwarded(self, outputs: Any) -> None:
        """A model has made these outputs, of which a loss may be made."""
        if self.looking:
            made = [
                x for x in leaves_of(outputs) if isinstance(x, Tensor) and x.dim() and x.grad_fn is not None
            ]
            self._outputs |= dict.fromkeys(x.grad_fn for x in made)

    def before_step(self, number: int, model: nn.Module) -> None:
        """Model `number` is about to be stepped, on every rank. Raises UsageError if the job is strict and something
        was noticed."""
        if not self.looking:
            return
        buffers = list(model.buffers())
        seen = self._small.gather(digest_of([b.reshape(-1) for b in buffers]) if buffers else 0)
        if any(other != seen[0] for other in seen):
            self._told("J14")
        self._outputs.clear()
        self._told.settle()
        self._made[number] += 1
        self.look(True)

    def _loss(self, loss: Tensor) -> None:
        batch = self._hand.latest
        if batch.count and loss.grad_fn is not None:
            why = complaint(loss.grad_fn, self._outputs, batch.samples, self._small.group.size, batch.weighed)
            if why:
                self._told("J10", why)


def follow(model: nn.Module, hand: Hand, streams: Streams, steps: FirstSteps, before: Sequence[Any]) -> None:
    """Hooks around the model's forward. before: more to do as it begins. They are functions, so that a copy of the
    model has them without copying what they act on."""
    running: list[Any] = []

    def enters(_: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # activations that a backward computes again
            running.append(None)
            return
        for act in before:
            act()
        steps.look(False)
        hand.forward((args, kwargs), torch.is_grad_enabled())
        running.append(streams.forward())
        running[-1].__enter__()

    def leaves(_: nn.Module, __: Any, outputs: Any) -> None:
        context = running.pop()
        if context is not None:
            context.__exit__(None, None, None)
            steps.look(True)
            steps.forwarded(outputs)

    model.register_forward_pre_hook(enters, prepend=True, with_kwargs=True)
    model.register_forward_hook(leaves, always_call=True)


def refuse_double_backward(model: nn.Module) -> None:
    """FSDP2 frees what a gradient of a gradient would need: said in our words, as its first backward begins."""

    def marked(_: nn.Module, __: Any, outputs: Any) -> None:
        for x in leaves_of(outputs):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(_single)

    model.register_forward_hook(marked)


def _single(_: Tensor) -> None:
    if torch.is_grad_enabled():
        raise UsageError(
            "a gradient of a gradient (create_graph=True) goes through a model that is sharded",
            where="backward",
            fix="the same ranks as dp, or a penalty without a second derivative",
            code="J18",
        )
