"""Designs of the network between nodes at an equal number of devices: what a step takes, and what the network costs.

Costs are counted, not looked up: ports of switches and cables with both ends, at the rate of one device, in units of
one port. Hosts' network cards are the same in every design and not counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, Any

from unisono.planner.machines.cluster import Cluster, Link, Source, Topology
from unisono.planner.search import Space, search
from unisono.planner.simulate import Answer, Question, bound, simulate
from unisono.spec.errors import UsageError

_PORTS = Source("specification", "ports of one switch: NVIDIA Quantum-2, 400 Gb/s; Tomahawk 5, 800 Gb/s")
RADIX: Annotated[int, _PORTS] = 64
# A cable with two transceivers beside a port of a switch: 1,024 NDR devices take 48 switches of 64 ports for 0.65
# million dollars, and optics for 1.4 million.
_PRICES = Source("specification", "middles of the ranges at yobitel.com/knowledge-base/infiniband-ndr")
CABLE: Annotated[float, _PRICES] = (1.4 / 2048) / (0.65 / 3072)


@dataclass(frozen=True, slots=True)
class Design:
    """ports, cables: counted, at the rate of one device."""

    name: str
    cluster: Cluster
    ports: float
    cables: float

    @property
    def cost(self) -> float:
        return self.ports + CABLE * self.cables


def tiers(ends: int, radix: int = RADIX, oversubscription: float = 1.0) -> int:
    """Levels of switches that connect `ends`: of folded Clos networks, each level a factor of what a leaf has down."""
    down = radix * oversubscription / (1.0 + oversubscription)
    count, reach = 1, float(radix)
    while reach < ends:
        count += 1
        reach = radix * down * (radix / 2.0) ** (count - 2)
    return count


def clos(ends: int, oversubscription: float = 1.0) -> tuple[float, float]:
    """(ports, cables) of a folded Clos network: a level more is two ports and a cable for each that goes up."""
    up = (tiers(ends, oversubscription=oversubscription) - 1) / oversubscription
    return ends * (1 + 2 * up), ends * (1 + up)


def designs(cluster: Cluster) -> tuple[Design, ...]:
    """The cluster with its outermost level built in other ways. Raises UsageError for a single node."""
    if len(cluster.links) < 2:
        raise UsageError(
            f"{cluster.name} is one node: no network between nodes to design",
            where="--networks, --cluster",
            fix="a cluster of several nodes, for example dgx-a100:64",
            code="C22",
        )
    outer, node, ends = cluster.links[-1], cluster.node, cluster.devices
    found = [Design("fat-tree", _with(cluster, replace(outer, oversubscription=1.0)), *clos(ends))]
    for ratio in (2, 4):
        leaf = _leaf(node, ratio)
        if leaf < ends:
            inner = replace(outer, name="leaf", size=leaf, oversubscription=1.0)
            spine = replace(outer, name="spine", oversubscription=float(ratio))
            found.append(Design(f"leaf-spine {ratio}:1", _with(cluster, inner, spine), *clos(ends, ratio)))
    rails = clos(ceil(ends / node))
    rail = replace(outer, topology="rail-only", oversubscription=1.0)
    found.append(Design("rail-only", _with(cluster, rail), node * rails[0], node * rails[1]))
    kinds: tuple[Topology, ...] = ("torus3d", "torus2d", "ring")
    for kind in kinds:
        direct = replace(outer, topology=kind, oversubscription=1.0)
        # Every device's cards are the switch: half a cable of the device's rate for each, whatever the sides.
        found.append(Design(kind, _with(cluster, direct), 0.0, ends / 2))
    return tuple(found)


def _leaf(node: int, ratio: float) -> int:
    """Devices under one leaf: whole nodes, of the ports that look down."""
    return max(node, int(RADIX * ratio / (1.0 + ratio)) // node * node)


def _with(cluster: Cluster, *outer: Link) -> Cluster:
    return replace(cluster, links=(*cluster.links[:-1], *outer))


@dataclass(frozen=True, slots=True)
class ComparedNetwork:
    """One design with its plan; answer is None where nothing fits."""

    design: Design
    answer: Answer | None


def same_plan(ask: Question) -> tuple[ComparedNetwork, ...]:
    """The same plan on every design."""
    return tuple(
        ComparedNetwork(design, simulate(replace(ask, cluster=design.cluster)))
        for design in designs(ask.cluster)
    )


def best_plans(space: Space) -> tuple[ComparedNetwork, ...]:
    """The best plan of each design."""
    found = []
    for design in designs(space.cluster):
        best = search(replace(space, cluster=design.cluster), top=1).best
        found.append(ComparedNetwork(design, best[0] if best else None))
    return tuple(found)


def as_json(rows: Sequence[ComparedNetwork]) -> Mapping[str, Any]:
    first = rows[0].design
    return {
        "networks": [
            {
                "design": row.design.name,
                "step_s": row.answer.price.step if row.answer else None,
                "exposed_comm_s": row.answer.price.exposed if row.answer else None,
                "bound": bound(row.answer) if row.answer else None,
                "plan": str(row.answer.question.plan) if row.answer else None,
                "micro_batch": row.answer.question.micro_batch if row.answer else None,
                "ports": row.design.ports,
                "cables": row.design.cables,
                "relative_cost": row.design.cost / first.cost,
            }
            for row in rows
        ],
        "cost_of_a_cable_in_ports": CABLE,
    }


def as_text(rows: Sequence[ComparedNetwork]) -> str:
    first = rows[0]
    lines = ["the network between nodes, built in other ways"]
    head = f"  {'design':<16}{'step s':>9}{'slower':>9}{'exposed s':>11}{'ports':>9}{'cables':>9}{'cost':>7}  plan"
    lines.append(head)
    for row in rows:
        cost = (
            f"{row.design.ports:>9,.0f}{row.design.cables:>9,.0f}{row.design.cost / first.design.cost:>7.2f}"
        )
        if row.answer is None or first.answer is None:
            lines.append(f"  {row.design.name:<16}{'no plan fits':>29}{cost}")
            continue
        slower = 100 * (row.answer.price.step / first.answer.price.step - 1.0)
        lines.append(
            f"  {row.design.name:<16}{row.answer.price.step:>9.4g}{slower:>8.1f}%{row.answer.price.exposed:>11.4f}"
            f"{cost}  {row.answer.question.plan}"
        )
    lines += [
        f"  cost: beside the fat-tree's; a cable with its ends as {CABLE:.1f} ports, switches of {RADIX} ports",
        f"  {_advice(rows)}",
    ]
    return "\n".join(lines)


def _advice(rows: Sequence[ComparedNetwork]) -> str:
    """The cheapest within one per cent of the fastest."""
    priced = [(row, row.answer.price.step) for row in rows if row.answer is not None]
    if not priced:
        return "no plan fits on any of them"
    fastest = min(step for _, step in priced)
    near = [row for row, step in priced if step <= 1.01 * fastest]
    best = min(near, key=lambda row: row.design.cost)
    share = best.design.cost / rows[0].design.cost
    return (
        f"the cheapest within 1 % of the fastest: {best.design.name}, for {share:.2f} of the fat-tree's cost"
    )
