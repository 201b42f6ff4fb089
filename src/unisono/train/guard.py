"""The guard: every N steps, are replicas still equal, and does one micro-batch still give the gradient it gave?

**Copies.** Before the step, all ranks compare checksums of weights and optimiser state (`copies`). So a flipped bit in
a weight or a moment stops the run within N steps, and nothing is saved or finished without a last look.

**Gradients.** Replicas cannot differ by a gradient that was wrong before they met: all of them receive its sum. So each
data rank computes one of its m micro-batches of the checked step twice: once ahead of the step, alone, and once in it;
both must give the same bits, the loss and each parameter's gradient. The micro-batch is drawn by seed and step. A
flipped bit in the gradient of one micro-batch of a checked step is found with probability 1/m, where m = micro-batches
of a rank: always, without accumulation. What happens between a gradient's making and its sum is not seen.

Where the device itself gives different bits each time (some GPU kernels add in any order), the second part turns itself
off and says so.

A guard stands in the player's place, so the step knows nothing of it.
"""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from unisono.parallel.play import Leaf, Player, Wires
from unisono.programs.pipeline import Action, Timetable, lower
from unisono.spec.errors import UserCodeError
from unisono.train.copies import Copies, checksum
from unisono.train.step import Run

PERIOD = 200  # steps between checks that cost less than 1 % of them, whatever the recipe

Note = Callable[[str], None]


def install(run: Run, every: int, note: Note = lambda text: None) -> Callable[[], None]:
    """Guard a run from now on; every rank calls this together. every: steps between checks, 0: never.

    Returns a function that compares copies at once, again for all ranks together.
    """
    if not every:
        return lambda: None
    guard = Guard(run, every, note)
    run.player = guard  # type: ignore[assignment]
    return guard.copies.check


class Guard:
    """A player that checks before and while it plays. Raises UserCodeError G01 for copies, G02 for gradients."""

    def __init__(self, run: Run, every: int, note: Note) -> None:
        self.run, self.every, self.note = run, every, note
        self.inner = run.player
        self.copies = Copies(run)
        self.alone = _Alone(run)
        self.reproducible: bool | None = None  # not yet known
        if not self.copies.several:
            note("guard: no rank holds what another holds (dp=1), so only gradients are checked")

    @property
    def wires(self) -> Wires:
        """Those of the player inside."""
        return self.inner.wires

    def play(self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        """As the player inside does it."""
        if row is not self.run.row or self.run.step % self.every:
            return self.inner.play(row, leaves, weight, seed)
        self.copies.check()
        if self.reproducible is None:
            self._find_out(leaves, weight, seed)
        if not self.reproducible:
            return self.inner.play(row, leaves, weight, seed)
        chosen = sampled(self.run.seed, self.run.step, len(leaves))
        wanted = self.alone.play(leaves[chosen], weight, seed)
        with _Watch(self.run, self.inner, row, chosen) as watch:
            losses = self.inner.play(row, leaves, weight, seed)
        self._compare(chosen, wanted, watch.line(losses[chosen]))
        return losses

    def _find_out(self, leaves: Sequence[Leaf], weight: float, seed: int | None) -> None:
        """Whether this device gives the same bits each time: two of three at least, on every rank."""
        lines = [self.alone.play(leaves[0], weight, seed) for _ in range(3)]
        same = any(torch.equal(lines[i], lines[j]) for i, j in ((0, 1), (1, 2), (0, 2)))
        votes = self.run.mesh.world.all_gather(
            torch.tensor([same], device=self.wires.device, dtype=torch.int64)
        )
        self.reproducible = bool(votes.all())
        if not self.reproducible:
            self.note("guard: this device gives another gradient each time, so only replicas are compared")

    def _compare(self, leaf: int, wanted: Tensor, got: Tensor) -> None:
        """Every rank: [loss, gradients] made twice. The rank to blame raises, the others wait to be stopped."""
        run, world = self.run, self.run.mesh.world
        wrong = (wanted != got).nonzero().flatten().tolist()
        stage = run.mesh.at["pp"]
        own = torch.tensor([[bool(wrong), stage]], dtype=torch.int64, device=self.wires.device)
        table = world.all_gather(own).tolist()
        bad = [rank for rank, (differs, _) in enumerate(table) if differs]
        if not bad:
            return
        speaker = max(bad, key=lambda rank: (table[rank][1], -rank))  # backward begins at the last stage
        if run.mesh.rank != speaker:
            world.barrier()
            return
        raise _error(run, leaf, wrong, bad)


def sampled(seed: int, step: int, leaves: int) -> int:
    """Which of a rank's micro-batches is computed twice in a checked step."""
    return random.Random(f"guard {seed} {step}").randrange(leaves)


def _error(run: Run, leaf: int, wrong: Sequence[int], bad: Sequence[int]) -> UserCodeError:
    names = [run.local.slots[i - 1].name for i in wrong if i]
    if 0 in wrong:
        where = "the loss differs already: in the forward pass of this replica"
    else:
        more = f", and {len(names) - 1} before it" if len(names) > 1 else ""
        where = f"first in backward: the gradient of {names[-1]}{more}"
    others = [rank for rank in bad if rank != run.mesh.rank]
    also = f" (ranks {', '.join(map(str, others))} differ too)" if others else ""
    return UserCodeError(
        f"step {run.step}: micro-batch {leaf} of this rank, computed twice, gives two gradients{also}",
        where=where,
        likely="a flipped bit in memory, a faulty core, or code that does not compute the same twice",
        fix="start again from the last checkpoint without this machine; --train.guard 0 turns this off",
        rank=run.mesh.rank,
        code="G02",
    )


class _Alone:
    """Plays one micro-batch on its own and forgets its gradients; the step's sums know nothing of it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        inner, stages = run.player, run.mesh.shape.pp
        rows = tuple((Action("F", r, 0), Action("B", r, 0)) for r in range(stages))
        self.row = lower(Timetable(rows, tuple(range(stages)), 1)).rows[run.mesh.at["pp"]]
        sharding = run.local.sharding
        self.player = Player(
            inner.stage,
            inner.wires,
            run.recorder,
            inner.computing,
            # Always as the step's last: what sharding would else keep for later could not be forgotten.
            lambda last, losses: sharding.before_backward(True),
        )

    def play(self, leaf: Leaf, weight: float, seed: int | None) -> Tensor:
        """Checksums of the loss and of each slot's gradient, int64 [1 + slots]."""
        with _Watch(self.run, self.player, self.row, 0) as watch:
            losses = self.player.play(self.row, [leaf], weight, seed)
        self.run.local.drop_gradients()
        return watch.line(losses[0])


class _Watch:
    """While entered: checksums of the gradients that the backward of one micro-batch makes, before they are added."""

    def __init__(self, run: Run, player: Player, row: Sequence[Action], micro: int) -> None:
        self.run, self.player = run, player
        self._place = [action.micro for action in row if action.kind == "B"].index(micro)
        self._backwards = -1
        self._sums: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._hooked: set[str] = set()

    def line(self, loss: Tensor) -> Tensor:
        """int64 [1 + slots]: of the loss, then of each gradient, 0 where none was made."""
        nothing = torch.zeros((), dtype=torch.int64, device=loss.device)
        sums = [self._sums.get(slot.name, nothing) for slot in self.run.local.slots]
        return torch.stack([checksum(loss), *sums])

    def __enter__(self) -> "_Watch":
        self._told, self.player.before_backward = self.player.before_backward, self._about_to
        live = {slot.name: slot.live for slot in self.run.local.slots}
        for name, parameter in live.items():
            if not isinstance(parameter, DTensor):
                self._hook(name, parameter)
        if any(isinstance(parameter, DTensor) for parameter in live.values()):
            # FSDP2 shows autograd gathered parameters, which modules hold only while they compute.
            for path, module in self.player.stage.named_modules():
                self._handles.append(module.register_forward_pre_hook(self._entering(path)))
        return self

    def __exit__(self, *_: object) -> None:
        self.player.before_backward = self._told
        for handle in self._handles:
            handle.remove()

    def _about_to(self, last: bool, losses: Tensor) -> None:
        self._backwards += 1
        self._told(last, losses)

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

        def made(grad: Tensor) -> None:
            if self._backwards == self._place:
                total = checksum(grad)
                self._sums[name] = self._sums[name] + total if name in self._sums else total

        self._handles.append(parameter.register_hook(made))
