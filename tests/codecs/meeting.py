"""Replicas whose exchanges are answered in one place, without groups: what a codec asks for, and what comes of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Size, Tensor, nn

from unisono.codecs import CODECS, BucketMemory, Coder, Deal, Gather, Sent, Sum


@dataclass
class Meeting:
    """Replicas with a live codec each, and parameters of these shapes in one bucket."""

    text: str
    shapes: Sequence[tuple[int, ...]]
    replicas: int = 2
    seed: int = 0
    dtype: torch.dtype = torch.float64
    requests: list[list[tuple[str, int]]] = field(default_factory=list)  # of each step: operation, bytes

    def __post_init__(self) -> None:
        member = CODECS.read(self.text)
        names = tuple(f"p{i}" for i in range(len(self.shapes)))
        params = [nn.Parameter(torch.zeros(shape, dtype=self.dtype)) for shape in self.shapes]
        self.numel = sum(p.numel() for p in params)
        self.coders: list[Coder] = [member.bind() for _ in range(self.replicas)]
        self.memories = [
            BucketMemory(
                {key: torch.zeros(self.numel, dtype=self.dtype) for key in coder.keeps},
                [dict(coder.alike(name, p)) for name, p in zip(names, params, strict=True)],
                names,
                seed=self.seed,
                place=place,
                replicas=self.replicas,
            )
            for place, coder in enumerate(self.coders)
        ]
        self.decoded: list[Tensor] = []

    def step(self, grads: Sequence[Tensor]) -> Tensor:
        """The sum that every replica gets, of gradients [n] of each; that all get the same bits is checked."""
        sizes = [Size(shape) for shape in self.shapes]
        exchanges = [
            coder.exchange(grad.clone(), sizes, memory)
            for coder, grad, memory in zip(self.coders, grads, self.memories, strict=True)
        ]
        answers: Sequence[object] = [None] * self.replicas
        self.requests.append([])
        self.decoded = []
        while True:
            asked, found = [], []
            for exchange, answer in zip(exchanges, answers, strict=True):
                try:
                    asked.append(exchange.send(answer))
                    while isinstance(asked[-1], Sent):
                        part = asked.pop().decoded()
                        self.decoded.append(torch.cat([part, part.new_zeros(self.numel - len(part))]))
                        asked.append(exchange.send(None))
                except StopIteration as end:
                    found.append(end.value)
            if found:
                assert len(found) == self.replicas and not asked
                for memory in self.memories:
                    memory.step += 1
                assert all(same(total, found[0]) for total in found)
                return found[0].clone()
            answers = self._answered(asked)

    def _answered(self, asked: Sequence[object]) -> Sequence[object]:
        if isinstance(asked[0], tuple):  # several operations at once
            return list(
                zip(*(self._answered(together) for together in zip(*asked, strict=True)), strict=True)
            )  # type: ignore[arg-type]
        tensors = [request.tensor for request in asked]  # type: ignore[attr-defined]
        assert len({(type(request), len(x)) for request, x in zip(asked, tensors, strict=True)}) == 1
        self.requests[-1].append((type(asked[0]).__name__, tensors[0].nbytes))
        match asked[0]:
            case Sum():
                total = torch.stack(tensors).sum(0)
                return [x.copy_(total) for x in tensors]
            case Gather():
                return [torch.stack(tensors) for _ in tensors]
            case Deal():
                parts = [x.view(self.replicas, -1) for x in tensors]
                return [torch.stack([part[place] for part in parts]) for place in range(self.replicas)]
        raise AssertionError(asked[0])


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, where one NaN is as good as another."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def drawn(numel: int, *seeds: int) -> list[Tensor]:
    """A gradient [numel] for each seed."""
    return [
        torch.randn(numel, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds
    ]
