"""Models that slow a run down, each in one way, and the same models without: `benchmarks/verdicts.py` plants them."""

import gc
import mmap
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def _strength(name: str, usual: int) -> int:
    """As the case says it, in the environment."""
    return int(os.environ.get(f"PLANTED_{name}", usual))


WIDTH, LAYERS = _strength("WIDTH", 192), _strength("LAYERS", 4)
_KEPT: list[Any] = []


class Plain(nn.Module):
    """A model that computes a while: what is planted stands beside it."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.body = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        self.head = nn.Linear(WIDTH, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


LOOKS = _strength("LOOKS", 16)  # of a token, in Python


class Counted(Plain):
    """Weighs each token by how often it has come so far, token by token in Python, or at once. loops: in Python."""

    loops = True

    def forward(self, tokens: Tensor) -> Tensor:
        if self.loops:
            weights = []
            for row in tokens.tolist():
                seen: dict[int, int] = {}
                for token in row:
                    seen[token] = seen.get(token, 0) + 1
                    weights.append(1.0 + 0.0 * sum(a == b for a in row for b in row[:LOOKS]))
            scale = torch.tensor(weights).view(tokens.shape)
        else:
            same = tokens[:, :, None] == tokens[:, None, :]
            scale = 1.0 + 0.0 * same.tril().sum(-1).to(torch.float32)
        return super().forward(tokens) * scale[..., None]


class Vectorised(Counted):
    """The same as tensor operations."""

    loops = False


class Collecting(Plain):
    """Collects garbage in each pass, with many objects alive."""

    collects = True

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        _KEPT.append([{"token": str(i)} for i in range(_strength("OBJECTS", 400_000))])

    def forward(self, tokens: Tensor) -> Tensor:
        if self.collects and self.training:
            gc.collect()
        return super().forward(tokens.clone() if tokens.sum().item() >= 0 else tokens)  # not traced


class Frozen(Collecting):
    """The same without a collection in each pass."""

    collects = False


class Swapped(Plain):
    """Reads a table from a file that memory does not keep: each pass has to read its pages from the disk again."""

    drops = True
    MIB = _strength("MIB", 48)

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        path = Path(os.environ["PLANTED_FOLDER"], f"table-{os.getpid()}")
        path.write_bytes(os.urandom(self.MIB << 20))
        self._file = os.open(path, os.O_RDONLY)
        os.fsync(self._file)
        self._table = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
        self._table.madvise(mmap.MADV_RANDOM)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.drops:
            self._table.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        pages = random.Random(int(tokens.sum().item())).sample(
            range(len(self._table) >> 12), _strength("PAGES", 1500)
        )
        read = sum(self._table[page << 12] for page in pages)
        return super().forward(tokens) * (1.0 + 0.0 * read)


class Resident(Swapped):
    """The same with a table that stays in memory."""

    drops = False


def plain(vocab: int) -> nn.Module:
    return Plain(vocab)


def counted(vocab: int) -> nn.Module:
    return Counted(vocab)


def vectorised(vocab: int) -> nn.Module:
    return Vectorised(vocab)


def collecting(vocab: int) -> nn.Module:
    return Collecting(vocab)


def frozen(vocab: int) -> nn.Module:
    return Frozen(vocab)


def swapped(vocab: int) -> nn.Module:
    return Swapped(vocab)


def resident(vocab: int) -> nn.Module:
    return Resident(vocab)
