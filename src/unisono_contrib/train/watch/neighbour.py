"""One micro-batch of a replica, computed by its neighbour too: does another core get the same gradient?

A core that computes wrong in the same way each time gives the same wrong gradient twice, and whoever computes on it
alone never knows. Replicas have the same weights, and a micro-batch has its data and its randomness by step and number,
whoever computes it: so the replica before must get the same bits. Where they differ and there are three replicas, the
one behind gives a third opinion, and the odd one is named; of two nobody can tell which is right.

It holds where the cores and threads of all replicas are alike, and turns itself off elsewhere.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.device import arithmetic
from unisono.parallel.player import Leaf
from unisono.spec.errors import UserCodeError
from unisono.train.data.feed import Feed
from unisono.train.step.run import Run
from unisono.train.watch.copies import checksum

Alone = Callable[[int, Sequence[Leaf], float, int | None], Tensor]
"""(micro-batch of this rank, leaves, weight, seed) → checksums of the loss and of each slot's gradient, [1 + slots]."""


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
        """own: of this rank's micro-batch, in the step. other: what it found for the replica behind it. again: finds
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
        verdict = torch.tensor(
            [[bool(wrong), stage_of(run, wrong)]], dtype=torch.int64, device=run.local.device
        )
        table = world.all_gather(verdict).tolist()
        bad = [place for place, (differs, _) in enumerate(table) if differs]
        # Backward begins at the last stage.
        if world.index != max(bad, key=lambda place: (table[place][1], -place)):
            world.barrier()
            return
        odd, before = None, (at - 1) % dp.size
        if third is not None:
            opinions = {at: owns[at], before: others[before], (at + 1) % dp.size: third[at]}
            odd = _odd(opinions)
        raise self._error(chosen, wrong, at, before, odd)

    def _error(
        self, chosen: int, wrong: Sequence[int], at: int, before: int, odd: int | None
    ) -> UserCodeError:
        run, ranks = self.run, self.run.mesh.dp.ranks
        a, b = ranks[at], ranks[before]
        what = (
            f"step {run.step + 1}: ranks {a} and {b} get two gradients from micro-batch {chosen} of rank {a}"
        )
        where = place_of(run, wrong, "in the forward pass")
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


def stage_of(run: Run, wrong: Sequence[int]) -> int:
    """The last of this rank's stages in which something differs. wrong: places in the checksums, 0 for the loss."""
    stages = {name: i for i, stage in run.local.stages.items() for name, _ in stage.named_parameters()}
    return max((stages[run.local.slots[i - 1].name] if i else max(stages.values()) for i in wrong), default=0)


def place_of(run: Run, wrong: Sequence[int], forward: str) -> str:
    """In words, where it began. wrong: as in `stage_of`."""
    if 0 in wrong:
        return f"the loss differs already: {forward}"
    names = [run.local.slots[i - 1].name for i in wrong]
    more = f", and {len(names) - 1} before it" if len(names) > 1 else ""
    return f"first in backward: the gradient of {names[-1]}{more}"
