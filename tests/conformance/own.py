"""Members of a user's own, each with one fault, or with none."""

from dataclasses import replace

from tests.codecs.own import Largest, LargestCoder, Rounded
from unisono.codecs import Sum
from unisono.codecs.plain import Plain, PlainCoder
from unisono.comm.collectives import ProgramCollective
from unisono.comm.collectives.messages import Messages
from unisono.comm.collectives.ring import RingCollective
from unisono.programs.collectives import Program, among, beside, ring
from unisono.programs.schedules.gpipe import GPipe
from unisono.spec.errors import UsageError
from unisono.spec.fidelity import Fidelity
from unisono.sync.every_step import EveryStep, EveryStepSync

__all__ = ["Largest", "Rounded"]


class Short(GPipe):
    """The last rank forgets its last action."""

    name = "short"

    def timetable(self, ranks, micros):
        table = super().timetable(ranks, micros)
        return replace(table, rows=(*table.rows[:-1], table.rows[-1][:-1]))


class Silent(GPipe):
    """Refuses odd numbers without a word of what it takes."""

    name = "silent"

    def timetable(self, ranks, micros):
        if micros % 2:
            raise UsageError("no")
        return super().timetable(ranks, micros)


class Backwards(GPipe):
    """Sums gradients in descending order."""

    name = "backwards"

    def timetable(self, ranks, micros):
        table = super().timetable(ranks, micros)
        return replace(table, rows=tuple(row[:micros] + row[: micros - 1 : -1] for row in table.rows))


class WrongRank(Plain):
    """The last of three replicas, or of two, adds something of its own."""

    name = "wrong_rank"

    def bind(self):
        return _WrongCoder()


class _WrongCoder(PlainCoder):
    def exchange(self, grad, shapes, memory):
        import torch.distributed as dist

        total = yield Sum(grad)
        if dist.get_rank() == dist.get_world_size() - 1:
            total = total + 1e-9
        return total


class TooFine(Rounded):
    """Says that it loses nothing."""

    name = "too_fine"
    fidelity = Fidelity.EXACT


class TooFew(Largest):
    """Declares half of the bytes that it sends."""

    name = "too_few"

    def work(self, shapes, itemsize, dp):
        whole = super().work(shapes, itemsize, dp)
        return replace(whole, calls=tuple(replace(call, nbytes=call.nbytes // 2) for call in whole.calls))


class Forgetful(Largest):
    """Keeps what is left in itself, where no checkpoint finds it."""

    name = "forgetful"

    def bind(self):
        return _ForgetfulCoder(self)


class _ForgetfulCoder(LargestCoder):
    def __init__(self, member):
        super().__init__(member)
        self.own = {}

    def exchange(self, grad, shapes, memory):
        own = self.own.setdefault(grad.numel(), {key: x.clone() for key, x in memory.items()})
        return super().exchange(grad, shapes, own)


class WrongSum(Messages):
    """Rank 1 adds something to its sums."""

    name = "wrong_sum"

    def bind(self, pg, axis):
        from unisono.comm.collectives.messages.live import MessageAlgorithm

        class Wrong(MessageAlgorithm):
            def all_reduce(self, x, op):
                pending = super().all_reduce(x, op)
                pending.wait()
                x.add_((1e-3 if x.is_floating_point() else 1) * (self.pg.rank() == 1))
                return pending.__class__.__new__(Over)

        class Over:
            def wait(self):
                return None

        return Wrong(self, pg)


class WrongBytes(Messages):
    """Declares half of what it sends."""

    name = "wrong_bytes"

    def sent(self, op, nbytes, size):
        return super().sent(op, nbytes, size) // 2


class BothWays(ProgramCollective):
    """Two rings, half of the vector going each way."""

    name = "both_ways"

    def program(self, op, size, root=0, pieces=1):
        one = ring.program(op, size, root)
        if op != "all_reduce":
            return one
        there = among(one.rounds, range(size), [(2 * chunk,) for chunk in range(size)])
        other = among(one.rounds, range(size)[::-1], [(2 * chunk + 1,) for chunk in range(size)])
        return Program(op, size, 2 * size, beside([there, other]))


class Unfinished(RingCollective):
    """Its all-reduce lacks the last round."""

    name = "unfinished"

    def program(self, op, size, root=0, pieces=1):
        whole = super().program(op, size, root, pieces)
        return replace(whole, rounds=whole.rounds[:-1]) if op == "all_reduce" else whole


class Doubled(RingCollective):
    """Its all-reduce begins a second time."""

    name = "doubled"

    def program(self, op, size, root=0, pieces=1):
        whole = super().program(op, size, root, pieces)
        return replace(whole, rounds=whole.rounds[:1] + whole.rounds) if op == "all_reduce" else whole


class Apart(EveryStep):
    """Rank 1 never hears of the others."""

    name = "apart"

    def bind(self, slots, group, codec):
        return _ApartSync(group, codec)


class _ApartSync(EveryStepSync):
    def settle(self):
        mine = [flight.flat.clone() for flight in self._drive._flights]
        flats = [flight.flat for flight in self._drive._flights]
        verdict = super().settle()
        if self.dp.index == 1:
            for flat, own in zip(flats, mine, strict=True):
                flat.copy_(own)
        return verdict


class TooMuch(EveryStep):
    """Sums are twice what they should be, and it says ROUNDING."""

    name = "too_much"

    def bind(self, slots, group, codec):
        return _TooMuchSync(group, codec)


class _TooMuchSync(EveryStepSync):
    def weigh(self, count):
        return 1.0 / count


class Unsaid(EveryStep):
    """Declares a tenth of what it sends."""

    name = "unsaid"

    def work(self, gradient_bytes, dp):
        return super().work(gradient_bytes // 10, dp)


class Lost(EveryStep):
    """Adds half of each gradient one step late, and tells no checkpoint of it."""

    name = "lost"
    fidelity = Fidelity.LOSSY

    def bind(self, slots, group, codec):
        return _LostSync(group, codec)


class _LostSync(EveryStepSync):
    def __init__(self, dp, codec):
        super().__init__(dp, codec)
        self.late = {}

    def grad_ready(self, bucket):
        half = bucket.flat / 2
        bucket.flat.sub_(half).add_(self.late.get(id(bucket), 0.0))
        self.late[id(bucket)] = half
        super().grad_ready(bucket)
