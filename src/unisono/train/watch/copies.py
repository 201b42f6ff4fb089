"""Do all ranks that should hold the same numbers hold them? One 64-bit checksum a tensor, one exchange a check.

Weights and optimiser state are compared between replicas, between ranks of `tp` that hold the same parameter, and
between the two ends of a tied weight: whoever holds the same box of the same logical tensor.

The checksum is the sum of the tensor's 64-bit words, as integers that wrap around. Flipping one bit of a word adds or
takes 2^k, which is never 0 modulo 2^64, so a single flipped bit never escapes; several may cancel with probability
2^-64 if they are independent.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.spec.errors import UserCodeError
from unisono.spec.words import listed
from unisono.train.state.run_state import pieces_of
from unisono.train.step.run import Run

BLOCKS = 1024  # into which a tensor is cut to find the element that differs
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ABSENT = 0  # the identity of nothing, in the room of ranks that hold fewer tensors than others


def words_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of x as (64-bit words, the few elements that do not fill one, each as an integer)."""
    flat = x.detach().contiguous().view(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % 8:
        flat = flat.clone()
    whole = flat.numel() - flat.numel() % (8 // size)
    return flat[:whole].view(torch.int64), flat[whole:].view(_INTEGERS[size]).to(torch.int64)


def checksum(x: Tensor) -> Tensor:
    """x, any shape and dtype of 1 to 8 bytes → int64 []; all bits take part."""
    words, rest = words_of(x)
    return words.sum() + rest.sum()


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of this rank. name: `model/NAME` or `optim/NAME/KEY`. start: of this box in the full tensor."""

    name: str
    start: tuple[int, ...]
    tensor: Tensor

    @property
    def identity(self) -> int:
        """A number that all ranks which should hold the same tensor have alike, and no other."""
        text = f"{self.name}@{self.start}+{tuple(self.tensor.shape)}:{self.tensor.dtype}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True, slots=True)
class _Split:
    """Copies of one box that differ. ranks: all that hold it. odd: those outvoted, empty if there is no majority."""

    identity: int
    ranks: tuple[int, ...]
    odd: tuple[int, ...]


class Copies:
    """What this rank holds and who else holds the same. Made by all ranks together, as is every check.

    The tensors must stay the same objects; their values may change.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.world = run, run.mesh.world
        self.device = run.local.device
        self.held = _held(run)
        self.passed = run.step  # the updates made when copies were last found equal
        room = torch.tensor(len(self.held), dtype=torch.int64, device=self.device)
        self.world.all_reduce(room, dist.ReduceOp.MAX)
        self.room = int(room)
        identities = self._line([h.identity for h in self.held])
        self.identities = self.world.all_gather(identities).tolist()
        first: dict[int, int] = {}
        self._first = torch.tensor(
            [first.setdefault(identity, i) for i, identity in enumerate(self.identities)], device=self.device
        )

    @property
    def several(self) -> int:
        """How many boxes more than one rank holds."""
        counts = Counter(i for i in self.identities if i != _ABSENT)
        return sum(count > 1 for count in counts.values())

    @torch.no_grad()
    def check(self) -> None:
        """Raises UserCodeError G01 on one rank if any two copies differ; the others then wait to be stopped."""
        sums_here = torch.zeros(self.room, dtype=torch.int64, device=self.device)
        if self.held:
            sums = torch.stack([checksum(h.tensor).to(self.device) for h in self.held])
            sums_here[: len(self.held)] = sums
        table = self.world.all_gather(sums_here)
        if torch.equal(table, table[self._first]):
            self.passed = self.run.step
            return
        self._accuse(self._splits(table.tolist()))

    def _line(self, numbers: Sequence[int]) -> Tensor:
        filled = [*numbers, *[_ABSENT] * (self.room - len(numbers))]
        return torch.tensor(filled, dtype=torch.int64, device=self.device)

    def _splits(self, sums: Sequence[int]) -> list[_Split]:
        """The boxes whose copies differ, the same list on every rank."""
        by: dict[int, dict[int, int]] = defaultdict(dict)  # identity → rank → checksum
        for i, (identity, value) in enumerate(zip(self.identities, sums, strict=True)):
            if identity != _ABSENT:
                by[identity][i // self.room] = value
        splits = []
        for identity, values in by.items():
            if len(set(values.values())) > 1:
                (value, votes), *_ = Counter(values.values()).most_common()
                majority = votes > len(values) / 2
                odd = tuple(rank for rank, v in values.items() if v != value) if majority else ()
                splits.append(_Split(identity, tuple(values), odd))
        return splits

    def _accuse(self, splits: Sequence[_Split]) -> None:
        speaker = (splits[0].odd or splits[0].ranks)[0]
        speaks = self.run.mesh.rank == speaker
        line = torch.zeros(2, dtype=torch.int64, device=self.device)
        named: dict[int, Held] = {h.identity: h for h in self.held}
        mine = [s for s in splits if speaker in s.ranks and speaker in (s.odd or s.ranks)]
        chosen, about = None, ""
        if speaks:
            chosen, about = _pick([named[s.identity] for s in mine])
            words = sum(part.numel() for part in words_of(chosen.tensor))
            line[:] = torch.tensor([chosen.identity, words])
        self.world.broadcast(line, speaker)
        identity, words = line.tolist()
        split = next(s for s in splits if s.identity == identity)
        where = _Search(self, named.get(identity), words, split, speaker).text()
        if chosen is None:
            self.world.barrier()  # one rank has raised; the supervisor stops the others here
            return
        raise _error(self.run.step, self.passed, chosen, split, where, about, speaker)


def _held(run: Run) -> list[Held]:
    """Each storage once: an alias that shares its owner's is the owner. Where replicas have weights of their own, those
    are no copies of each other's; what the policy keeps as the run's is."""
    seen: set[tuple[int, str]] = set()
    held = []
    outer = {run.local.owners.get(name, name) for name in run.sync.outer}
    for piece in pieces_of(run):
        kind, _, name = piece.name.partition("/")
        if not run.sync.equal and (kind == "optim" or (kind == "model" and name not in outer)):
            continue
        key = (piece.tensor.data_ptr(), piece.name)
        if piece.tensor.numel() and key not in seen:
            seen.add(key)
            held.append(Held(piece.name, tuple(piece.start), piece.tensor.detach()))
    return held


def _pick(candidates: Sequence[Held]) -> tuple[Held, str]:
    """Return the tensor of one rank in which the difference began, and the reason for thinking so.

    All replicas receive the same gradient, so a weight that is off stays alone; a moment that is off takes its weight
    along; and a gradient that went wrong after replicas had met takes all of them.
    """
    first = candidates[0]
    name = first.name.split("/")[1]
    same = [h for h in candidates if h.name.split("/")[1] == name]
    moments = [h for h in same if h.name.startswith("optim/") and h.tensor.dim()]
    if not moments:
        return first, ""
    if len(moments) > 1:
        why = "all moments of this tensor differ: it came with its gradient, after replicas had met"
        return moments[0], why
    if len(same) > 1:
        return moments[0], "its weight differs too, as it follows from the moment"
    return moments[0], ""


class _Search:
    """Finds the element in which copies differ: checksums of blocks first, then the words of one block."""

    def __init__(self, copies: Copies, held: Held | None, words: int, split: _Split, speaker: int) -> None:
        self.copies, self.held, self.split = copies, held, split
        other = [rank for rank in split.ranks if rank not in split.odd and rank != speaker]
        self.pair = (speaker, other[0])
        self.size = -(-words // BLOCKS)
        self.words = torch.zeros(self.size * BLOCKS, dtype=torch.int64, device=copies.device)
        if held is not None:
            words_here = torch.cat(words_of(held.tensor))
            self.words[: len(words_here)] = words_here

    def text(self) -> str:
        """Every rank calls this; only ranks that hold the tensor can put it into words."""
        blocks = self.words.view(BLOCKS, self.size)
        mine, other = self._of_pair(blocks.sum(1))
        bad = (mine != other).nonzero().flatten().tolist()
        if not bad:
            return ""
        mine, other = self._of_pair(blocks[bad[0]].contiguous())
        at = (mine != other).nonzero().flatten().tolist()
        if self.held is None or not at:
            return ""
        mask = (1 << 64) - 1
        a, b = int(mine[at[0]]) & mask, int(other[at[0]]) & mask
        single = len(bad) == 1 and len(at) == 1
        return _in_words(self.held, bad[0] * self.size + at[0], a, b, single, self.pair)

    def _of_pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        table = self.copies.world.all_gather(x).view(-1, len(x))
        return table[self.pair[0]], table[self.pair[1]]


def _in_words(held: Held, word: int, a: int, b: int, single: bool, pair: tuple[int, int]) -> str:
    size = held.tensor.element_size()
    whole = held.tensor.numel() // (8 // size)
    bit = ((a ^ b) & -(a ^ b)).bit_length() - 1
    element, shift = word * (8 // size), 0
    if word < whole:
        element, shift = element + bit // (8 * size), bit // (8 * size) * 8 * size
    else:
        element = whole * (8 // size) + word - whole
    values = [_value(x >> shift, held.tensor.dtype, size) for x in (a, b)]
    place = _unravel(element, held)
    flips = ((a ^ b) >> shift) & ((1 << 8 * size) - 1)
    text = f"element {place}: {values[0]:.7g} on rank {pair[0]}, {values[1]:.7g} on rank {pair[1]}"
    if single and flips.bit_count() == 1:
        return f"{text}: they differ in bit {flips.bit_length() - 1} alone, as a flipped bit makes it"
    return text if single else f"first in {text}"


def _value(bits: int, dtype: torch.dtype, size: int) -> float:
    data = (bits & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return float(torch.frombuffer(bytearray(data), dtype=dtype)[0])


def _unravel(element: int, held: Held) -> list[int]:
    place = []
    for size in reversed(held.tensor.shape):
        element, at = divmod(element, size)
        place.append(at)
    return [start + at for start, at in zip(held.start, reversed(place), strict=True)]


def _error(
    step: int, passed: int, held: Held, split: _Split, where: str, about: str, speaker: int
) -> UserCodeError:
    others = [rank for rank in split.ranks if rank not in (split.odd or (speaker,))]
    if split.odd:
        word = "the copy of rank" if len(split.odd) == 1 else "the copies of ranks"
        what = f"after step {step}: {word} {listed(split.odd)} of {held.name} is not that of {_ranks(others)}"
    else:
        what = f"after step {step}: the copies of {held.name} on ranks {listed(split.ranks)} differ"
        where = f"{where}; two copies cannot tell which is right" if len(split.ranks) == 2 else where
    return UserCodeError(
        what,
        where=where or held.name,
        likely=about or "a flipped bit in memory, or a faulty core or link",
        fix=f"look at that machine's memory; go on from a checkpoint of step {passed} or before, the last check passed",
        rank=speaker if split.odd else None,
        code="G01",
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
