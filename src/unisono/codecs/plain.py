"""Gradients as they are: one sum over the replicas."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from unisono.codecs import BucketMemory, Codec, Coder, Exchange, Sum
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from torch import Size, Tensor


class Plain(Codec):
    """Nothing is encoded: gradients are added up as they are."""

    name = "plain"
    fidelity = Fidelity.EXACT
    linear = True
    alone = True
    elementwise = True

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        nbytes = sum(map(prod, shapes)) * itemsize
        return Work((Call("dp", "all_reduce", 2 * nbytes * (dp - 1) // dp),))

    def bind(self) -> "PlainCoder":
        return PlainCoder()


class PlainCoder(Coder):
    """One sum, where the gradients are."""

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        return (yield Sum(grad))
