"""The gradient noise scale (McCandlish et al., "An empirical model of large-batch training", 2018, appendix A).

A micro-batch's gradient is the true one with noise; the mean over n of them has an n-th of its variance. So from the
squared norms of both, noise and signal are known without bias, each step anew, and one number more crosses the ranks,
in a message that is sent anyway. It does not matter which rank computes which micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.parallel.params import values_of
from unisono.spec.errors import UsageError
from unisono.sync import Verdict
from unisono.train.step.numbers import Numbers
from unisono.train.step.run import Run


class Estimate(NamedTuple):
    """noise: trace of the covariance of one sample's gradient. signal: squared norm of the true gradient. Neither is
    biased, so each may be below 0."""

    noise: float
    signal: float


def estimate(squares: float, norm: float, leaves: int, size: int) -> Estimate:
    """Of one step of `leaves` micro-batches of `size` samples, at least 2. squares: sum over them of the squared norm
    of what each adds to the gradient, an n-th of its own. norm: of their sum, the gradient."""
    mean, whole = leaves * squares, norm * norm  # mean: of the micro-batches' own squared norms
    noise = (mean - whole) / (1.0 / size - 1.0 / (leaves * size))
    return Estimate(noise, (leaves * whole - mean) / (leaves - 1))


class LeafSquares:
    """The sum over this rank's micro-batches of the squared norm of what each adds to the gradient, as far as its
    tensors count in their replica. A call gives it, [] float64, and begins anew."""

    def __init__(self, run: Run) -> None:
        self.device, self.factor = run.local.device, run.update.scaler.factor
        self._norms: list[Tensor] = []
        self._uses: dict[
            int, Tensor
        ] = {}  # of a tied weight whose other use has no gradient yet in this backward
        tied = {slot.name: number for number, tie in enumerate(run.gradients.ties) for slot in tie.here}
        self._hooks = [
            slot.live.register_hook(self._hook(tied.get(slot.name)))
            for slot in run.gradients.slots
            if slot.name in tied or slot.counted(run.mesh.at)
        ]

    def _hook(self, tie: int | None) -> Callable[[Tensor], None]:
        """Is given what one backward adds to the gradient, before it is added. tie: the number of the tied weight."""

        def alone(grad: Tensor) -> None:
            grad = values_of(grad.coalesce() if grad.is_sparse else grad).detach()
            wide = torch.promote_types(grad.dtype, torch.float32)
            self._norms.append(torch.linalg.vector_norm(grad, dtype=wide))

        def one_use(grad: Tensor) -> None:
            if (other := self._uses.pop(at, None)) is None:
                self._uses[at] = grad.detach()
            else:
                alone(other + grad)

        if tie is None:
            return alone
        at = tie
        return one_use

    @torch.no_grad()
    def __call__(self) -> Tensor:
        if not self._norms:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        total = torch.stack([norm.double() for norm in self._norms]).square().sum()
        self._norms.clear()
        return total if self.factor is None else total / self.factor.double().square()

    def release(self) -> None:
        """Hear of no more gradients."""
        for hook in self._hooks:
            hook.remove()


class NoiseScale:
    """Exponential means of noise and signal, of which checkpoints keep both. `attach` has a live run measure them."""

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.noise, self.signal = torch.zeros(2, dtype=torch.float64).unbind()
        self._run: Run | None = None
        self._squares: LeafSquares | None = None

    @property
    def value(self) -> float | None:
        """The noise scale in samples; None while noise hides the signal, or before the first step."""
        noise, signal = float(self.noise), float(self.signal)
        return max(0.0, noise) / signal if signal > 0.0 else None

    def attach(self, run: Run) -> Run:
        """The run, which measures from now on. Called when its ranks have met, each time. Raises UsageError P44 where
        a tied weight lies on two ranks."""
        if run.mesh.pp.size > 1 and run.local.owners:
            alias, owner = next(iter(run.local.owners.items()))
            raise UsageError(
                f"{alias} and {owner} are one weight on two stages: no rank has its gradient of a micro-batch",
                where="plan.pp, noise_scale",
                fix="pp=1, or a model without tied weights",
                code="P44",
            )
        if self._squares is not None:
            self._squares.release()
        self._run, self._squares = run, LeafSquares(run)
        run.gradients.carry(self._squares)
        keeps = {**run.update.keeps, "noise": self.noise, "signal": self.signal}
        after = (*run.update.after, self.tell)
        run.update = replace(run.update, observe=self.observe, keeps=keeps, after=after)
        return run

    def observe(self, numbers: Numbers) -> None:
        """Take in a step whose update is made."""
        if self._run is None or self._run.of_leaves < 2 or numbers.squares is None:
            return
        now = estimate(numbers.squares, numbers.norm, self._run.of_leaves, self._run.replica.micro_batch)
        for kept, new in ((self.noise, now.noise), (self.signal, now.signal)):
            kept.mul_(self.smoothing).add_((1.0 - self.smoothing) * new)

    def tell(self, verdict: Verdict) -> Mapping[str, Any]:
        """What a step's line of metrics says."""
        return {"noise_scale": self.value}
