"""The samples of a step: of global batch, micro-batch and micro-batches the third follows from two."""

from dataclasses import dataclass
from typing import Any

from unisono.plan.fields import PlanFields
from unisono.spec.errors import Problem


@dataclass(frozen=True, slots=True)
class Batch:
    """The sum of a step, in samples: global_batch = micro_batch * micros * replicas, replicas = dp * shard."""

    global_batch: int
    micro_batch: int
    micros: int
    replicas: int

    @property
    def leaves(self) -> int:
        """Micro-batches of one step, over all replicas."""
        return self.global_batch // self.micro_batch

    def __str__(self) -> str:
        return (
            f"global_batch {self.global_batch} = micro_batch {self.micro_batch}"
            f" x micros {self.micros} x replicas {self.replicas}"
        )


def batch_of(plan: PlanFields, train: Any) -> tuple[Batch | None, Problem | None]:
    """The step's batch, or what is wrong with it.

    Of global_batch, micro_batch and micros the third follows from two. What was not given falls back in this order:
    micros to 1 when micro_batch is not given either, global_batch to its default unless the other two are given.
    """
    replicas, micro, micros = plan.replicas, train.micro_batch, plan.micros
    total = train.global_batch
    if micro is not None and micros is not None and "global_batch" not in train.model_fields_set:
        total = micro * micros * replicas
    if micro is None:
        micros = micros or 1
        return _derive(total, None, micros, replicas)
    return _derive(total, micro, micros, replicas)


def _derive(
    total: int, micro: int | None, micros: int | None, replicas: int
) -> tuple[Batch | None, Problem | None]:
    known = (micro or 1) * (micros or 1) * replicas
    keys = (
        ("train.global_batch",)
        + (("train.micro_batch",) if micro else ())
        + (("plan.micros",) if micros else ())
    )
    if micro is not None and micros is not None and known != total:
        what = f"global_batch {total} is not micro_batch {micro} x micros {micros} x replicas {replicas} = {known}"
        fix = f"--train.global_batch {known}"
        if total % (micro * replicas) == 0:
            fix += f", or micros={total // (micro * replicas)}"
        return None, Problem("P11", what, ", ".join(keys), fix)
    if total % known:
        sums = f"micro_batch {micro or '?'} x micros {micros or '?'} x replicas {replicas}"
        below, above = total // known * known, (total // known + 1) * known
        near = f"{below} or {above}" if below else f"{above}"
        what = f"global_batch {total} = {sums} has no whole answer: {total} is not a multiple of {known}"
        return None, Problem(
            "P11", what, ", ".join((*keys, "plan.dp")), f"--train.global_batch {near}, or other factors"
        )
    left = total // known
    return Batch(total, micro or left, micros or left, replicas), None
