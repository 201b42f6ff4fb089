"""Messages between the stages of one rank and those of others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm.collectives.memory.slots import MemorySlots, slots_of
from unisono.comm.group import Group, Pending
from unisono.comm.pairs import PairQueues, pairs_of
from unisono.observe.span import Recorder
from unisono.parallel.cut import Carry, carry_of, tensors_of
from unisono.programs.pipeline import COMPUTE, RECEIVES, Action

Carried = tuple[Tensor, ...]  # the tensors of a carry


@dataclass(frozen=True, slots=True)
class Wire:
    """The boundary between a stage and the next, of which at least one is here.

    ahead carries activations on, back their gradients. carry: a meta tensor like each that crosses; every one that is
    floating has its gradient sent back. places: of each tensor of the block's carry among these; () where they are it.
    """

    ahead: Group
    back: Group
    carry: Carried
    places: tuple[int, ...] = ()

    def packed(self, carry: Carry) -> Carried:
        """What crosses, of what a block hands on, in the dtypes in which it crosses."""
        tensors = tensors_of(carry)
        once = [tensors[self.places.index(i)] for i in range(len(self.carry))] if self.places else tensors
        return tuple(t.to(like.dtype) for t, like in zip(once, self.carry, strict=True))

    def unpacked(self, crossed: Carried) -> Carry:
        """What the next block is handed, of what crossed."""
        return carry_of(tuple(crossed[i] for i in self.places) if self.places else crossed)


class Post:
    """What one rank sends and receives in a step. wires: by the stage before the boundary. Every rank of the pipeline
    makes it, or it hangs."""

    def __init__(self, wires: Mapping[int, Wire], recorder: Recorder, device: torch.device) -> None:
        self.wires, self.recorder, self.device = wires, recorder, device
        self._sent: list[tuple[Tensor, Pending]] = []  # buffers must live until they have left
        self._older: list[
            tuple[Tensor, Pending]
        ] = []  # of those, what an earlier `finish` has left under way
        self._receiving: dict[
            Action, list[tuple[Tensor, Pending]]
        ] = {}  # receives under way: where each arrives
        self._ways = self._best_ways()

    def says(self) -> str:
        """How messages go, for the start of a run; "" where all are sent over the group itself."""
        return next((way.says() for way in self._ways.values()), "")

    def send(self, tensors: Sequence[Tensor], group: Group, peer: int) -> None:
        """Begin to send; `finish` waits."""
        for x in tensors:
            x = x.contiguous()
            self._sent.append((x, self._ways.get(group, group).start_send(x, peer)))

    def ask_ahead(self, row: Sequence[Action], at: int) -> None:
        """Ask for what the next computation needs before this one begins, so that the wire works meanwhile: large
        messages do not leave before their receiver asks. Each group's receives keep the order of the row."""
        while at < len(row) and row[at].kind not in COMPUTE:
            if row[at].kind in RECEIVES:
                self._receiving[row[at]] = self._ask(row[at])
            at += 1

    def received(self, action: Action) -> list[Tensor]:
        """What `action` receives, asked for now if it was not before."""
        kind = "forward" if action.kind == "RECV_F" else "backward"
        tags = {"micro": action.micro, "stage": action.stage, "way": action.kind[-1]}
        span = self.recorder.span("wait", axis="pp", op="recv", **tags)
        with span:
            arriving = self._receiving.pop(action, None) or self._ask(action)
            span.call = self.recorder.calls.begin("pp", "recv", sum(x.nbytes for x, _ in arriving), kind)
            for _, pending in arriving:
                pending.wait()
        return [x for x, _ in arriving]

    def finish(self, older: bool = False) -> None:
        """Wait until all that was sent has left. older: only what was sent before the last call of this, where the
        receiver may ask for the rest in a later step."""
        waiting = self._older if older else self._older + self._sent
        if waiting:
            with self.recorder.span("wait", axis="pp", op="send"):
                for _, pending in waiting:
                    pending.wait()
        self._sent, self._older = [], self._sent if older else []

    def _ask(self, action: Action) -> list[tuple[Tensor, Pending]]:
        if action.kind == "RECV_F":
            wire = self.wires[action.stage - 1]
            group, carry = wire.ahead, wire.carry
        else:
            wire = self.wires[action.stage]
            group, carry = wire.back, [t for t in wire.carry if t.is_floating_point()]
        rooms = [torch.empty_like(t, device=self.device) for t in carry]
        way = self._ways.get(group, group)
        return [(x, way.start_recv(x, action.peer)) for x in rooms]

    def _best_ways(self) -> dict[Group, MemorySlots | PairQueues]:
        """Choose how each group sends: by a part of shared memory as large as what crosses, or by queues between
        GPUs."""
        most: dict[Group, int] = {}
        for wire in self.wires.values():
            for group in (wire.ahead, wire.back):
                most[group] = max([most.get(group, 0), *(t.nbytes for t in wire.carry)])
        groups = {group: nbytes for group, nbytes in most.items() if isinstance(group, Group)}
        best = {
            group: pairs_of(group, self.device) or slots_of(group, nbytes, self.device)
            for group, nbytes in groups.items()
        }
        return {group: way for group, way in best.items() if way is not None}
