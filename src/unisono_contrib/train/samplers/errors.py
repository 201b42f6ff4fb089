"""What is wrong with a sampler, or with what it sent."""

from collections.abc import Sequence
from typing import ClassVar

from unisono.spec.errors import UnisonoError


class WeightsNotHeld(UnisonoError):
    """A sampler does not compute with the weights that it was sent. `sampler`, `version` and `tensors` say which."""

    exit = 1
    default_code: ClassVar[str] = "O05"

    def __init__(self, sampler: str, version: int, tensors: Sequence[str], how: str) -> None:
        named = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        super().__init__(
            f"{sampler} does not compute with version {version} of the weights: {how}"
            + (f": {named}" if named else ""),
            where=f"the acknowledgement of version {version}",
            likely="it kept old weights, or loads them in another way than the trainers hold them",
            fix="samples drawn from here on would be of another model; look at how the sampler loads weights",
        )
        self.sampler, self.version, self.tensors = sampler, version, tuple(tensors)


class SampleTooOld(UnisonoError):
    """A sample was drawn from weights that are further behind than the bound allows."""

    exit = 1
    default_code: ClassVar[str] = "O06"

    def __init__(self, sampler: str, version: int, step: int, bound: int) -> None:
        super().__init__(
            f"{sampler} drew the samples of step {step} from version {version}, {step - version} behind, with a"
            f" bound of {bound}",
            where=f"the samples of step {step}",
            likely="it sampled before it took the weights that it had acknowledged",
            fix="a larger bound if samples may be so old",
        )
        self.sampler, self.version, self.step = sampler, version, step


class SamplerLost(UnisonoError):
    """A sampler is gone or silent, and nobody takes its place."""

    exit = 1
    default_code: ClassVar[str] = "L15"

    def __init__(self, sampler: str, why: str) -> None:
        super().__init__(
            f"{sampler} is lost ({why}), and no other one takes its place",
            where="the samplers beside the trainers",
            likely="it was killed as often as a run may lose a worker, a signal has stopped it, or its host is silent",
            fix="read what it printed; the run goes on from its newest checkpoint with --resume",
        )
        self.sampler = sampler
