"""The guard: every N steps, are replicas still equal, and does one micro-batch still give the gradient it gave?

**Copies.** Before the step, all ranks compare checksums of weights and optimiser state (`copies`). So a flipped bit in
a weight or a moment stops the run within N steps, and nothing is saved or finished without a last look.

**Gradients.** Replicas cannot differ by a gradient that was wrong before they met: all of them receive its sum. So each
data rank computes one of its m micro-batches of the checked step twice: once ahead of the step, alone, and once in it;
both must give the same bits, the loss and each parameter's gradient. The micro-batch is drawn by seed and step. A
flipped bit in the gradient of one micro-batch of a checked step is found with probability 1/m, where m = micro-batches
of a rank: always, without accumulation. What happens between a gradient's making and its sum is not seen.

A core that is wrong in the same way each time is not seen so. Where there are several replicas, every other check has
the micro-batch computed the second time by the neighbour. Replicas have the same weights, and a micro-batch has its
data and its randomness by step and number, whoever computes it: so the neighbour must get the same bits. Where they
differ and there are three replicas, a third gives its opinion, and the odd one is named; of two nobody can tell which
is right.
That holds where the cores and threads of all replicas are alike, and turns itself off elsewhere.

Where the device itself gives different bits each time (some GPU kernels add in any order), the second part turns itself
off and says so.

A guard stands in the player's place, so the step knows nothing of it.
"""

import random
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from unisono.comm.device import arithmetic
from unisono.parallel.params import dense_of
from unisono.parallel.play import StagePlayer
from unisono.parallel.player import BackwardCall, Leaf, Player
from unisono.programs.pipeline import Action, part_of
from unisono.spec.errors import UserCodeError
from unisono.train.data.feed import Feed
from unisono.train.step.run import Run
from unisono.train.watch.copies import Copies, checksum

PERIOD = 200  # steps between checks that cost less than 1 % of them, whatever the recipe

Note = Callable[[str], None]
Alone = Callable[[int, Sequence[Leaf], float, int | None], Tensor]
"""(micro-batch of this rank, leaves, weight, seed) → checksums of the loss and of each slot's gradient, [1 + slots]."""


def install(
    run: Run, every: int, note: Note = lambda text: None, feed: Feed | None = None
) -> Callable[[], None]:
    """Guard a run from now on; every rank calls this together. every: steps between checks, 0: never. feed: with which
    replicas compute micro-batches of each other, too.

    Returns a function that compares copies at once, again for all ranks together.
    """
    if not every:
        return lambda: None
    if not isinstance(run.player, StagePlayer):
        raise TypeError("a guard goes around the player of the stages, before all others")
    run.player = guard = Guard(run, run.player, every, note, feed)
    return guard.copies.check


class Guard(Player):
    """A player that checks before and while it plays. Raises UserCodeError G01 for copies, G02 and G04 for
    gradients."""

    def __init__(self, run: Run, inner: StagePlayer, every: int, note: Note, feed: Feed | None) -> None:
        self.run, self.inner, self.every, self.note = run, inner, every, note
        self.copies = Copies(run)
        self.alone = copy(inner)
        self.alone.after_backward = None
        # Always as the stage's last: what sharding would else keep for later could not be forgotten.
        self.alone.before_backward = lambda turn: run.local.sharding[turn.stage].before_backward(True)
        self.reproducible: bool | None = None  # not yet known
        self.others = (
            Neighbours(run, feed, self._play_alone) if feed is not None and run.mesh.dp.size > 1 else None
        )
        if self.others is not None and not self.others.alike:
            note("guard: replicas compute on other devices or threads, so none checks another's gradients")
            self.others = None
        if not self.copies.several:
            note("guard: no rank holds what another holds (dp=1), so only gradients are checked")

    def play(self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        if row is not self.run.row or self.run.step % self.every:
            return self.inner.play(row, leaves, weight, seed)
        self.copies.check()
        if self.reproducible is None:
            self._find_out(leaves, weight, seed)
        if not self.reproducible:
            return self.inner.play(row, leaves, weight, seed)
        chosen = sampled(self.run.seed, self.run.step, len(leaves))
        others = self.others if self.run.step // self.every % 2 else None
        second = self._play_alone if others is None else others.of_other
        wanted = second(chosen, leaves, weight, seed)
        with _Watch(self.run, self.inner, chosen) as watch:
            losses = self.inner.play(row, leaves, weight, seed)
        got = watch.line(losses[chosen])
        if others is None:
            self._compare(chosen, wanted, got)
        else:
            others.compare(chosen, got, wanted, partial(others.of_other, chosen, leaves, weight, seed, -1))
        return losses

    def _play_alone(self, chosen: int, leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        """Plays one micro-batch on its own and forgets its gradients; the step's sums know nothing of it. Returns
        checksums of the loss and of each slot's gradient, int64 [1 + slots]."""
        row = part_of(self.run.timetable, lambda action: action.micro == chosen).rows[self.run.mesh.at["pp"]]
        with _Watch(self.run, self.alone, chosen) as watch:
            losses = self.alone.play(row, leaves, weight, seed)
        self.run.gradients.forget()
        return watch.line(losses[chosen])

    def _find_out(self, leaves: Sequence[Leaf], weight: float, seed: int | None) -> None:
        """Whether this device gives the same bits each time: two of three at least, on every rank."""
        lines = [self._play_alone(0, leaves, weight, seed) for _ in range(3)]
        same = any(torch.equal(lines[i], lines[j]) for i, j in ((0, 1), (1, 2), (0, 2)))
        votes = self.run.mesh.world.all_gather(
            torch.tensor([same], device=self.run.local.device, dtype=torch.int64)
        )
        self.reproducible = bool(votes.all())
        if not self.reproducible:
            self.note("guard: this device gives another gradient each time, so only replicas are compared")

    def _compare(self, leaf: int, wanted: Tensor, got: Tensor) -> None:
        """Every rank: [loss, gradients] made twice. The rank to blame raises, the others wait to be stopped."""
        wrong = (wanted != got).nonzero().flatten().tolist()
        if bad := _blamed(self.run, wrong):
            raise _error(self.run, leaf, wrong, bad)


def sampled(seed: int, step: int, leaves: int) -> int:
    """Which of a rank's micro-batches is computed twice in a checked step."""
    return random.Random(f"guard {seed} {step}").randrange(leaves)


def _error(run: Run, leaf: int, wrong: Sequence[int], bad: Sequence[int]) -> UserCodeError:
    others = [rank for rank in bad if rank != run.mesh.rank]
    also = f" (ranks {', '.join(map(str, others))} differ too)" if others else ""
    return UserCodeError(
        f"step {run.step + 1}: micro-batch {leaf} of this rank, computed twice, gives two gradients{also}",
        where=_place(run, wrong, "in the forward pass of this replica"),
        likely="a flipped bit in memory, a faulty core, or code that does not compute the same twice",
        fix="start again from the last checkpoint without this machine; --train.guard 0 turns this off",
        rank=run.mesh.rank,
        code="G02",
    )


def _blamed(run: Run, wrong: Sequence[int]) -> list[int]:
    """Return the ranks on which something differs, on the one of them that is to raise; on all others, which wait to be
    stopped, and where nothing differs, none. Every rank calls it. wrong: places in this rank's checksums that differ, 0
    for the loss."""
    world, slots = run.mesh.world, run.local.slots
    stages = {name: i for i, stage in run.local.stages.items() for name, _ in stage.named_parameters()}
    last = max((stages[slots[i - 1].name] if i else max(stages.values()) for i in wrong), default=0)
    verdict = torch.tensor([[bool(wrong), last]], dtype=torch.int64, device=run.local.device)
    table = world.all_gather(verdict).tolist()
    bad = [rank for rank, (differs, _) in enumerate(table) if differs]
    # Backward begins at the last stage.
    if bad and world.index != max(bad, key=lambda rank: (table[rank][1], -rank)):
        world.barrier()
        return []
    return bad


def _place(run: Run, wrong: Sequence[int], forward: str) -> str:
    """In words, where it began. wrong: as in `_blamed`."""
    if 0 in wrong:
        return f"the loss differs already: {forward}"
    names = [run.local.slots[i - 1].name for i in wrong]
    more = f", and {len(names) - 1} before it" if len(names) > 1 else ""
    return f"first in backward: the gradient of {names[-1]}{more}"


class Neighbours:
    """Replicas that compute one micro-batch of each other. Every rank makes one and makes the same calls, or it hangs.

    alike: whether all replicas compute on the same kind of device with as many threads.
    """

    def __init__(self, run: Run, feed: Feed, alone: Alone) -> None:
        self.run, self.feed, self.alone = run, feed, alone
        kind = f"{arithmetic(run.local.device)} {torch.get_num_threads()}".encode()
        digest = checksum(torch.frombuffer(bytearray(kind), dtype=torch.uint8).long().cumsum(0))
        digests = run.mesh.world.all_gather(digest.view(1).to(run.local.device))
        self.alike = bool((digests == digests[0]).all())

    def of_other(
        self, chosen: int, leaves: Sequence[Leaf], weight: float, seed: int | None, away: int = 1
    ) -> Tensor:
        """What this replica finds for the chosen micro-batch of the one `away` places behind it."""
        run, dp = self.run, self.run.mesh.dp
        numbers = dp.all_gather(torch.tensor([run.leaves[chosen]], device=run.local.device)).tolist()
        leaf = numbers[(dp.index + away) % dp.size]
        micros = list(leaves)
        (micros[chosen],) = self.feed.fetch(run.step, range(leaf, leaf + 1))
        return self.alone(chosen, micros, weight, seed)

    def compare(self, chosen: int, mine: Tensor, other: Tensor, again: Callable[[], Tensor]) -> None:
        """mine: of this rank's micro-batch, in the step. other: what it found for the replica behind it. again: finds
        the same for the one before it. Raises UserCodeError G04 on one rank, the others wait to be stopped."""
        run, dp, world = self.run, self.run.mesh.dp, self.run.mesh.world
        owns, others = dp.all_gather(torch.stack([mine, other])).view(dp.size, 2, -1).unbind(1)
        differ = owns != others.roll(1, 0)
        replicas = world.all_reduce(differ.any(1).long(), dist.ReduceOp.MAX).tolist()
        if not any(replicas):
            return
        third = None
        if dp.size > 2:
            third = dp.all_gather(again()).view(dp.size, -1).roll(-1, 0)
        at = replicas.index(1)
        wrong = differ[at].nonzero().flatten().tolist() if dp.index == at else []
        if not _blamed(run, wrong):
            return
        odd, before = None, (at - 1) % dp.size
        if third is not None:
            odd = _odd({at: owns[at], before: others[before], (at + 1) % dp.size: third[at]})
        raise self._error(chosen, wrong, at, before, odd)

    def _error(
        self, chosen: int, wrong: Sequence[int], at: int, before: int, odd: int | None
    ) -> UserCodeError:
        run, ranks = self.run, self.run.mesh.dp.ranks
        a, b = ranks[at], ranks[before]
        what = (
            f"step {run.step + 1}: ranks {a} and {b} get two gradients from micro-batch {chosen} of rank {a}"
        )
        where = _place(run, wrong, "in the forward pass")
        if odd is not None:
            what += f"; that of rank {ranks[odd]} is the odd one of three"
        elif len(ranks) == 2:
            where += "; two cannot tell which is right"
        return UserCodeError(
            what,
            where=where,
            likely="a core that computes wrong, perhaps in the same way each time, or memory that does",
            fix="start again from the last checkpoint without this machine; --train.guard 0 turns this off",
            rank=None if odd is None else ranks[odd],
            code="G04",
        )


def _odd(opinions: dict[int, Tensor]) -> int | None:
    """The replica whose opinion differs from all others, which agree; None where no two agree."""
    for replica, opinion in opinions.items():
        first, *rest = [x for other, x in opinions.items() if other != replica]
        if all(torch.equal(first, x) for x in rest) and not torch.equal(first, opinion):
            return replica
    return None


class _Watch:
    """While entered: checksums of the gradients that the backward of one micro-batch makes, before they are added."""

    def __init__(self, run: Run, player: StagePlayer, micro: int) -> None:
        self.run, self.player, self.micro = run, player, micro
        self._now = -1  # the micro-batch whose backward is under way
        self._sums: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._hooked: set[str] = set()

    def line(self, loss: Tensor) -> Tensor:
        """int64 [1 + slots]: of the loss, then of each gradient, 0 where none was made."""
        nothing = torch.zeros((), dtype=torch.int64, device=loss.device)
        sums = [self._sums.get(slot.name, nothing) for slot in self.run.local.slots]
        return torch.stack([checksum(loss), *sums])

    def __enter__(self) -> "_Watch":
        self._around, self.player.before_backward = self.player.before_backward, self._about_to
        live = {slot.name: slot.live for slot in self.run.local.slots}
        for name, parameter in live.items():
            if not isinstance(parameter, DTensor):
                self._hook(name, parameter)
        if any(isinstance(parameter, DTensor) for parameter in live.values()):
            # FSDP2 shows autograd gathered parameters, which modules hold only while they compute.
            modules = [pair for stage in self.run.local.stages.values() for pair in stage.named_modules()]
            for path, module in modules:
                self._handles.append(module.register_forward_pre_hook(self._entering(path)))
        return self

    def __exit__(self, *_: object) -> None:
        self.player.before_backward = self._around
        for handle in self._handles:
            handle.remove()

    def _about_to(self, turn: BackwardCall) -> None:
        self._now = turn.micro
        self._around(turn)

    def _entering(self, path: str) -> Callable[[nn.Module, object], None]:
        def enter(module: nn.Module, _: object) -> None:
            for name, parameter in module.named_parameters(recurse=False):
                if not isinstance(parameter, DTensor):
                    self._hook(f"{path}.{name}" if path else name, parameter)

        return enter

    def _hook(self, name: str, parameter: Tensor) -> None:
        if name in self._hooked or not parameter.requires_grad:
            return
        self._hooked.add(name)

        def add(grad: Tensor) -> None:
            if self._now == self.micro:
                total = checksum(dense_of(grad))
                self._sums[name] = self._sums[name] + total if name in self._sums else total

        self._handles.append(parameter.register_hook(add))
