"""What is no transformer, in numbers: a workload of parts, and what prices ask of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Annotated

from unisono.plan import Plan
from unisono.planner.source import Source
from unisono.planner.states import WholeMatrixSteps
from unisono.planner.work.sample import UNSAID, Sample
from unisono.planner.work.stage import ITEM, MatrixProduct, PartPass, Transfer
from unisono.programs.balance import balance
from unisono.spec.workload import Channels, Product, Tables, Workload, WorkPart, joined

_NUMBERS = Source("specification", "numbers of rows travel as 64-bit integers")
INDEX: Annotated[float, _NUMBERS] = 8.0


def table_calls(
    tables: Tables, plan: Plan, samples: float, item: float, *, backward: bool
) -> Iterator[Transfer]:
    """Yield the calls of one pass over sharded tables, for `samples` samples of one rank. item: bytes of an element."""
    if plan.ep == 1:
        return
    n = plan.ep
    if not tables.count:  # nobody has said how they are cut
        yield Transfer("ep", "all_to_all", tables.results * samples * item)
        return
    width = tables.results / tables.count
    most = (
        -(-tables.count // n) if tables.cut == "table" else tables.count
    )  # tables of one rank; what is short is filled up
    if not backward and tables.cut == "table":
        yield Transfer("ep", "all_to_all", n * samples * most * tables.indices / tables.count * INDEX)
    elif not backward:
        yield Transfer("ep", "all_gather", n * samples * tables.indices * INDEX)
    if tables.cut == "row":
        way = "all_gather" if backward else "reduce_scatter"
        yield Transfer("ep", way, n * samples * tables.results * item)
    else:
        part = width if tables.cut == "table" else -(-width // n)
        yield Transfer("ep", "all_to_all", n * samples * most * part * item)


def longest_share(part: WorkPart, tp: int) -> WorkPart:
    """Return the part as the rank with most units has it: the first rank, where units do not divide evenly."""
    channels = part.channels
    if channels is None or tp == 1:
        return part
    most = -(-channels.units // tp)

    def here(size: int) -> int:
        return size * most // channels.units

    products = tuple(_dealt(product, channels.units, most) for product in part.products)
    return replace(
        part,
        parameters=part.parameters - channels.parameters + here(channels.parameters),
        flops=sum(product.flops for product in products),
        activations=part.activations - channels.activations + here(channels.activations),
        products=products,
        moved=part.moved - channels.moved + here(channels.moved),
    )


def _dealt(product: Product, units: int, most: int) -> Product:
    if product.dealt == "columns":
        return product._replace(columns=product.columns * most // units)
    if product.dealt == "inner":
        return product._replace(inner=product.inner * most // units, read=product.read * most // units)
    return product


def crossings(
    channels: Channels, plan: Plan, samples: float, *, backward: bool, again: bool = False
) -> Iterator[Transfer]:
    """Yield the sums over `tp` in one pass over a part. again: it is a forward pass that is recomputed."""
    if plan.tp == 1:
        return
    item = ITEM[plan.precision]
    if backward and channels.entered:
        fp32 = channels.widens and not plan.arithmetic.narrow
        yield Transfer(
            "tp", "all_reduce", float(channels.entered * samples * (max(4, item) if fp32 else item))
        )
    elif not backward and (channels.again or not again):
        yield Transfer("tp", "all_reduce", float(channels.left * samples * item))


@dataclass(frozen=True, slots=True)
class Network:
    """A model as a workload of parts. It is spread by dp, shard and pp, and by tp where its parts have channels.

    tokens: tokens of one sample. states: numbers that the optimiser keeps of each parameter: 2 for Adam, 1 for
    momentum. steps: of an optimiser whose matrices have owners. by_weights: pp gives rows equal weights, as `train`
    does, instead of equal arithmetic. sample: bytes of a sample, 0 where unknown. averages: numbers kept of each
    parameter beside, as its average over updates.
    """

    workload: Workload
    tokens: int = 1
    states: int = 2
    steps: WholeMatrixSteps | None = None
    by_weights: bool = False
    sample: Sample = UNSAID
    averages: int = 0

    @property
    def measured(self) -> bool:
        """Whether prices of such models have been held beside measurements."""
        return False

    @property
    def scales(self) -> dict[str, int]:
        """Sizes by which a request is near to what a stack was fitted to: none was."""
        return {}

    def holders(self, ranks: int) -> int:
        """Return the largest degree of ep on so many ranks: each row of a table may lie elsewhere."""
        return ranks if any(part.tables for part in self.workload.parts) else 1

    def attention_flops(self, batch: int) -> float:
        """0: attention is counted among the products."""
        return 0.0

    @property
    def n_layer(self) -> int:
        """Number of parts that pp splits; 1 for a model of one part."""
        return len(self.workload.blocks) or 1

    @property
    def whole(self) -> "Network":
        """The same model as one part, as `train` plays a model that nobody has cut."""
        *_, last = parts = self.workload.parts
        every = joined("module", parts), WorkPart("head", 0, 0, 0, last.output)
        return replace(self, workload=Workload(every, self.workload.tied))

    @property
    def context(self) -> int:
        """Tokens of one sample."""
        return self.tokens

    @property
    def tied_elements(self) -> int:
        """Elements of a weight that both ends have."""
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
        """Largest even degree of tp: a divisor of the channels of every part that has some, 1 where none has."""
        return gcd(*(part.channels.units for part in self.workload.parts if part.channels)) or 1

    @property
    def kv_heads(self) -> int:
        return self.n_head

    def step_flops(self, batch: int) -> float:
        """Matrix arithmetic of one step on `batch` samples."""
        return float(batch) * self.workload.step_flops


def cut(network: Network, rows: int, tp: int = 1) -> list[tuple[WorkPart, ...]]:
    """Return the parts of each row, so that the slowest row is as fast as can be. Stem and head go to the first and
    last row.

    Rows are cut by what whole parts cost. Each part is then returned as the fullest of `tp` ranks has it.
    """
    stem, *blocks, head = network.workload.parts
    if not blocks:
        return [(longest_share(stem, tp), longest_share(head, tp))]

    def cost(part: WorkPart) -> float:
        return matrix_elements(part) if network.by_weights else float(part.flops)

    ranges = balance([cost(part) for part in blocks], cost(stem), cost(head), rows)
    stages = [tuple(blocks[part.start : part.stop]) for part in ranges]
    stages[0] = (stem, *stages[0])
    stages[-1] = (*stages[-1], head)
    return [tuple(longest_share(part, tp) for part in parts) for parts in stages]


def matrix_elements(part: WorkPart) -> float:
    """Return the parameters of a part that are no tables: those are only looked up."""
    return float(part.parameters - (part.tables.elements if part.tables else 0))


def read_elements(parts: tuple[WorkPart, ...], plan: Plan, samples: float) -> float:
    """Return the elements of one rank's tables that get a gradient from so many samples: those that were read."""
    tables = (part.tables for part in parts if part.tables)
    return sum(min(table.elements / plan.ep, table.touched * samples) for table in tables)


def kept_by(part: WorkPart, plan: Plan) -> int:
    """Return the elements of one sample that a part keeps for the backward pass."""
    again = plan.recompute == "full" and part.kernels and not part.tables
    return part.output if again else part.activations


def part_pass(part: WorkPart, plan: Plan, samples: int, *, backward: bool, again: bool = False) -> PartPass:
    """Return one pass over one part on a rank. Backward, a kernel reads the incoming gradient and what was kept, and
    writes the outgoing gradient. again: a forward pass that is recomputed."""
    ways, item = 2 if backward else 1, ITEM[plan.precision]
    products: list[MatrixProduct] = []
    for rows, inner, columns, many, read, batched, _ in part.products:
        # Another sample adds rows to a product with weights, and products where both factors are activations.
        rows, many = (rows, many * samples) if batched else (rows * samples, many)
        product = MatrixProduct(rows, inner, columns, many, float(read * samples) if read else None)
        products += product.gradients if backward else (product,)
    calls: tuple[Transfer, ...] = ()
    if part.tables:
        calls = tuple(table_calls(part.tables, plan, samples, float(item), backward=backward))
    if part.channels:
        calls += tuple(crossings(part.channels, plan, samples, backward=backward, again=again))
    return PartPass(
        tuple(products), moved=part.moved * samples * item * ways, kernels=part.kernels * ways, calls=calls
    )
