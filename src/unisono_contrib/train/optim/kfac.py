"""K-FAC (Martens & Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", 2015).

The Fisher matrix of a linear layer is close to the Kronecker product of two means: A, of its inputs' products, and G,
of the products of gradients of its outputs. So a step is G⁻¹ · momentum · A⁻¹. Gradients are those of the targets in
the data, which are there anyway (the empirical Fisher), as in kept libraries. One rank has the means of a matrix and
decomposes them (KAISA; Pauloski et al., 2021).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.plan.grammar import named
from unisono.plan.grid import Grid
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.training import Count, MatrixWork, Optimiser, Positive, Share, UpdateSizes
from unisono.train.optim.adamw import AdamW
from unisono_contrib.train.optim._curved import Curved, Roots, counted

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class KFac(Curved):
    """Weights of linear layers in blocks move by their momentum between inverses of two means; all others by AdamW."""

    name: ClassVar[str] = "kfac"
    observed: ClassVar[tuple[str, ...]] = ("left", "right")
    kfac_momentum: Share = Field(default=0.9, description="kfac: decay of the momentum")
    kfac_damping: Positive = Field(
        default=0.3, description="kfac: added to eigenvalues of each mean, as a share of their mean"
    )
    kfac_factor_interval: Count = Field(
        default=1, description="kfac: updates from one that observes layers to the next"
    )
    kfac_rms: bool = Field(
        default=True, description="kfac: give steps the root mean square of AdamW's; else their own"
    )

    @property
    def kept(self) -> int:
        return 1

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Optimiser:
        router = name.endswith(
            ".router.weight"
        )  # which is no linear layer: its loss is that of its choice, too
        return AdamW(betas=self.betas, eps=self.eps) if router else super().for_parameter(name, shape)

    def matrix_work(self, shape: tuple[int, ...]) -> MatrixWork:
        """What each rank sends the owner: the number of its rows, and the upper triangles of both sums."""
        numbers = 1 + sum(n * (n + 1) // 2 for n in self.edges(shape).values())
        return replace(super().matrix_work(shape), observed=numbers / self.kfac_factor_interval)

    def problems(self, plan: Any, model: Any) -> Iterator[Problem]:
        yield from super().problems(plan, model)
        for key, why, fix in _unobservable(plan):
            what = f"optimizer=kfac observes what passes linear layers, and {key}={plan.text(key)} {why}"
            yield Problem("P28", what, f"plan.{key}, train.optimizer", fix)

    def observed_share(self, step: int) -> float:
        before, rest = divmod(step, self.kfac_factor_interval)
        return 0.0 if rest else max(1.0 - self.curvature_decay, 1.0 / (before + 1))

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from unisono_contrib.train.optim._kfac_steps import KfacSteps

        return KfacSteps(
            [dict(group) for group in groups], lr, self.state, self.curvature_interval,
            (self.kfac_momentum, self.curvature_decay), self.kfac_damping, self.kfac_rms,
            self.edges, self.kfac_factor_interval,
        )  # fmt: skip

    def state(self, parameter: "Tensor") -> "dict[str, Tensor]":
        import torch

        eyes = {
            side: torch.eye(len(x), dtype=x.dtype, device=x.device)
            for side, x in self.sides(parameter).items()
        }
        numbers = {key: parameter.new_zeros((), dtype=torch.float32) for key in ("step", "taken")}
        roots = {f"{side}_root": eye.clone() for side, eye in eyes.items()}
        return {**numbers, "momentum_buffer": torch.zeros_like(parameter), **eyes, **roots}

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        keep, rounding, old = self.kfac_momentum, update.rounding, state["momentum_buffer"]
        momentum = keep * old + (1 - keep) * grad
        off = (1 - keep) * error + rounding * (keep * old.abs() + (1 - keep) * grad.abs())
        taken = state["taken"] + float(update.step % self.kfac_factor_interval == 0)
        law = {
            "step": counted(update.step),
            "taken": (taken, taken.new_zeros(())),
            "momentum_buffer": (momentum, off),
            **{side: update.observed[side] for side in self.observed if side in state},
        }
        return self.between(Roots(1.0, self.kfac_damping, self.kfac_rms), update, weight, state, law)


def _unobservable(plan: Any) -> Iterator[tuple[str, str, str]]:
    """(key of the plan, why layers are not observed under what it says, what to say instead)."""
    policy, schedule = named("sync", plan.sync), named("schedule", plan.schedule)
    if policy is not None and (policy.leafwise or policy.virtual > 1):
        yield "sync", "prescribes an order of sums that those of layers do not have", "sync=every_step"
    elif policy is not None and (
        policy.fidelity is Fidelity.LOSSY or policy.rhythm != 1 or policy.update_lag
    ):
        yield "sync", "has updates by more or less than the samples of one step", "sync=every_step"
    if plan.pp > 1 and schedule is not None and (schedule.chains > 1 or not schedule.flushed):
        why = "holds a layer twice" if schedule.chains > 1 else "has samples of several steps on their way"
        yield "schedule", why, "schedule=1f1b"
    if isinstance(plan.tp, Grid):
        yield "tp", "deals rows and columns of a layer at once", "tp=N"
    if plan.chunks > 1:
        yield "tp", "multiplies a layer in chunks", f"tp={plan.tp}"
    if plan.arithmetic.fp8:
        yield "precision", "rounds them to eight bits", "precision=bf16"
