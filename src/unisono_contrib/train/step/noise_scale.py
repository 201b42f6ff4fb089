"""The gradient noise scale (McCandlish et al., "An empirical model of large-batch training", 2018, appendix A).

A micro-batch's gradient is the true one with noise; the mean over n of them has an n-th of its variance. So from the
squared norms of both, noise and signal are known without bias, each step anew, and one number more crosses the ranks,
in a message that is sent anyway. It does not matter which rank computes which micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.parallel.params import values_of
from unisono.parallel.shard import gathered_of
from unisono.spec.errors import UsageError
from unisono.spec.words import listed
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
    tensors count in their replica. A call gives it, [] float64, and begins anew. Every rank makes one, and calls it
    after its last backward, or it hangs.

    Ranks of `shard` have micro-batches of their own, each of which has its whole gradient before these are added up.
    Ranks of `tp` have the same ones: of a tensor that is cut, a part of the gradient each; of one that each sees
    from some positions, a part of its sum, and these parts are added up first.
    """

    def __init__(self, run: Run) -> None:
        self.device, self.factor, self.tp = run.local.device, run.update.scaler.factor, run.mesh.tp
        self._norms: list[Tensor] = []
        # Of a tied weight whose other use has no gradient yet in this backward.
        self._uses: dict[int, Tensor] = {}
        tied = {
            slot.name: (number, tie) for number, tie in enumerate(run.gradients.ties) for slot in tie.here
        }
        whole: dict[nn.Parameter, nn.Parameter] = {}
        for i in run.local.sharding if run.mesh.shape.shard > 1 else ():
            whole |= gathered_of(run.local.stages[i])
        self._parts: dict[str, list[Tensor]] = {}
        self._hooks = []
        for slot in run.gradients.slots:
            number, tie = tied.get(slot.name, (None, None))
            first = tie.here[0] if tie is not None else slot
            if first.sum_over:
                self._parts.setdefault(first.name, [])
            # Ranks of `shard` hold the same rows of tables, and each has those of its own micro-batches.
            elif not replace(first, copy=first.copy and not first.sparse).counted(run.mesh.at):
                continue
            take = self._keep(first.name) if first.sum_over else self._measure
            hook = take if number is None else self._join(number, take)
            self._hooks.append(whole.get(slot.live, slot.live).register_hook(hook))

    def _measure(self, grad: Tensor) -> None:
        """Is given what one backward adds to the gradient, before it is added."""
        grad = values_of(grad.coalesce() if grad.is_sparse else grad).detach()
        wide = torch.promote_types(grad.dtype, torch.float32)
        self._norms.append(torch.linalg.vector_norm(grad, dtype=wide))

    def _join(self, number: int, take: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Both uses of a tied weight are one gradient. number: of the weight."""

        def one_use(grad: Tensor) -> None:
            if (other := self._uses.pop(number, None)) is None:
                self._uses[number] = grad.detach()
            else:
                take(other + grad)

        return one_use

    def _keep(self, name: str) -> Callable[[Tensor], None]:
        """Of a weight whose gradient is a sum over `tp`. A copy: what comes later is added to the tensor itself."""

        def keep(grad: Tensor) -> None:
            wide = torch.promote_types(grad.dtype, torch.float32)
            self._parts[name].append(grad.detach().flatten().to(wide, copy=True))

        return keep

    def _add_parts(self) -> None:
        """Add up over `tp` what its ranks have of each micro-batch, in one message."""
        kept = [grad for grads in self._parts.values() for grad in grads]
        if not kept:
            return
        sums = self.tp.all_reduce(torch.cat(kept))
        if self.tp.index == 0:
            self._norms.extend(map(torch.linalg.vector_norm, sums.split([len(grad) for grad in kept])))
        for grads in self._parts.values():
            grads.clear()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        self._add_parts()
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
        a weight's gradient of a micro-batch is nowhere by itself."""
        _check_apart(run)
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


def _check_apart(run: Run) -> None:
    """Raises UsageError P44 for weights whose gradient sums micro-batches before any rank has that of one."""
    if run.mesh.pp.size > 1 and run.local.owners:
        alias, owner = next(iter(run.local.owners.items()))
        raise UsageError(
            f"{alias} and {owner} are one weight on two stages: no rank has its gradient of a micro-batch",
            where="plan.pp, noise_scale",
            fix="pp=1, or a model without tied weights",
            code="P44",
        )
    for slot in run.gradients.slots:
        if slot.sum_over - {"tp"}:
            raise UsageError(
                f"the gradient of {slot.name} is a sum over {listed(sorted(slot.sum_over))}, of several micro-batches",
                where="plan, noise_scale",
                fix="dp=N, or a model without such weights",
                code="P44",
            )
