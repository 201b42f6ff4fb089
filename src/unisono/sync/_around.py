"""What stands around a policy and hands on all that it does not do itself."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from unisono.comm.bucket import Bucket
from unisono.sync import Sync, Verdict


class SyncAround(Sync):
    """A policy as it is. Whoever stands around one overrides what is its own affair."""

    def __init__(self, inner: Sync) -> None:
        self.lane = inner.lane
        self.inner, self.dp, self.private, self.shares = inner, inner.dp, inner.private, inner.shares
        self.cap, self.sliced, self.kept = inner.cap, inner.sliced, inner.kept
        self.equal, self.replicas = inner.equal, inner.replicas
        self.keeps_weights, self.one_copy = inner.keeps_weights, inner.one_copy

    def proceed(self, step: int) -> int:
        step = self.inner.proceed(step)
        self.lane = self.inner.lane
        return step

    def close(self) -> None:
        self.inner.close()

    def assigned(self, stretches: Sequence[range], shards: int) -> None:
        self.inner.assigned(stretches, shards)

    def weigh(self, count: float) -> float:
        return self.inner.weigh(count)

    def grad_ready(self, bucket: Bucket) -> None:
        self.inner.grad_ready(bucket)

    def lacking(self, absent: Sequence[Any]) -> Sequence[Any]:
        return self.inner.lacking(absent)

    def settle(self) -> Verdict:
        return self.inner.settle()

    def next_gradient(self) -> bool:
        return self.inner.next_gradient()

    def after_update(self, step: int) -> None:
        self.inner.after_update(step)

    def before_step(self, step: int) -> None:
        self.inner.before_step(step)

    def deliver(self, step: int, norm: float, stop: bool) -> None:
        self.inner.deliver(step, norm, stop)

    def next_step(self, step: int) -> int:
        return self.inner.next_step(step)

    def meets(self, step: int) -> bool:
        return self.inner.meets(step)

    def take_loss(self, step: int, loss: float) -> None:
        self.inner.take_loss(step, loss)

    def heed(self, stop: Callable[[], bool]) -> None:
        self.inner.heed(stop)

    def exchange(self, step: int) -> None:
        self.inner.exchange(step)

    def merge(self, step: int) -> None:
        self.inner.merge(step)

    def center(self) -> Mapping[str, Tensor]:
        return self.inner.center()

    @property
    def outer(self) -> Mapping[str, Tensor]:
        return self.inner.outer

    def salvage(self, tell: Callable[[str, Any], list[Any]]) -> tuple[int, Set[str]] | None:
        return self.inner.salvage(tell)

    def agree(self) -> None:
        self.inner.agree()

    def undone(self) -> None:
        self.inner.undone()

    def says(self) -> str:
        return self.inner.says()

    def metrics(self) -> Mapping[str, Any]:
        return self.inner.metrics()

    def is_private(self, key: str) -> bool:
        return self.inner.is_private(key)

    def adds(self, key: str) -> bool:
        return self.inner.adds(key)

    def await_transfers(self) -> None:
        self.inner.await_transfers()

    def state(self) -> Mapping[str, Tensor]:
        return self.inner.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.inner.load(state)
