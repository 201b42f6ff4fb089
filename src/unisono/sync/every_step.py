"""Lock-step: every replica's gradient is summed in every step, while backward still runs.

Fidelity: ROUNDING (the sum over replicas has another order than one device's).
"""

from unisono.comm.bucket import Bucket
from unisono.comm.group import Group, Pending
from unisono.spec.fidelity import Fidelity
from unisono.sync.base import Sync, Verdict

FIDELITY = Fidelity.ROUNDING


class EveryStep(Sync):
    """Plain sums over `dp`, bucket by bucket, overlapped with backward."""

    def __init__(self, dp: Group) -> None:
        self.dp = dp
        self._under_way: list[Pending] = []

    def weigh(self, count: int) -> float:
        return 1.0 / (count * self.dp.size)

    def grad_ready(self, bucket: Bucket) -> None:
        self._under_way.append(self.dp.start_all_reduce(bucket.flat))

    def settle(self) -> Verdict:
        if self._under_way and self.dp.size > 1:
            with self.dp.recorder.span("comm", axis="dp", op="all_reduce", exposed=True):
                for pending in self._under_way:
                    pending.wait()
        self._under_way.clear()
        return Verdict.APPLY

    def after_update(self, step: int) -> None:
        return None
