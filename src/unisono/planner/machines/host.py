"""A host whose ranks share CPU cores, in measured numbers: what its passes, updates and collectives take.

Ranks on a host are no devices of their own: more ranks than cores share them, a collective over loopback is work for
the same cores, and a rank that waits leaves its core to another.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import exp, log

from unisono.planner.work.stage import PassCounts


@dataclass(frozen=True, slots=True)
class Pace(PassCounts):
    """Seconds of one rank with a core of its own for one of each of what is counted."""

    def of(self, work: PassCounts) -> float:
        """Seconds of `work`."""
        return sum(getattr(self, f.name) * getattr(work, f.name) for f in fields(PassCounts))


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured seconds by bytes, ascending; straight lines between them on logarithmic axes."""

    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, nbytes: float) -> float:
        """Seconds for `nbytes`: the smallest measured one below that, in proportion beyond the largest."""
        if nbytes <= self.nbytes[0]:
            return self.seconds[0]
        if nbytes >= self.nbytes[-1]:
            return self.seconds[-1] * nbytes / self.nbytes[-1]
        i = bisect_left(self.nbytes, nbytes)
        (x0, x1), (y0, y1) = self.nbytes[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        share = (log(nbytes) - log(x0)) / (log(x1) - log(x0))
        return exp(log(y0) + share * (log(y1) - log(y0)))


@dataclass(frozen=True, slots=True)
class Host:
    """What was measured on one host. Times are seconds; a rank computes with one thread.

    cores: CPU cores that the ranks share.
    forward, backward: pace of a pass.
    update: (of an optimiser step, of each tensor more, of each element more).
    step: the rest of a step, such as data and bookkeeping.
    crowd: two ranks on one core need more than twice the time of one; `crowd` is how many times more.
    curves: time of a collective by bytes; the key is "operation:ranks", for example "all_reduce:4".
    calls: what one collective of an axis adds to its own time, for hooks and for waking ranks.
    copies: what each byte of it adds.
    memory: bytes of a rank that the planner cannot name (beyond weights, gradients, moments, activations, buffers).
        The key is the axis that the plan uses: dp, tp, shard or pp. The value is (fixed bytes, share of the activations
        and gradients that are freed within a step, share of the bytes that the axis moves at once).
    error: mean relative error of the steps to which all this was fitted.
    """

    cores: int
    forward: Pace
    backward: Pace
    update: tuple[float, float, float]
    step: float
    crowd: float = 1.0
    curves: Mapping[str, Curve] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    error: float = 0.15
    copies: Mapping[str, float] = field(default_factory=dict)

    def slow(self, active: float) -> float:
        """How many times longer work takes while `active` ranks compute."""
        each = active / self.cores
        return 1.0 if each <= 1.0 else each * (1.0 + (self.crowd - 1.0) * min(1.0, each - 1.0))

    def beside(self, passing: float, moved: Mapping[str, float]) -> float:
        """Bytes of a rank that the planner cannot name, see `memory`. Of a plan with several axes the largest fixed
        part and the largest share count, and what all of them move.

        passing: bytes of activations and gradients that are freed within a step. moved: bytes that each axis of the
        plan moves at once.
        """
        known = {axis: self.memory[axis] for axis in moved if axis in self.memory}
        if not known:
            known = dict([*self.memory.items()][:1])
        if not known:
            return 0.0
        fixed, share = (max(each[i] for each in known.values()) for i in (0, 1))
        return fixed + share * passing + sum(known[axis][2] * moved.get(axis, 0.0) for axis in known)

    def knows(self, op: str) -> bool:
        """Whether the operation was measured; files of earlier versions lack some."""
        return any(key.startswith(f"{op}:") for key in self.curves)

    def talk(self, op: str, ranks: int, nbytes: float) -> float:
        """Seconds of a core that one rank works for a collective of `ranks` ranks on this host; `wait` comes on top."""
        known = self._nearest(op, ranks)
        if known is None:
            return 0.0
        curve = self.curves[f"{op}:{known}"]
        # Rounds of a ring: as many as ranks less one, and each on cores that the others use as well.
        return (curve.at(nbytes) - curve.seconds[0]) / self.slow(known) * (ranks - 1) / (known - 1)

    def wait(self, op: str, ranks: int) -> float:
        """Seconds that a rank of the collective waits for the others, with its core free for them. It is measured as
        the time of a collective of almost no bytes."""
        known = self._nearest(op, ranks)
        return 0.0 if known is None else self.curves[f"{op}:{known}"].seconds[0] * (ranks - 1) / (known - 1)

    def _nearest(self, op: str, ranks: int) -> int | None:
        """The number of ranks nearest to `ranks` for which there is a curve."""
        known = sorted(int(key.partition(":")[2]) for key in self.curves if key.startswith(f"{op}:"))
        return min(known, key=lambda n: (abs(n - ranks), n)) if known and ranks > 1 else None
