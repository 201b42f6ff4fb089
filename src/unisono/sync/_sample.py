"""How far a codec's sum is from the plain one: now and then a few elements are added up as they are too.

A sample is a stretch of one bucket, another one each time, the same on all replicas. It is taken of what the codec is
given, before the exchange, and held beside what the exchange gave. What it sends counts as the codec `SAMPLED`.
"""

import torch
from torch import Tensor

from unisono.comm.group import Group

EVERY = 32
"""Steps from one sample to the next; the first is of the second step, when all buckets have been seen."""
MOST, LEAST, SHARE = 1 << 16, 64, 1000
"""Elements of a sample: one of `SHARE` of the gradient, within these bounds. Of a plain sum's bytes that is 0.003 %, of
those of a codec that sends a hundredth of them 0.3 %."""
SAMPLED = "(sample)"


class ErrorSampler:
    """Samples the error of one rank's buckets. error: the norm by which the codec's sum was off, over the norm of the
    plain sum; None before the first, and after it was told. Every member of the group calls each method, in one order,
    or it hangs."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.error: float | None = None
        self._steps = 0
        self._seen: list[int] = []  # elements of the buckets of this step
        self._sizes: list[int] = []  # and of the one before
        self._taken: tuple[Tensor, Tensor] | None = None  # as given, and where its sum will lie

    def see(self, flat: Tensor) -> None:
        """A bucket is about to be exchanged."""
        begun = sum(self._seen)
        self._seen.append(len(flat))
        if self._steps % EVERY != 1 or self._sizes[: len(self._seen)] != self._seen:
            return
        whole = sum(self._sizes)
        numel = min(MOST, max(LEAST, whole // SHARE))
        at = self._steps // EVERY * numel % whole - begun
        if 0 <= at < len(flat):
            place = flat[at : at + numel]
            self._taken = place.clone(), place

    def take_error(self) -> dict[str, float]:
        """The error of the last sample, once."""
        error, self.error = self.error, None
        return {} if error is None else {"codec_error": error}

    def compare(self) -> None:
        """All exchanges of a step are over."""
        self._sizes, self._seen, taken, self._taken = self._seen, [], self._taken, None
        self._steps += 1
        if taken is None:
            return
        plain, coded = taken
        self.group.recorder.codec = SAMPLED
        self.group.all_reduce(plain)
        self.group.recorder.codec = ""
        norm = torch.linalg.vector_norm(plain)
        self.error = float(torch.linalg.vector_norm(coded - plain) / norm) if norm else 0.0
