"""What is no transformer, in numbers: a workload of parts, and what prices ask of it."""

from dataclasses import dataclass, replace
from math import gcd

from unisono.plan import Plan
from unisono.planner.timetables import of
from unisono.planner.work import tables
from unisono.planner.work.channels import crossings, dealt, longest_share
from unisono.planner.work.inside import StageElements, leafwise, with_step
from unisono.planner.work.passes import ITEM
from unisono.planner.work.sample import UNSAID, Sample
from unisono.planner.work.stage import ITEM as ITEMS
from unisono.planner.work.stage import (
    MatrixProduct,
    PartPass,
    PassCounts,
    RowWork,
    StageWork,
    Transfer,
)
from unisono.programs.balance import balance
from unisono.spec.workload import Workload, WorkPart, joined


@dataclass(frozen=True, slots=True)
class Network:
    """A workload that is dealt by dp, shard and pp, and by tp where its parts have channels. tokens: what one sample
    counts for. states: numbers that the optimiser keeps of each parameter, 2 of Adam, 1 of a velocity. by_weights: pp
    deals equal weights to its rows, as `train` does, rather than equal arithmetic. sample: its bytes, 0 where nobody
    has said."""

    workload: Workload
    tokens: int = 1
    states: int = 2
    by_weights: bool = False
    sample: Sample = UNSAID

    @property
    def measured(self) -> bool:
        """Whether prices of such models have been held beside measurements."""
        return False

    @property
    def scales(self) -> dict[str, int]:
        """Sizes by which a question is near to what a stack was fitted to: none was."""
        return {}

    def holders(self, ranks: int) -> int:
        """Of so many ranks those among which ep may deal at most: of tables each row may lie elsewhere."""
        return ranks if any(part.tables for part in self.workload.parts) else 1

    def attention_flops(self, batch: int) -> float:
        """Its products are told as they are."""
        return 0.0

    @property
    def n_layer(self) -> int:
        """Parts that pp deals out; a whole is one."""
        return len(self.workload.blocks) or 1

    @property
    def whole(self) -> "Network":
        """The same where nobody has said what may be cut: one part, as `train` plays it."""
        *_, last = parts = self.workload.parts
        every = joined("module", parts), WorkPart("head", 0, 0, 0, last.output)
        return replace(self, workload=Workload(every, self.workload.tied))

    @property
    def context(self) -> int:
        """Tokens of one sample."""
        return self.tokens

    @property
    def tied_elements(self) -> int:
        """Of a weight that both ends have."""
        return self.workload.tied

    def matrices(self, tp: int) -> tuple[list[tuple[float, float]], float]:
        """(rows and columns of the weights, elements of all weights but tables)."""
        parts = [longest_share(part, tp) for part in self.workload.parts]
        shapes = [
            (float(product.inner), float(product.columns))
            for part in parts
            for product in part.products
            if not product.batched
        ]
        return shapes, float(sum(p.parameters - (p.tables.elements if p.tables else 0) for p in parts))

    @property
    def n_head(self) -> int:
        """What tp may deal out evenly: a divisor of the units of every part that has some, 1 where none has."""
        return gcd(*(part.channels.units for part in self.workload.parts if part.channels)) or 1

    @property
    def kv_heads(self) -> int:
        return self.n_head

    def step_flops(self, batch: int) -> float:
        """Matrix arithmetic of one step on `batch` samples."""
        return float(batch) * self.workload.step_flops


def cut(network: Network, rows: int, tp: int = 1) -> list[tuple[WorkPart, ...]]:
    """Consecutive parts for each row, so that the dearest row is as cheap as can be; stem and head lie outside. Rows
    are cut by what parts cost as a whole; tp: of so many ranks, each part as the one with most of it has it."""
    stem, *blocks, head = network.workload.parts
    if not blocks:
        return [(longest_share(stem, tp), longest_share(head, tp))]

    def cost(part: WorkPart) -> float:
        return matrix_elements(part) if network.by_weights else float(part.flops)

    ranges = balance([cost(part) for part in blocks], cost(stem), cost(head), rows)
    found = [tuple(blocks[part.start : part.stop]) for part in ranges]
    found[0] = (stem, *found[0])
    found[-1] = (*found[-1], head)
    return [tuple(longest_share(part, tp) for part in parts) for parts in found]


def matrix_elements(part: WorkPart) -> float:
    """Weights that are no tables: those are only looked up."""
    return float(part.parameters - (part.tables.elements if part.tables else 0))


def read_elements(parts: tuple[WorkPart, ...], plan: Plan, samples: float) -> float:
    """Elements of the tables of one rank that get a gradient from so many samples: those that were read."""
    tables = (part.tables for part in parts if part.tables)
    return sum(min(own.elements / plan.ep, own.touched * samples) for own in tables)


def kept_by(part: WorkPart, plan: Plan) -> int:
    """Elements of one sample that a part keeps for the backward pass."""
    again = plan.recompute == "full" and part.kernels and not part.tables
    return part.output if again else part.activations


def part_pass(part: WorkPart, plan: Plan, samples: int, *, backward: bool, again: bool = False) -> PartPass:
    """One pass over one part of a rank. Backwards a kernel reads what came back and what was kept, and writes what goes
    on. again: of a forward pass that is computed again."""
    ways, item = 2 if backward else 1, ITEMS[plan.precision]
    found: list[MatrixProduct] = []
    for rows, inner, columns, many, read, batched, _ in part.products:
        # Another sample adds rows to a product with weights, and products where both factors are activations.
        rows, many = (rows, many * samples) if batched else (rows * samples, many)
        one = MatrixProduct(rows, inner, columns, many, float(read * samples) if read else None)
        found += one.gradients if backward else (one,)
    calls: tuple[Transfer, ...] = ()
    if part.tables:
        calls = tuple(tables.passing(part.tables, plan, samples, float(item), backward=backward))
    if part.channels:
        wide = part.channels.widens or part.channels.normed
        calls += tuple(crossings(part.channels, plan, samples, backward=backward, wide=wide, again=again))
    return PartPass(
        tuple(found), moved=part.moved * samples * item * ways, kernels=part.kernels * ways, calls=calls
    )


def held(network: Network, plan: Plan) -> list[StageElements]:
    """What a rank of every stage has that one micro-batch passes."""
    own, found = of(plan.schedule), list[StageElements]()
    cuts = cut(network, len(own.placement(plan.pp)) // own.chains, plan.tp)
    # Uses of a tied weight in one stage are two gradients where their sum has to wait for others.
    once, channels = len(cuts) == 1 and not leafwise(plan), dealt(cuts, plan)
    for place, parts in enumerate(cuts):
        stem, head = place == 0, place == len(cuts) - 1
        blocks = parts[int(stem) : len(parts) - int(head)]
        units = tuple((float(part.parameters), 1.0) for part in blocks if part.parameters)
        rim = sum(part.parameters for part in parts) - sum(part.parameters for part in blocks)
        rim -= network.tied_elements if once else 0
        read = tuple(part.tables for part in parts if part.tables)
        rim -= sum(own.elements for own in read if tables.apart(own, plan))
        back = cuts[place - 1][-1].output if place else 0
        found.append(
            StageElements(
                len(blocks),
                units,
                rim,
                0.0,
                stem,
                head,
                float(parts[-1].output),
                float(back),
                read,
                channels=channels[place],
                attends=False,
            )
        )
    return found


def stages(network: Network, plan: Plan, micro_batch: int, micros: int) -> tuple[StageWork, ...]:
    """Every stage of the plan's timetable on a host of ranks, in fp32."""
    chains, each = of(plan.schedule).chains, held(network, plan)
    own = max(1, micros // chains)  # micro-batches that pass a stage
    found: list[StageWork] = []
    for stage, parts in zip(each, cut(network, len(each), plan.tp), strict=True):
        ahead, back = (_counted(parts, micro_batch, backward=way) for way in (False, True))
        calls = [with_step(network, plan, stage, micro_batch, own, backward=way) for way in (False, True)]
        again = ahead if plan.recompute == "full" else PassCounts()
        found.append(StageWork(ahead, back, again, (calls[0], calls[1]), ITEM * micro_batch * stage.ahead))
    return chains * tuple(found)


def _counted(parts: tuple[WorkPart, ...], samples: int, *, backward: bool) -> PassCounts:
    """What one pass over these parts computes. Backwards each product has two of its size, and a kernel reads what came
    back and what was kept, and writes what goes on."""
    k = 2.0 if backward else 1.0
    flops = sum(part.flops for part in parts)
    # Of a convolution the left factor lies in fewer elements, which libraries make use of.
    convolved = sum(product.flops for part in parts for product in part.products if product.read)
    return PassCounts(
        product=k * samples * (flops - convolved),
        convolution=k * samples * convolved,
        elementwise=k * ITEM * samples * sum(part.moved for part in parts),
        weights=k * ITEM * sum(map(matrix_elements, parts)),
        launch=k * sum(part.kernels for part in parts),
    )


def _units(parts: tuple[WorkPart, ...], network: Network) -> tuple[list[float], float]:
    """(bytes of the weights of each part between the ends, of the ends that are here)."""
    ends = network.workload.parts[0], network.workload.parts[-1]
    rim = sum(part.parameters for part in parts if part in ends)
    return [ITEM * part.parameters for part in parts if part not in ends], ITEM * rim


def row_works(network: Network, plan: Plan, micro_batch: int, micros: int) -> tuple[RowWork, ...]:
    """What a rank of every row of the pipeline has on a host."""
    schedule = of(plan.schedule)
    placement = schedule.placement(plan.pp)
    cuts = schedule.chains * cut(network, len(placement) // schedule.chains, plan.tp)
    found: list[RowWork] = []
    for row in range(plan.pp):
        own = [part for stage, parts in enumerate(cuts) if placement[stage] == row for part in parts]
        units, rim = _units(tuple(own), network)
        again, whole = plan.recompute == "full", ITEM * micro_batch
        found.append(
            RowWork(
                elements=float(sum(part.parameters for part in own)),
                tensors=float(sum(part.tensors for part in own)),
                kept=whole * sum(kept_by(part, plan) for part in own) / schedule.chains,
                working=whole * (max(part.activations for part in own) if again else 0),
                owed=0.0,
                unit=max(units, default=0.0),
                rim=rim,
                widest=ITEM * max(part.parameters for part in own),
            )
        )
    return tuple(found)


def tied(network: Network, plan: Plan) -> float:
    """Bytes of the gradient of weights that both ends have, where these lie on two rows."""
    return ITEM * network.tied_elements if plan.pp > 1 else 0.0
