"""Who computes how many micro-batches of a step: what lock-step policies say of it. No torch."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field, field_validator

from unisono.plan.grammar import member
from unisono.programs.schedules import Unflushed
from unisono.spec.errors import Problem
from unisono.spec.training import Natural
from unisono.sync import Policy


class AssigningPolicy(Policy):
    """A policy under which replicas may compute unlike numbers of micro-batches, and the step remains the same."""

    balance: Natural = Field(
        default=0,
        description="steps from one look at the replicas' speeds, by which micro-batches are assigned; 0: none",
    )
    speeds: str = Field(
        default="",
        description="of the replicas, as 2/1/1: micro-batches are assigned by them at the start; empty: alike",
    )

    @field_validator("speeds")
    @classmethod
    def _positive(cls, speeds: str) -> str:
        try:
            values = [float(word) for word in speeds.split("/") if speeds]
        except ValueError:
            values = [0.0]
        if not all(0.0 < value < float("inf") for value in values):
            raise ValueError("a number above 0 for each replica, as 2/1/1")
        return speeds

    @property
    def look_every(self) -> int:
        return self.balance

    @property
    def resizes(self) -> bool:
        return not self.balance and not self.speeds

    @property
    def replica_speeds(self) -> tuple[float, ...]:
        return tuple(float(word) for word in self.speeds.split("/") if word)

    def among(self, text: str, replicas: int) -> str:
        if not self.speeds or len(self.replica_speeds) == replicas:
            return text
        return _without(text, "speeds")

    def steady(self, text: str) -> str:
        return _without(text, "balance") if self.balance and not self.leafwise else text

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        """As many speeds as replicas, and a timetable for whatever number of micro-batches one of them gets."""
        if self.speeds and len(self.replica_speeds) != plan.dp:
            what = f"sync={plan.sync} gives {len(self.replica_speeds)} speeds, and dp={plan.dp}"
            yield Problem(
                "P16", what, "plan.sync, plan.dp", "a speed for each replica, as speeds=2/1/1 with dp=3"
            )
        schedule = member("schedule", plan.schedule)
        if not (self.speeds or self.balance) or schedule is None or plan.pp == 1:
            return
        why = "plays on over the ends of steps" if isinstance(schedule, Unflushed) else ""
        if not all(schedule.serves(plan.pp, micros) for micros in range(1, batch.micros * plan.dp)):
            why = "has timetables for some numbers alone"
        if why:
            what = f"sync={plan.sync} gives replicas unlike numbers of micro-batches, schedule={plan.schedule} {why}"
            yield Problem("P16", what, "plan.sync, plan.schedule", "schedule=1f1b or gpipe")


def _without(text: str, key: str) -> str:
    """A policy as a plan says it, without one of its options: _without("canonical:shards=2,balance=5", "balance")."""
    name, _, options = text.partition(":")
    kept = [option for option in options.replace(":", ",").split(",") if option.partition("=")[0] != key]
    return f"{name}:{','.join(kept)}" if kept else name
