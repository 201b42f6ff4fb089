"""How large the parts of a gradient are that are encoded each by itself, where they contradict each other.

A codec's error is a share of the largest entry of what it encodes: of a replica's gradient, or of a leaf's where each
backward scatters in int8. The bound takes the largest entry of each of t parts to be sqrt(t) times smaller than that
of their sum, as of t random numbers (`bounds.py`). Parts that cancel each other are larger. By how much follows from
the leaves, which one device plays again.
"""

from collections.abc import Mapping
from math import sqrt

from torch import Tensor

from unisono.comm.members import stretches_of
from unisono.config import Resolved


def parts_of(resolved: Resolved, leaves: Mapping[str, Tensor], owners: Mapping[str, str]) -> dict[str, float]:
    """name → the sum of the largest entries of its t parts over sqrt(t): what the largest entry of their sum would be
    if none contradicted another. leaves: name → [leaves, ...], of `verify/play.py`. owners: of tied weights, whose two
    uses may be encoded apart."""
    plan = resolved.plan
    each = resolved.batch.leaves
    stretches = [range(leaf, leaf + 1) for leaf in range(each)]
    if not plan.wires.scatter:
        stretches = stretches_of(each, plan.dp, plan.shard)
    sums = dict[str, float]()
    for name, grads in leaves.items():
        owner, steps = owners.get(name, name), len(grads) // each
        by_step = grads.unflatten(0, (steps, each)).sum(0)  # a period adds up its steps before it encodes
        tops = (by_step[stretch.start : stretch.stop].sum(0).abs().max().item() for stretch in stretches)
        sums[owner] = sums.get(owner, 0.0) + (sum(tops) if grads.numel() else 0.0)
    return {name: top / sqrt(len(stretches)) for name, top in sums.items()}
