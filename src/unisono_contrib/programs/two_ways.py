"""One rank's order where micro-batches come from both ends at once (DualPipe; DeepSeek-AI, 2024, arXiv 2412.19437)."""

from collections import deque
from collections.abc import Sequence

from unisono.programs.pipeline import Action


def row(
    place: int, half: int, near: tuple[int, Sequence[int]], far: tuple[int, Sequence[int]]
) -> tuple[list[Action], list[Action]]:
    """The actions, and which forwards run together with the backward that follows them.

    `place` of `half` is the distance from an end of the pipeline; `near` is (stage, micro-batches) of the way that
    enters at that end, `far` of the other one. The eight steps are those of the published code; W is apart only where
    it can fill a bubble. Both ways serve the same number of micro-batches, at least 2 half.
    """
    done = _Row((near[0], far[0]), (near[1], far[1]))
    below = half - 1 - place
    for _ in range(2 * below):
        done.forward(0)
    for _ in range(place + 1):
        done.forward(0)
        done.forward(1)
    for _ in range(below):
        done.backward(1, apart=True)
        done.weight()
        done.forward(1)
    for turn in range(len(near[1]) - 2 * half + place + 1):
        # In the middle the first pair is not overlapped, so that its results leave sooner and the others wait less.
        done.both(0, 1, overlapped=turn > 0 or below > 0)
        done.both(1, 0)
    for _ in range(below):
        done.backward(1)
        done.both(1, 0)
    # From the middle of this step on, W are left for the end.
    for turn in range(2 * (place + 1)):
        done.backward(1 - turn % 2, apart=turn > place)
    for _ in range(below):
        done.weight()
        done.backward(0, apart=True)
    while done.owed:
        done.weight()
    return done.actions, done.overlapped


class _Row:
    """Actions as they are added; the next micro-batch of each way is counted here."""

    def __init__(self, stages: tuple[int, int], micros: tuple[Sequence[int], Sequence[int]]) -> None:
        self.stages = stages
        self.forwards, self.backwards = (iter(micros[0]), iter(micros[1])), (iter(micros[0]), iter(micros[1]))
        self.actions: list[Action] = []
        self.overlapped: list[Action] = []
        self.owed: deque[Action] = deque()

    def forward(self, way: int) -> None:
        self.actions.append(Action("F", self.stages[way], next(self.forwards[way])))

    def backward(self, way: int, apart: bool = False) -> None:
        stage, micro = self.stages[way], next(self.backwards[way])
        self.actions.append(Action("B", stage, micro))
        self.owed.append(Action("W", stage, micro))
        if not apart:
            self.weight()

    def weight(self) -> None:
        self.actions.append(self.owed.popleft())

    def both(self, forward: int, backward: int, overlapped: bool = True) -> None:
        self.forward(forward)
        if overlapped:
            self.overlapped.append(self.actions[-1])
        self.backward(backward)
