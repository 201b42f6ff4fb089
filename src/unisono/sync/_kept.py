"""What a codec keeps on one rank: parameter by parameter for checkpoints, joined as a bucket lies for the codec."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from unisono.codecs import BucketMemory, Coder
from unisono.comm.bucket import Bucket
from unisono.comm.group import Group

STEPS = "steps"


class CodecState:
    """Live tensors, which a checkpoint may fill before a first step.

    private: by `PARAMETER/NAME`, what this replica keeps for itself, each like its parameter. alike: by
    `PARAMETER/NAME`, what all replicas keep alike; and `steps`, int64 [], if the codec counts them."""

    def __init__(self, coder: Coder, params: Mapping[str, nn.Parameter]) -> None:
        self.coder = coder
        self._names = {id(p): name for name, p in params.items()}
        self.private = {
            f"{name}/{key}": torch.zeros_like(p, dtype=p.grad_dtype)
            for name, p in params.items()
            for key in coder.keeps
        }
        self._alike = {name: dict(coder.alike(name, p)) for name, p in params.items()}
        self.alike = {f"{n}/{key}": x for n, kept in self._alike.items() for key, x in kept.items()}
        self._unseen = {*self.private, *self.alike}  # of parameters that were in no bucket yet
        self.steps = torch.zeros((), dtype=torch.int64)
        if coder.counts:
            self.alike[STEPS] = self.steps
        self._before: list[tuple[Tensor, Tensor]] = []  # what was, and where, since the step began
        self.holds = False  # whether a step may be given up at any time, and the run goes on
        self.spoiled = False  # by a step that was not finite, of which nothing was held

    @property
    def state(self) -> dict[str, Tensor]:
        """All that is kept, by key. Raises RuntimeError where a step that was not finite has spoiled it."""
        if self.spoiled:
            why = "what the codec keeps is spoiled by a step that was not finite"
            raise RuntimeError(f"{why}; go on from the last checkpoint")
        return self.private | self.alike

    @property
    def nothing(self) -> bool:
        return not self.private and not self.alike

    def joined(self, bucket: Bucket, place: int, replicas: int) -> BucketMemory:
        """The memory of a bucket, made once: what is kept of its parameters lies in one tensor from now on."""
        names = tuple(self._names.get(id(p), "") for p in bucket.params)
        kept = {key: self._whole(bucket, names, key) for key in self.coder.keeps}
        alike = [self._alike.get(name, {}) for name in names]
        self._unseen -= {f"{name}/{key}" for name in names for key in self._alike.get(name, ())}
        return BucketMemory(kept, alike, names, 0, self.coder.seed, place, replicas)

    def _whole(self, bucket: Bucket, names: tuple[str, ...], key: str) -> Tensor:
        whole, at = torch.zeros_like(bucket.flat), 0
        for name, p in zip(names, bucket.params, strict=True):
            full = f"{name}/{key}"
            self.private[full] = whole[at : at + p.numel()].view(p.shape).copy_(self.private[full])
            self._unseen.discard(full)
            at += p.numel()
        return whole

    def hold(self, memory: BucketMemory) -> None:
        """Hold what a bucket's memory is now, in case the step will not count."""
        self._before += [(x.clone(), x) for x in _tensors(memory)]

    def end_step(self) -> None:
        """Every bucket has been in an exchange; what was in none, such as aliases, keeps nothing."""
        for key in self._unseen:
            self.private.pop(key, None)
            self.alike.pop(key, None)
        self._unseen = set()
        self.steps += 1

    def settled(self) -> None:
        """The step counted."""
        self._before.clear()

    def undo(self) -> None:
        """The step did not count: what was held is as it was. Outside fp16 nothing is held unless the run is to go on,
        for a copy in each step costs as much as the codec itself: what is kept may then go into no checkpoint."""
        keeps = bool(self.private or self.alike.keys() - {STEPS})
        self.spoiled = keeps and not self._before
        for was, x in self._before:
            x.copy_(was)
        self._before.clear()
        self.steps -= 1

    def take_over(self, before: "CodecState", group: Group) -> None:
        """Go on from what was kept among other members: what each one keeps for itself, and what all keep alike, which
        is that of who has made most steps. Every member calls it, or it hangs."""
        if self.nothing and not self.coder.counts:
            return
        for key, x in self.private.items():
            if key in before.private:
                x.copy_(before.private[key])
        counts = group.all_gather(before.steps.view(1).clone())
        source = int(counts.argmax())
        for key, x in self.alike.items():
            if key != STEPS:
                group.broadcast(x.copy_(before.alike.get(key, x)), source)
        self.steps.copy_(counts[source])


def _tensors(memory: BucketMemory) -> Iterator[Tensor]:
    yield from memory.kept.values()
    for kept in memory.alike:
        yield from kept.values()
