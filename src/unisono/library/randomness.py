"""Random numbers: whose they are.

torch's generator                each rank's own from `prepare` on: ranks drop and mix differently
the order of the data            `Common`: rank 0's, on every rank
what a data set draws            by sample, so the same on any number of ranks and with any number of workers
Python's and NumPy's in a loop   as the script left them, so that choices agree
job.generator                    by sample: what any number of ranks draws is what one process draws
"""

import hashlib
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from unisono.comm.device import random_states, seeded_states, set_random_states
from unisono.library.current_batch import CurrentBatch
from unisono.library.modes import unwatched
from unisono.library.notices import Notices
from unisono.spec.errors import UsageError
from unisono.spec.frames import is_foreign

MOST = 4096  # things that are looked into
FEW = 32  # of a container's
_PLAIN = (str, bytes, int, float, complex, bool, type(None), Tensor, np.ndarray, type, types.ModuleType)


@dataclass(frozen=True, slots=True)
class OwnGenerator:
    """One generator. get, put: read and write its state. seed: set it from a number."""

    get: Callable[[], Any]
    put: Callable[[Any], object]
    seed: Callable[[int], object]


def found_in(roots: Iterable[Any]) -> list[OwnGenerator]:
    """Return the generators that can be reached from these objects."""
    todo, seen, generators = list(roots), set(), []
    while todo and len(seen) < MOST:
        value = todo.pop(0)
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen.add(id(value))
        generator = _generator_of(value)
        if generator is not None:
            generators.append(generator)
        else:
            todo += _inside(value)
    return generators


def found_in_script() -> list[OwnGenerator]:
    """Return the Python and NumPy generators of the script's functions that are running in this thread. Torch's are
    seen where they are used (`batch_tracer`)."""
    frame, roots = sys._getframe(1), []
    while frame is not None:
        if not is_foreign(frame.f_code.co_filename):
            roots += [*frame.f_locals.values(), *(_named(frame))]
        frame = frame.f_back
    return [
        generator
        for generator in found_in(roots)
        if not isinstance(getattr(generator.get, "__self__", None), torch.Generator)
    ]


def _named(frame: types.FrameType) -> Iterator[Any]:
    """Global values that the code of a frame names."""
    for name in frame.f_code.co_names:
        if name in frame.f_globals:
            yield frame.f_globals[name]


def _generator_of(value: Any) -> OwnGenerator | None:
    if isinstance(value, torch.Generator):
        return (
            OwnGenerator(value.get_state, value.set_state, value.manual_seed)
            if value is not torch.default_generator
            else None
        )
    if isinstance(value, random.Random):
        shared = value is getattr(random, "_inst", None) or isinstance(value, random.SystemRandom)
        return None if shared else OwnGenerator(value.getstate, value.setstate, value.seed)
    if isinstance(value, np.random.RandomState):
        shared = value is np.random.mtrand._rand
        return None if shared else _of_bits(value._bit_generator)
    return _of_bits(value.bit_generator) if isinstance(value, np.random.Generator) else None


def _of_bits(bits: Any) -> OwnGenerator:
    """NumPy's: a seed gives the state that a new one of its kind has."""

    def put(state: Any) -> None:
        bits.state = state

    return OwnGenerator(partial(getattr, bits, "state"), put, lambda seed: put(type(bits)(seed).state))


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())[:FEW]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)[:FEW]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [
            *cells,
            *(value.__defaults__ or ()),
            *(value.__globals__.get(name) for name in value.__code__.co_names),
        ]
    held = getattr(value, "__dict__", None)
    return list(held.values())[: 8 * FEW] if isinstance(held, dict) else []


def seed_of(*numbers: int) -> int:
    """A seed of 63 bits that differs wherever one of the numbers does."""
    drawn = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "little") >> 1


def all_states() -> list[Any]:
    """Return the states of torch's (CPU), Python's and NumPy's generators, as JSON values."""
    python, (kind, keys, *rest) = random.getstate(), np.random.get_state()
    mine = torch.get_rng_state().numpy().tobytes().hex()
    return [mine, [python[0], list(python[1]), python[2]], [kind, np.asarray(keys).tolist(), *rest]]


def set_all_states(states: Sequence[Any], *, torch_too: bool = True) -> None:
    mine, python, numpy = states
    if torch_too:
        torch.set_rng_state(state_of(mine))
    random.setstate((python[0], tuple(python[1]), python[2]))
    np.random.set_state((numpy[0], np.array(numpy[1], dtype=np.uint32), *numpy[2:]))


def state_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


# Torch's (CPU), Python's and NumPy's generators.
_COMMON = (
    OwnGenerator(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
    OwnGenerator(random.getstate, random.setstate, random.seed),
    OwnGenerator(
        lambda: np.random.get_state(legacy=False),
        np.random.set_state,
        lambda seed: np.random.seed(seed & 0xFFFFFFFF),
    ),
)


@contextmanager
def kept(more: Sequence[OwnGenerator] = ()) -> Iterator[list[Any]]:
    """Restore torch's, Python's and NumPy's generators afterwards, and these."""
    every = (*_COMMON, *more)
    before = [generator.get() for generator in every]
    try:
        yield before
    finally:
        for generator, state in zip(every, before, strict=True):
            generator.put(state)


def _same(a: Any, b: Any) -> bool:
    """Whether two states are the same, whatever they consist of."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


class Streams:
    """Torch's generators of one rank: the script's, which is the same on every rank, and the rank's own.

    The rank's own serves what depends on its samples: from a batch to the end of its backward, and in forwards. All
    else, such as orders, new models and noise on gradients, is drawn from the script's. One rank has one stream.
    """

    def __init__(self, seed: int, index: int, size: int, notify: Notices) -> None:
        self._script_generators: list[OwnGenerator] = []  # generators of the script's own
        self._alone, self._notify, self.looking = size == 1, notify, size > 1
        self._inside = False
        self._seed = seed_of(seed, index)
        self._other = self._seen = seeded_states(self._seed)
        self._others_seen: Any = None

    @property
    def state(self) -> Tensor:
        """The state of this rank's own generator on the CPU."""
        return torch.get_rng_state() if self._inside else self._other[0]

    @state.setter
    def state(self, state: Tensor) -> None:
        self.to_script()
        self._seed = seed_of(*state[:64].tolist())
        self._other = [state]

    def to_own(self) -> None:
        """Draw from this rank's own generator from now on, since its samples are at hand."""
        if self._alone or self._inside:
            return
        self._swap()
        self._inside = True
        if self.looking:
            self._script_generators = found_in_script()
            self._seen, self._others_seen = random_states(), self._others()

    def to_script(self) -> None:
        """Draw from the script's generator from now on, which is the same on every rank."""
        if self._inside:
            self._look("J12")
            self._swap()
            self._inside = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Draw from this rank's own generator in a model's forward."""
        was = self._inside
        self.to_own()
        self._look("J12")
        try:
            yield
        finally:
            self._look("J13")
            if not was:
                self.to_script()

    def _look(self, code: str) -> None:
        if not self.looking or not self._inside:
            return
        now, others = random_states(), self._others()
        if any(not torch.equal(a, b) for a, b in zip(now, self._seen, strict=False)):
            self._notify(code)
        if not _same(others, self._others_seen):
            self._notify("J16" if code == "J12" else code)
        self._seen, self._others_seen = now, others

    def _others(self) -> list[Any]:
        return [generator.get() for generator in (*_COMMON[1:], *self._script_generators)]

    def _swap(self) -> None:
        now = random_states()
        if len(now) > len(self._other):  # a GPU is in use now
            self._other = [*self._other, *seeded_states(self._seed)[len(self._other) :]]
        set_random_states(self._other)
        self._other = now


class BySample(Dataset):
    """A data set whose samples draw the same random numbers wherever they are fetched. It is asked for
    (index, seed)."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self._drawn: list[OwnGenerator] = []
        self._generators: list[OwnGenerator] | None = None  # of the data set's, in the process that fetches

    def __len__(self) -> int:
        return len(self.data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "data" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.data, name)

    def __getitems__(self, keys: Sequence[tuple[Any, int]]) -> list[Any]:
        """Fetch samples. Only generators that samples were seen to draw from are seeded; samples in which one was used
        for the first time are fetched again."""
        if self._generators is None:
            self._generators = found_in([self.data])
        every = (*_COMMON, *self._generators)
        with kept(self._generators) as before:
            rows = self._fetched(keys)
            states = zip(every, before, strict=True)
            drawn = [
                generator
                for generator, state in states
                if generator not in self._drawn and not _same(generator.get(), state)
            ]
            self._drawn += drawn
            return self._fetched(keys) if drawn else rows

    def __getstate__(self) -> dict[str, Any]:
        """For a worker, whose generators are its own."""
        return {"data": self.data, "_drawn": [], "_generators": None}

    def _fetched(self, keys: Sequence[tuple[Any, int]]) -> list[Any]:
        several, rows = getattr(self.data, "__getitems__", None), []
        if several and not self._drawn:
            return several([index for index, _ in keys])
        for index, seed in keys:
            for generator in self._drawn:
                generator.seed(seed)
            rows.append(several([index])[0] if several else self.data[index])
        return rows


def draws(data: Any) -> bool:
    """Whether a data set could draw random numbers."""
    return type(data) is not TensorDataset


class Draws:
    """Random numbers for the samples at hand, which do not depend on how many ranks there are.

    The functions are torch's; dim 0 counts this rank's samples. Numbers are a function of the job's seed, the batch,
    how often this was called for it, and the sample's place in the global batch.
    """

    def __init__(self, seed: int, current_batch: CurrentBatch, step: Callable[[], int]) -> None:
        self._seed, self._batch, self._step = seed, current_batch, step

    def rand(self, *size: int, **options: Any) -> Tensor:
        """Uniform in [0, 1)."""
        return self._drawn(torch.rand, size, options)

    def randn(self, *size: int, **options: Any) -> Tensor:
        """Normal, with mean 0 and variance 1."""
        return self._drawn(torch.randn, size, options)

    def randint(self, low: int, high: int, size: Sequence[int], **options: Any) -> Tensor:
        """Integers in [low, high)."""
        return self._drawn(partial(torch.randint, low, high), size, options)

    def rand_like(self, x: Tensor) -> Tensor:
        return self.rand(*x.shape, dtype=x.dtype, device=x.device)

    def randn_like(self, x: Tensor) -> Tensor:
        return self.randn(*x.shape, dtype=x.dtype, device=x.device)

    @unwatched()
    def _drawn(self, function: Callable[..., Tensor], size: Sequence[int], options: dict[str, Any]) -> Tensor:
        batch = self._batch.expected()
        if not size or (batch.count and size[0] != batch.samples):
            raise UsageError(
                f"numbers of shape {list(size)} for a batch of which {batch.samples} samples are here",
                where="job.generator",
                fix="as many rows as the batch at hand has on this rank, such as len(x)",
                code="J07",
            )
        batch.drawn += 1
        generator = torch.Generator(options.get("device") or "cpu")
        number, rows = batch.place if batch.count else self._step(), []
        for row in range(size[0]):
            place = (batch.walk.loader, batch.walk.number, number, batch.low + row, batch.drawn)
            generator.manual_seed(seed_of(self._seed, *place))
            rows.append(function(tuple(size[1:]), generator=generator, **options))
        return torch.stack(rows)
