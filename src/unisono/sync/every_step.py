"""Lock-step: every replica's gradient is summed in every step, through the codec, while backward still runs.

Fidelity: ROUNDING (the sum over replicas has another order than one device's), as far as the codec loses nothing.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from unisono.spec.fidelity import Fidelity
from unisono.spec.training import NotNegative
from unisono.spec.work import Call, Work
from unisono.sync import Sync, Verdict
from unisono.sync._leaves import AssigningPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from unisono.codecs import Coder
    from unisono.comm.bucket import Bucket
    from unisono.comm.group import Group


class EveryStep(AssigningPolicy):
    """Every step, the sum of all gradients, while backward still runs."""

    name = "every_step"
    fidelity = Fidelity.ROUNDING
    alone = True

    bucket: NotNegative | Literal["auto"] = Field(default=0.0, description="MiB; auto: by the links; 0: 25")

    def work(self, gradient_bytes: int, dp: int) -> Work:
        return Work((Call("dp", "all_reduce", 2 * gradient_bytes * (dp - 1) // dp),))

    def bind(self, slots: Sequence[Any], group: "Group", codec: "Coder") -> "EveryStepSync":
        from unisono.sync._bucket import sized

        return sized(EveryStepSync(group, codec, slots), self.bucket, slots)


class EveryStepSync(Sync):
    """Sums over `dp`, bucket by bucket, overlapped with backward."""

    def __init__(self, dp: "Group", codec: "Coder | None" = None, slots: Sequence[Any] = ()) -> None:
        from unisono.codecs.plain import PlainCoder
        from unisono.sync._drive import Drive

        codec = codec or PlainCoder()
        self.dp, self.shares, self.cap = dp, bool(codec.keeps), codec.cap
        params = {slot.name: slot.master for slot in slots if slot.live.requires_grad}
        self._drive = Drive(codec, dp, params)
        self.kept = self._drive.kept

    def grad_ready(self, bucket: "Bucket") -> None:
        if self.dp.size > 1:
            self._drive.begin(bucket)

    def settle(self) -> Verdict:
        self._drive.finish()
        return Verdict.APPLY

    def after_update(self, step: int) -> None:
        self._drive.kept.settled()

    def undone(self) -> None:
        self._drive.kept.undo()

    def metrics(self) -> "Mapping[str, Any]":
        return self._drive.sampler.take_error()

    def state(self) -> "Mapping[str, Tensor]":
        return self._drive.state

    def is_private(self, key: str) -> bool:
        return self.private or key in self._drive.kept.private
