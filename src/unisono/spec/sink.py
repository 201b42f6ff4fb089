"""Sinks: observers with an output, one file a member of `train/sinks`. They get what a step did, and change nothing.

    class Dots(Sink):
        \"""A dot for each step, in dots.txt.\"""
        name = "dots"
        def open(self, run): return DotsWriter(run.run_dir / "dots.txt", run.step)

`[out] track = ["csv", "mine.py:Dots"]` opens them beside those that every run has. No torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from unisono.observe.span import Recorder
from unisono.spec.family import Family, Member


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step on one rank.

    step: the first of a run is 1. loss: nats per target over the global batch. grad_norm: before clipping. tokens:
    targets over all ranks. times: seconds by part (`observe.span.PARTS`), which add up to `seconds` of wall time but
    for what was hidden. nbytes: sent by this rank, by "axis.operation". mem_mib: peak memory, up to half a second old.
    says: what else there is to tell, by name. ledger: the same bytes by "axis/operation/algorithm/codec", the last two
    empty where there is none, or where nobody knows. start: Unix time in seconds at which the rank began the step, on
    the clock that `clock` describes. calls: a row for each collective, see `observe.calls.rows`; calls_left_out: how
    many there are none for. modules: seconds of their own in forward and backward, of modules that were timed.
    host: `cpu_s queue_s gc_s faults between_s save_s eval_s` as `observe.host_time` has them, and where the step was
    looked at `kernels`, see `train.watch.kernels`.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    times: Mapping[str, float]
    nbytes: Mapping[str, int]
    mem_mib: float
    says: Mapping[str, Any] = field(default_factory=dict)
    ledger: Mapping[str, int] = field(default_factory=dict)
    start: float = 0.0
    clock: Mapping[str, float] = field(default_factory=dict)
    calls: Sequence[Sequence[Any]] = ()
    calls_left_out: int = 0
    modules: Mapping[str, Sequence[float]] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a sink is told when it is opened on a rank. coords: the rank's place in the mesh. step: updates made before;
    the first step to come is one more. steps: of the whole run. recorder: the rank's spans. collective:
    how the replicas' collectives are done, and why so. recipe: its sections and keys, as JSON values. plan: as text.
    note: says a line on the user's screen. live: the run itself, `train.step.run.Run`, for who looks at its modules and
    tensors."""

    run_dir: Path
    rank: int
    world: int
    host: str
    backend: str
    coords: Mapping[str, int]
    step: int
    steps: int
    recorder: Recorder
    collective: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""
    note: Callable[[str], None] = lambda text: None
    live: Any = None


class Observer(ABC):
    """Sees every step of one rank. After an OSError of `observe` the same steps come again with the next ones;
    a run does not end well before they were taken."""

    def ended(self, step: int, stop: bool) -> None:
        """At once after step `step`. stop: it was the last one, as asked. To be quick: the next step waits."""
        return None

    def stepped(self, step: int, values: Mapping[str, Any]) -> None:
        """At once after step `step`, and not half a second later as `observe`: loss, lr, grad_norm, and what else there
        is to tell. To be quick: the next step waits."""
        return None

    def validated(self, step: int, values: Mapping[str, float]) -> None:
        """A validation after step `step`: the loss and the metrics, by name. To be quick: training waits."""
        return None

    def saved(self, step: int, checkpoint: str) -> None:
        """A checkpoint after step `step` is whole on disk: its path in the run folder, `checkpoints/step-000200`."""
        return None

    def close(self) -> None:
        """The run is over, in whatever way."""
        return None

    @abstractmethod
    def observe(self, steps: Sequence[StepRecord]) -> None:
        """The steps that ended since the last call, at least one; calls are about half a second apart."""


class Sink(Member, ABC):
    """A sink's declaration. every_rank: each rank has one, else rank 0 alone. follows: it is a tracker, which another
    process brings up to date from the run folder."""

    every_rank: ClassVar[bool] = False
    follows: ClassVar[bool] = False

    @abstractmethod
    def open(self, run: RunFacts) -> Observer:
        """The live sink. What it wrote of steps from `run.step` on, before the run was resumed there, goes."""


SINKS: Family[Sink] = Family("sink", "unisono.train.sinks", Sink, "out.track", ("C02", "C02"))
