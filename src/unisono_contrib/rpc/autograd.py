"""Distributed autograd: one backward through calls between workers.

    with autograd.context() as context:
        y = rpc.rpc_sync("other", forward, args=(x,))
        autograd.backward(context, [loss(y)])
        gradients = autograd.get_gradients(context)   # of this worker's parameters

Inside a context each call notes the tensors that it sends, and each worker the tensors that it receives, as leaves. A
backward has two phases. The first one marks every sent tensor that the loss depends on, so each worker learns how many
gradients each received tensor will get parts of. The second one carries gradients back: one message for each received
tensor, once all its parts are here. (PyTorch's "smart mode", which it describes and has not built; its own algorithm
waits for calls that the loss does not depend on.) Graphs are kept until the context ends.
"""

import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono_contrib.rpc.current import here
from unisono_contrib.rpc.errors import PeerLost, no_member
from unisono_contrib.rpc.exports import exported
from unisono_contrib.rpc.futures import CallFuture, collect_all
from unisono_contrib.rpc.switchboard import WorkerInfo

_CONTEXT: ContextVar[int] = ContextVar("the context of this thread", default=0)


@dataclass(eq=False)
class _Backward:
    """One backward on one worker. reach: leaves below each marked tensor. waits: parts that a received tensor still
    gets, by the number of its leaf; parts: their sum so far."""

    reach: dict[int, list[Tensor]] = field(default_factory=dict)
    waits: Counter[int] = field(default_factory=Counter)
    parts: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class GradientContext:
    """What one worker knows of a context. sent: tensors by number. received: (leaf, who sent it, its number there), by
    id of the leaf. peers: workers that know of the context too."""

    sent: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, tuple[Tensor, str, int]] = field(default_factory=dict)
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    backwards: defaultdict[int, _Backward] = field(default_factory=lambda: defaultdict(_Backward))
    peers: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, x: Tensor) -> int:
        """A number for a tensor whose gradient will come."""
        with self.lock:
            number = len(self.sent)
            self.sent[number] = x
        return number


class GradientContexts:
    """The contexts that a worker knows."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self._contexts: dict[int, GradientContext] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._contexts)

    def here(self) -> int:
        """The context of this thread; 0 for none."""
        return _CONTEXT.get()

    def get(self, context: int) -> GradientContext:
        """Raises UsageError Q06 for a context that has ended."""
        known = self._contexts.get(context)
        if known is None:
            raise no_member(
                "no such context of distributed autograd here", "inside `with autograd.context()`"
            )
        return known

    def pop(self, context: int) -> GradientContext | None:
        with self._lock:
            return self._contexts.pop(context, None)

    @contextmanager
    def entered(self, context: int, caller: WorkerInfo) -> Iterator[None]:
        """Be in a caller's context, which is new here with its first call; in none if 0."""
        if context:
            with self._lock:
                known = self._contexts.setdefault(context, GradientContext())
            if caller.name != self._info.name:
                known.peers.add(caller.name)
        token = _CONTEXT.set(context)
        try:
            yield
        finally:
            _CONTEXT.reset(token)

    def sending(self, context: int, tensors: Sequence[Tensor], peer: WorkerInfo) -> list[list[int]]:
        """[index, number] of each tensor that a gradient will come back for."""
        known = self._contexts.get(context)
        if known is None:
            return []
        known.peers.add(peer.name)
        return [[index, known.note(x)] for index, x in enumerate(tensors) if x.requires_grad]

    def receiving(
        self, context: int, sends: Sequence[Sequence[int]], tensors: list[Tensor], peer: WorkerInfo
    ) -> None:
        """Make leaves of tensors that came and whose gradients go back."""
        known = self._contexts.get(context)
        if known is None:
            return
        for index, number in sends:
            leaf = tensors[index].requires_grad_()
            with known.lock:
                known.received[id(leaf)] = (leaf, peer.name, number)


@contextmanager
def context() -> Iterator[int]:
    """A context of distributed autograd; yields its number. All workers forget it, with its graphs and gradients, when
    the block ends."""
    worker, number = here(), secrets.randbits(62) + 1
    with worker.contexts.entered(number, worker.info):
        try:
            yield number
        finally:
            release(number)


def backward(context: int, roots: Sequence[Tensor]) -> None:
    """Compute gradients of the sum of `roots`, numbers of one element, on all workers that they depend on; adds them to
    those that the context has. Raises UsageError Q06, PeerLost, RemoteError."""
    known, run = here().contexts.get(context), secrets.randbits(62)
    for root in roots:
        if root.numel() != 1 or not root.requires_grad:
            raise no_member("a root of backward is no number that requires a gradient", "the loss")
    numbers = [known.note(root) for root in roots]
    mark(context, run, numbers).wait()
    try:
        flow(context, run, numbers, [torch.ones_like(root) for root in roots]).wait()
    finally:
        known.backwards.pop(run, None)


def get_gradients(context: int) -> dict[Tensor, Tensor]:
    """The gradients that a context has for parameters of this worker. Raises UsageError Q06."""
    known = here().contexts.get(context)
    with known.lock:
        return dict(known.gradients)


@exported
def mark(context: int, run: int, numbers: Sequence[int]) -> CallFuture[Any]:
    """First phase: the backward `run` depends on these tensors that this worker has sent."""
    known = here().contexts.get(context)
    onward: dict[str, list[int]] = defaultdict(list)
    with known.lock:
        state = known.backwards[run]
        for number in numbers:
            if number in state.reach:
                continue
            state.reach[number] = leaves = _leaves_below(known.sent[number])
            for leaf in leaves:
                if id(leaf) not in known.received:
                    continue
                if not state.waits[id(leaf)]:
                    _, peer, theirs = known.received[id(leaf)]
                    onward[peer].append(theirs)
                state.waits[id(leaf)] += 1
    return collect_all([here().call(peer, mark, (context, run, theirs)) for peer, theirs in onward.items()])


@exported
def flow(context: int, run: int, numbers: Sequence[int], gradients: Sequence[Tensor]) -> CallFuture[Any]:
    """Second phase: the gradients of these sent tensors. Its future is done when all that follows from it is."""
    known = here().contexts.get(context)
    onward: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for number, gradient in zip(numbers, gradients, strict=True):
        with known.lock:
            root, leaves = known.sent[number], known.backwards[run].reach[number]
        if not leaves:
            continue
        # Another number's graph may share parts of this one, and a later backward may come.
        parts = torch.autograd.grad(
            [root], leaves, [gradient.to(root.device)], retain_graph=True, allow_unused=True
        )
        with known.lock:
            for leaf, part in zip(leaves, parts, strict=True):
                for peer, theirs, whole in _add(known, known.backwards[run], leaf, part):
                    onward[peer].append((theirs, whole))
    return collect_all(
        [
            here().call(peer, flow, (context, run, [n for n, _ in pairs], [whole for _, whole in pairs]))
            for peer, pairs in onward.items()
        ]
    )


def _add(
    known: GradientContext, state: _Backward, leaf: Tensor, part: Tensor | None
) -> Iterator[tuple[str, int, Tensor]]:
    """Add a part of a leaf's gradient; yields (peer, number, gradient) of a received one that is whole now."""
    if id(leaf) not in known.received:
        if part is not None:
            before = known.gradients.get(leaf)
            known.gradients[leaf] = part.detach() if before is None else before + part.detach()
        return
    _, peer, number = known.received[id(leaf)]
    if part is not None:
        state.parts[id(leaf)] = state.parts[id(leaf)] + part if id(leaf) in state.parts else part
    state.waits[id(leaf)] -= 1
    if not state.waits[id(leaf)]:
        yield peer, number, state.parts.pop(id(leaf), torch.zeros_like(leaf)).detach()


@exported
def release(context: int) -> None:
    """Forget a context, here and on all workers that have it from here."""
    worker = here()
    known = worker.contexts.pop(context)
    for peer in known.peers if known is not None else ():
        with suppress(PeerLost):
            worker.call(peer, release, (context,), context=0)


def _leaves_below(root: Tensor) -> list[Tensor]:
    """The leaves that a tensor's graph ends in, each once."""
    if root.grad_fn is None:
        return [root]
    seen, todo, leaves = {root.grad_fn}, [root.grad_fn], dict[int, Tensor]()
    while todo:
        node: Any = todo.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)
    return list(leaves.values())
