"""One plan on one cluster: seconds, memory, traffic, and where the time goes from the ideal on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.plan import Plan
from unisono.planner import loading, stages
from unisono.planner.machines.cluster import Cluster, Device
from unisono.planner.machines.order import trains
from unisono.planner.memory import Memory, MemoryVerdict, remedies
from unisono.planner.played import span, with_play
from unisono.planner.price import Price
from unisono.planner.priced import Model, price, rows, settled, shares_cores, verdict
from unisono.planner.stack import Stack
from unisono.planner.stages import RowLoad, told
from unisono.planner.stragglers import Law
from unisono.planner.timetables import serves
from unisono.planner.trust import Trust, trust
from unisono.planner.waits import fed, with_waits
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import Infeasible

GIB = 2.0**30
_OTHER_ORDER = "order      of axes: not the one that train plays, see below"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: `micros` micro-batches of `micro_batch` samples on each data rank, for `steps` steps. stragglers:
    how unevenly ranks work, None where all are as quick as they are priced."""

    model: Model
    plan: Plan
    cluster: Cluster
    stack: Stack
    micro_batch: int
    micros: int
    steps: int = 0
    stragglers: Law | None = None

    @property
    def batch(self) -> int:
        return self.micro_batch * self.micros * self.plan.replicas

    @property
    def served(self) -> bool:
        """Whether there is such a timetable of so many micro-batches."""
        plan = self.plan
        return plan.pp == 1 or serves(plan.schedule, plan.pp, self.micros, self.model.n_layer)

    @property
    def known(self) -> bool:
        """Whether prices of such models have been held beside measurements."""
        model = self.model
        return isinstance(model, Transformer) and model.experts is None and model.latent is None


@dataclass(frozen=True, slots=True)
class Answer:
    """A price and a verdict. bubble: share of the pipeline's time in which its busiest row
    waits (Qi et al., 2023): (p-1)/(m+p-1) for 1f1b."""

    question: Question
    price: Price
    verdict: MemoryVerdict
    bubble: float

    @property
    def tflops(self) -> float:
        """10^12 FLOP/s of one device, recomputation not counted."""
        ask = self.question
        return ask.model.step_flops(ask.batch) / ask.plan.world / self.price.step / 1e12

    @property
    def mfu(self) -> float:
        """Share of the device's peak in the plan's precision (Chowdhery et al., 2022)."""
        return self.tflops * 1e12 / self.question.cluster.device.flops(self.question.plan.precision)

    @property
    def stages(self) -> tuple[RowLoad, ...]:
        """What each stage has, and computes again."""
        ask = self.question
        return told(ask.model, self.played, ask.stack, ask.cluster)

    @property
    def played(self) -> Plan:
        """The plan with what recompute=auto comes to."""
        ask = self.question
        sizes = {"micro_batch": ask.micro_batch, "micros": ask.micros}
        return settled(ask.model, ask.plan, ask.stack, ask.cluster, **sizes)

    @property
    def trust(self) -> Trust:
        """How far the step's seconds may be off, and why."""
        ask = self.question
        return trust(ask.model, ask.plan, ask.cluster, ask.stack)

    @property
    def error_pct(self) -> float | None:
        """Mean relative error of such prices; None where no such model has been held beside measurements."""
        return 100.0 * self.trust.error if self.question.known else None

    @property
    def trusted(self) -> str:
        """The same in words."""
        if self.error_pct is None:
            return "no model of this kind has been held beside measurements"
        return f"a step is right within about {self.error_pct:.0f} % on average"

    @property
    def days(self) -> float:
        return self.price.step * self.question.steps / 86400.0


class DoesNotFit(Infeasible):
    """The plan needs more memory than a device has; `short` bytes more."""

    def __init__(self, what: str, answer: Answer, **given: Any) -> None:
        super().__init__(what, **given)
        self.answer = answer

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {
            "short_gib": self.answer.verdict.short / GIB,
            "capacity_gib": self.answer.verdict.capacity / GIB,
            "mem_gib": in_gib(self.answer.verdict.memory),
        }


def simulate(ask: Question) -> Answer:
    """The answer, whether it fits or not."""
    got = price(ask.model, ask.plan, ask.cluster, ask.stack, micro_batch=ask.micro_batch, micros=ask.micros)
    fits = verdict(
        ask.model, ask.plan, ask.stack, ask.cluster, micro_batch=ask.micro_batch, micros=ask.micros
    )
    bubble = got.idle / got.step
    if not shares_cores(ask.model, ask.cluster):  # there it is played already, on the cores that there are
        got, bubble = _as_played(ask, got)
    return Answer(ask, with_waits(got, ask), fits, bubble)


def gain(answer: Answer, other: Answer) -> float:
    """Share of the other's step that an answer saves."""
    return 1.0 - answer.price.step / other.price.step


def demand(answer: Answer, cut: str = "") -> None:
    """Raises DoesNotFit, with the cheapest remedy, where memory is short. cut: another cut into stages that fits."""
    if answer.verdict.fits:
        return
    ask, memory = answer.question, answer.verdict.memory
    parts = sorted(in_gib(memory).items(), key=lambda part: -part[1])
    largest = ", ".join(f"{name} {size:.1f}" for name, size in parts if name != "total" and size >= 0.05)
    raise DoesNotFit(
        f"the plan needs {memory.total / GIB:.1f} GiB, {ask.cluster.device.name} has"
        f" {answer.verdict.capacity / GIB:.1f} GiB: short by {answer.verdict.short / GIB:.1f} GiB",
        answer,
        where=f"{ask.plan} on {ask.cluster.name}, pipeline row {answer.verdict.row}",
        likely=f"GiB: {largest}",
        fix=f"{_remedy(ask)}; or {cut}" if cut else _remedy(ask),
    )


def _remedy(ask: Question) -> str:
    """The change that fits and makes the step longest least; where none fits, the one that needs least."""
    tried: list[tuple[str, Answer]] = []
    for said, plan, micro_batch, micros in remedies(ask.plan, ask.micro_batch, ask.micros, ask.model.n_layer):
        other = replace(ask, plan=plan, micro_batch=micro_batch, micros=micros)
        if _sensible(ask.model, plan) and other.served:
            tried.append((said, simulate(other)))
    fitting = [(said, answer) for said, answer in tried if answer.verdict.fits]
    if fitting:
        said, best = min(fitting, key=lambda pair: pair[1].price.step)
        return f"{said}: {best.verdict.memory.total / GIB:.1f} GiB, {best.price.step:.4g} s a step"
    if not tried:
        return "more devices, and with them a greater shard, tp or pp"
    said, least = min(tried, key=lambda pair: pair[1].verdict.short)
    return (
        f"more devices, and with them a greater shard, tp or pp; {said} alone is still"
        f" {least.verdict.short / GIB:.1f} GiB short"
    )


def _sensible(model: Model, plan: Plan) -> bool:
    return model.n_head % plan.tp == 0 and model.kv_heads % plan.tp == 0 and plan.pp <= model.n_layer


def _as_played(ask: Question, got: Price) -> tuple[Price, float]:
    """The price with its timetable played, where there is one; and the bubble."""
    if ask.plan.pp == 1:
        return got, 0.0
    sizes = {"micro_batch": ask.micro_batch, "micros": ask.micros}
    plan = settled(ask.model, ask.plan, ask.stack, ask.cluster, **sizes)
    each = rows(ask.model, plan, ask.cluster, ask.stack, ask.micro_batch)
    whole = span(plan.schedule, ask.model.n_layer, ask.micros, each)
    if whole is not None:
        got = with_play(got, whole, ask.micros, plan.schedule, each)
    return got, got.idle / (got.idle + got.busiest)


def in_gib(memory: Memory) -> dict[str, float]:
    parts = ("params", "grads", "optim", "activations", "communication", "slack", "total")
    return {name: getattr(memory, name) / GIB for name in parts}


def waterfall(answer: Answer) -> list[tuple[str, float]]:
    """(what, seconds): the ideal, and what comes on top of it; the sum is the step."""
    ask = answer.question
    peak = ask.plan.world * ask.cluster.device.flops(ask.plan.precision)
    return in_parts(ask.model, ask.batch, peak, answer.price, ask.plan.recompute != "none")


def bound(answer: Answer) -> str:
    """What takes most of the time beyond the arithmetic itself."""
    over = [(seconds, what) for what, seconds in waterfall(answer) if not what.startswith("ideal")]
    return max(over)[1]


def in_parts(
    model: Model, batch: int, peak: float, got: Price, again: bool = False
) -> list[tuple[str, float]]:
    """(what, seconds) of a price, from the ideal on. peak: FLOP/s of all devices; again: some of it is computed a
    second time."""
    ideal, attention = model.step_flops(batch) / peak, 0.0
    if got.attention and isinstance(model, Transformer):
        attention = got.attention - model.attention_flops(batch) / peak
    # Where ranks share a host's cores, passes are priced whole.
    products = "products below peak, recomputation" if again and not got.kernels else "products below peak"
    masked = "attention: its masked half is left out"
    steps = [
        ("ideal: the model's arithmetic at peak", ideal),
        (products, got.arithmetic - ideal - attention),
        ("attention below peak" if attention >= 0.0 else masked, attention),
        ("other kernels, embedding, loss", got.kernels),
        ("computed a second time (recompute)", got.recompute),
        ("waiting for the host", got.host),
        *((f"exposed on {axis}", traffic.exposed) for axis, traffic in got.comm.items()),
        ("bubble", got.idle),
        ("uneven stages", got.uneven),
        ("optimiser", got.optimizer),
        ("fixed per step", got.fixed),
        ("stragglers", got.straggling),
        ("data loading", got.loading),
    ]
    return [(what, seconds) for what, seconds in steps if abs(seconds) > 1e-9 * got.step]


def as_json(answer: Answer) -> Mapping[str, Any]:
    """The object of the contract, and what else is known."""
    ask, got = answer.question, answer.price
    dollars = ask.cluster.cost_per_hour
    return {
        "step_s": got.step,
        "error_pct": answer.error_pct,
        "error_because": list(answer.trust.because),
        "tflops_per_device": answer.tflops,
        "mfu": answer.mfu,
        "mem_gib": in_gib(answer.verdict.memory),
        "capacity_gib": answer.verdict.capacity / GIB,
        "fits": answer.verdict.fits,
        "bubble": answer.bubble,
        "bound": bound(answer),
        "comm": comm_json(got),
        "days_to_train": answer.days,
        "tokens_per_s": ask.batch * ask.model.context / got.step,
        "cost": dollars * 24 * answer.days * ask.plan.world if dollars is not None else None,
        "samples_per_s": ask.batch / got.step,
        "parameters": ask.model.workload.parameters,
        "active_parameters": ask.model.workload.active,
        "plan": str(ask.plan),
        "cluster": ask.cluster.name,
        "stack": ask.stack.name,
        "stages": stages.as_json(answer.stages),
        "batch": {"global_batch": ask.batch, "micro_batch": ask.micro_batch, "micros": ask.micros},
        "waterfall": [{"what": what, "seconds": seconds} for what, seconds in waterfall(answer)],
        **loading.as_json(fed(ask), got.step - got.loading),
    }  # fmt: skip


def comm_json(got: Price) -> dict[str, dict[str, float]]:
    """Traffic by axis, as the contract has it."""
    return {
        axis: {"bytes": t.bytes, "seconds": t.seconds, "exposed_s": t.exposed} for axis, t in got.comm.items()
    }


def as_text(answer: Answer) -> str:
    """The same for people."""
    ask, got, memory = answer.question, answer.price, answer.verdict.memory
    device = ask.cluster.device
    unit = "tokens" if ask.model.context > 1 else "samples"
    lines = [
        f"plan       {ask.plan}",
        f"cluster    {ask.cluster.name}: {ask.plan.world} of {ask.cluster.devices} {device.name}",
        *precision_lines(ask.plan, device),
        f"stack      {ask.stack.name}: {answer.trusted}",
        *(
            f"           less sure: {reason}"
            for reason in answer.trust.because
            if answer.error_pct is not None
        ),
        f"batch      {ask.batch} = micro_batch {ask.micro_batch} x micros {ask.micros} x replicas {ask.plan.replicas}",
        *stages.as_lines(ask.plan, answer.stages),
        *([] if trains(ask.plan, ask.cluster.order) else [_OTHER_ORDER]),
        "",
        f"step       {got.step:.4g} s, {ask.batch * ask.model.context / got.step:,.0f} {unit}/s,"
        f" {answer.tflops:.3g} TFLOP/s a device, MFU {100 * answer.mfu:.1f} %",
    ]
    if ask.steps:
        lines.append(f"training   {lasting(86400.0 * answer.days)} for {ask.steps:,} steps")
    lines += [
        f"bubble     {100 * answer.bubble:.1f} %",
        f"bound      most is lost to: {bound(answer)}",
        loading.as_text(fed(ask), got.step - got.loading),
        "",
        *drawn(waterfall(answer), got),
    ]
    parts = "  ".join(f"{name} {size:.2f}" for name, size in in_gib(memory).items())
    lines += ["", f"memory     GiB of the fullest rank, pipeline row {answer.verdict.row}: {parts}"]
    lines.append(f"           of {answer.verdict.capacity / GIB:.2f} that {device.name} has for it")
    return "\n".join(lines)


def precision_lines(plan: Plan, device: Device) -> list[str]:
    """A line where the plan computes in fp32 what the device would compute faster in bf16, for who has not asked."""
    own, half = (device.flops(dtype) / 1e12 for dtype in (plan.precision, "bf16"))
    if plan.precision != "fp32" or half <= own:
        return []
    return [
        f"precision  fp32: {device.name} computes it at {own:.3g} TFLOP/s, and bf16 at {half:.3g}; precision=bf16 in"
        " the plan asks for that"
    ]


def lasting(seconds: float) -> str:
    """A length of time in the greatest unit of which it is two at least."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def drawn(steps: Sequence[tuple[str, float]], got: Price) -> list[str]:
    """Lines of a waterfall, what is a thousandth of it at least, and of each axis's traffic."""
    lines = ["where a step goes"]
    for what, seconds in steps:
        if abs(seconds) < 5e-4 * got.step:
            continue
        bar = "#" * max(0, round(40 * seconds / got.step))
        lines.append(f"  {what:<38}{seconds:>10.4f} s {100 * seconds / got.step:>6.1f} %  {bar}".rstrip())
    if got.comm:
        lines += ["", f"{'axis':<7}{'GB sent':>10}{'seconds':>11}{'exposed':>11}"]
        for axis, t in got.comm.items():
            lines.append(f"{axis:<7}{t.bytes / 1e9:>10.3f}{t.seconds:>11.4f}{t.exposed:>11.4f}")
    return lines
