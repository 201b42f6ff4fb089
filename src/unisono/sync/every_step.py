"""Lock-step: every replica's gradient is summed in every step, while backward still runs.

Fidelity: ROUNDING (the sum over replicas has another order than one device's).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Call, Work
from unisono.sync import Policy, Sync, Verdict

if TYPE_CHECKING:
    from unisono.comm.bucket import Bucket
    from unisono.comm.group import Group, Pending


class EveryStep(Policy):
    """Every step, the sum of all gradients, while backward still runs."""

    name = "every_step"
    fidelity = Fidelity.ROUNDING
    alone = True

    def work(self, gradient_bytes: int, dp: int) -> Work:
        return Work((Call("dp", "all_reduce", 2 * gradient_bytes * (dp - 1) // dp),))

    def bind(self, slots: Sequence[Any], group: "Group", codec: Any) -> "EveryStepSync":
        return EveryStepSync(group)


@dataclass(slots=True)
class _Flight:
    """An all-reduce under way; `landed_ns` is set by whichever thread completes it, 0 until then."""

    pending: "Pending"
    left_ns: int
    landed_ns: int = 0


class EveryStepSync(Sync):
    """Plain sums over `dp`, bucket by bucket, overlapped with backward."""

    def __init__(self, dp: "Group") -> None:
        self.dp = dp
        self._flights: list[_Flight] = []

    def weigh(self, count: float) -> float:
        return 1.0 / (count * self.dp.size)

    def grad_ready(self, bucket: "Bucket") -> None:
        if self.dp.size == 1:
            return
        flight = _Flight(self.dp.start_all_reduce(bucket.flat), time.perf_counter_ns())
        if self.dp.recorder.keep and not bucket.flat.is_cuda:
            _note_landing(flight)
        self._flights.append(flight)

    def settle(self) -> Verdict:
        if self._flights:
            begun = time.perf_counter_ns()
            with self.dp.recorder.span("comm", axis="dp", op="all_reduce", exposed=True):
                for flight in self._flights:
                    flight.pending.wait()
            for flight in self._flights:
                hidden_until = min(flight.landed_ns, begun)
                if hidden_until > flight.left_ns:
                    self.dp.recorder.add(
                        "comm", flight.left_ns, hidden_until, axis="dp", op="all_reduce", exposed=False
                    )
            self._flights.clear()
        return Verdict.APPLY

    def after_update(self, step: int) -> None:
        return None


def _note_landing(flight: _Flight) -> None:
    """Have the time of completion written down; only for steps that are drawn, since it wakes Python once each."""

    def landed(_: object) -> None:
        flight.landed_ns = time.perf_counter_ns()

    future = getattr(flight.pending, "get_future", None)
    if future is not None:
        future().add_done_callback(landed)
