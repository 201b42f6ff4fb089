"""Changes to a plan that need less memory on as many ranks."""

from collections.abc import Iterator
from dataclasses import replace

from unisono.plan import Plan

AWAY = ("optimizer", "params", "params+activations")
"""What may lie in the host's memory, the least first."""


def remedies(plan: Plan, micro_batch: int, micros: int, n_layer: int) -> Iterator[tuple[str, Plan, int, int]]:
    """(what to change, the plan, its micro-batch, its micros) that need less memory on as many ranks."""
    for mode in ("selective", "full"):
        if plan.recompute == "none" or (plan.recompute == "selective" and mode != "selective"):
            yield f"recompute={mode}", replace(plan, recompute=mode), micro_batch, micros
    for size in _smaller(micro_batch):
        many = micros * micro_batch // size
        yield f"micro_batch={size}", replace(plan, micros=many), size, many
        if size == 1 and plan.recompute == "none":
            changed = replace(plan, micros=many, recompute="full")
            yield f"micro_batch={size} recompute=full", changed, size, many
    if plan.dp > 1:
        for zero in (1, 2, 3):
            shard = plan.dp * plan.shard
            if plan.shard == 1 or shard > plan.shard:
                yield (
                    f"dp=1 shard={shard} zero={zero}",
                    replace(plan, dp=1, shard=shard, zero=zero),
                    micro_batch,
                    micros,
                )
    elif plan.shard > 1 and plan.zero < 3:
        for zero in range(plan.zero + 1, 4):
            yield f"zero={zero}", replace(plan, zero=zero), micro_batch, micros
    for axis in ("tp", "pp"):
        for spare in ("dp", "shard"):
            size = getattr(plan, axis) * 2
            allowed = size <= 8 if axis == "tp" else size <= n_layer
            if getattr(plan, spare) % 2 == 0 and allowed:
                smaller = {axis: size, spare: getattr(plan, spare) // 2}
                changed = replace(plan, **smaller, micros=micros * 2)
                said = f"{axis}={size} {spare}={smaller[spare]}"
                yield said, changed, micro_batch, micros * 2
                yield f"{said} recompute=full", replace(changed, recompute="full"), micro_batch, micros * 2


def put_away(plan: Plan, micro_batch: int, micros: int) -> Iterator[tuple[str, Plan, int, int]]:
    """Yield changes that offload more and more of the model and recompute every block."""
    for what in AWAY if plan.offload == "none" else ():
        changed = replace(plan, offload=what, recompute="full")
        yield f"offload={what} recompute=full", changed, micro_batch, micros


def _smaller(size: int) -> list[int]:
    """Its half, the half of that, and so on while it is even; and 1."""
    sizes: list[int] = []
    while size > 1:
        size = size // 2 if size % 2 == 0 else 1
        sizes.append(size)
    return sizes
