"""A part of a network under `tp`: what the rank with most of its units computes and holds, and what ranks add up.

Column and row products as in Megatron-LM (Shoeybi et al., 2019), without positions that could be dealt between them.
"""

from collections.abc import Iterator
from dataclasses import replace

from unisono.plan import Plan
from unisono.planner.work.stage import ITEM, Transfer
from unisono.spec.workload import Channels, Product, WorkPart


def longest_share(part: WorkPart, tp: int) -> WorkPart:
    """The part as the rank with most units has it: the first one, where they are not dealt evenly."""
    own = part.channels
    if own is None or tp == 1:
        return part
    most = -(-own.units // tp)

    def here(size: int) -> int:
        return size * most // own.units

    products = tuple(_dealt(one, own.units, most) for one in part.products)
    return replace(
        part,
        parameters=part.parameters - own.parameters + here(own.parameters),
        flops=sum(one.flops for one in products),
        activations=part.activations - own.activations + here(own.activations),
        products=products,
        moved=part.moved - own.moved + here(own.moved),
    )


def _dealt(product: Product, units: int, most: int) -> Product:
    if product.dealt == "columns":
        return product._replace(columns=product.columns * most // units)
    if product.dealt == "inner":
        return product._replace(inner=product.inner * most // units, read=product.read * most // units)
    return product


def crossings(
    own: Channels, plan: Plan, samples: float, *, backward: bool, wide: bool, again: bool = False
) -> Iterator[Transfer]:
    """Sums over the ranks of tp in one pass over a part. wide: what is entered is fp32 under autocast. again: of a
    forward pass that is computed again."""
    if plan.tp == 1:
        return
    item = ITEM[plan.precision]
    if backward and own.entered:
        fp32 = wide and not plan.arithmetic.narrow
        yield Transfer("tp", "all_reduce", float(own.entered * samples * (max(4, item) if fp32 else item)))
    elif not backward and (own.again or not again):
        yield Transfer("tp", "all_reduce", float(own.left * samples * item))
