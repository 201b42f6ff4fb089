"""Bottlenecks to plant, healthy and ambiguous runs: those on which the rules were chosen, and those drawn by a seed.

`benchmarks/verdicts.py` plays them. The drawn ones have the same twelve kinds of trouble in other models, sizes, plans,
ranks and strengths. No rule may be chosen by what they show.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
MODELS, DATA = HERE / "planted.py", HERE / "planted_data.py"
SEED = 38  # of the drawn ones; set before any of them was played


@dataclass(frozen=True)
class Planted:
    """A run. causes: the verdicts that are right. flags: of `unisono train`. repaired: the flags of the repeated run
    where the proposed change is no key, and `by_hand` what they stand for. lab: rate and delay of a link between its
    two hosts. without: events of this rank are taken away before the question. rank: whom the verdict has to name."""

    name: str
    causes: Sequence[str]
    flags: str
    repaired: str = ""
    by_hand: str = ""
    lab: tuple[str, str] | None = None
    without: int | None = None
    rank: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cases:
    """What is played, in three groups."""

    planted: Sequence[Planted]
    healthy: Sequence[Planted]
    ambiguous: Sequence[Planted]


NO_TROUBLE = ("compute", "cores", "memory bandwidth")
UNCLEAR = ("cannot tell",)
SMALL = "--model.n_layer 4 --model.n_head 4 --model.d_model 128 --model.context 64"
DP = '--plan "dp=2"'
SLOW_RANK = '--chaos "slow:who=1:step=1:times=2:seconds=1000000"'


def custom(model: str, context: int = 64) -> str:
    """Flags of a model of `planted.py`."""
    return f"--model.kind {MODELS}:{model} --model.context {context}"


CHOSEN = Cases(
    planted=(
        Planted("slow loader", ("input",), f"{SMALL} {DP} --data.source {DATA}:SlowText", f"{SMALL} {DP}",
                "samples that do not sleep"),
        Planted("small buckets", ("small buckets",), f'{SMALL} --plan "dp=2 sync=every_step:bucket=0.01"',
                lab=("1gbit", "2ms")),
        Planted("tiny kernels", ("tiny kernels",), "--model.n_layer 12 --model.n_head 2 --model.d_model 16 "
                f"--model.context 8 --train.global_batch 4 {DP}"),
        Planted("uneven stages", ("uneven stages",), "--model.n_layer 8 --model.n_head 4 --model.d_model 128 "
                '--model.context 64 --plan "pp=2 micros=8 schedule=1f1b:cut=7/1"'),
        Planted("thin link", ("communication",), f"{SMALL} {DP}", lab=("40mbit", "1ms")),
        Planted("garbage collection", ("garbage collection",), f"{custom('collecting')} {DP}",
                f"{custom('frozen')} {DP}", "no collection in each pass"),
        Planted("frequent checkpoints", ("checkpoints",), f"{SMALL} --model.d_model 256 {DP} --train.save_every 1"),
        Planted("swap", ("host memory",), f"{custom('swapped')} {DP}", f"{custom('resident')} {DP}",
                "a table that stays in memory"),
        Planted("python in the loop", ("python",), f"{custom('counted')} {DP}", f"{custom('vectorised')} {DP}",
                "the loop as tensor operations"),
        Planted("too many micro-batches", ("too many micro-batches",), "--model.n_layer 4 --model.n_head 2 "
                "--model.d_model 32 --model.context 16 --train.global_batch 64 --train.micro_batch 1 "
                '--plan "dp=2 micros=32"'),
        Planted("needless recompute", ("needless recompute",), f'{SMALL} --plan "dp=2 recompute=full"'),
        Planted("one slow rank", ("straggler",), f"{SMALL} {DP} {SLOW_RANK}", f"{SMALL} {DP}",
                "without the slow rank", rank=1),
    ),
    healthy=(
        Planted("healthy: one rank", NO_TROUBLE, f'{SMALL} --plan "dp=1"'),
        Planted("healthy: two replicas", NO_TROUBLE, f'{SMALL} --plan "dp=2"'),
        Planted("healthy: shards", NO_TROUBLE, f'{SMALL} --plan "shard=2"'),
        Planted("healthy: accumulation", NO_TROUBLE, f'{SMALL} --train.global_batch 32 --plan "dp=2 micros=2"'),
    ),
    ambiguous=(
        Planted("ambiguous: six steps", UNCLEAR, f"{SMALL} {DP} --data.source {DATA}:SlowText --train.steps 6"),
        Planted("ambiguous: seldom and long", UNCLEAR, f"{SMALL} {DP} --data.source {DATA}:HiccupText"),
        Planted("ambiguous: events are missing", UNCLEAR, f"{SMALL} {DP} {SLOW_RANK}", without=1),
        Planted("ambiguous: two alike", UNCLEAR, f"{SMALL} {DP} --data.source {DATA}:SlowText "
                f"--callbacks.call {DATA}:dawdle"),
    ),
)  # fmt: skip


def held_out(seed: int = SEED) -> Cases:
    """Cases drawn by a seed: the same for the same seed, on any machine."""
    return Cases(
        tuple(make(_Draw(seed, name), name) for name, make in _PLANTED.items()),
        tuple(make(_Draw(seed, name), name) for name, make in _HEALTHY.items()),
        tuple(make(_Draw(seed, name), name) for name, make in _AMBIGUOUS.items()),
    )


class _Draw(Random):
    """Random numbers of one case, so that another case changes none of them."""

    def __init__(self, seed: int, name: str) -> None:
        super().__init__(f"{seed} {name}")

    def between(self, low: float, high: float, digits: int = 2) -> float:
        return round(self.uniform(low, high), digits)

    def gpt(
        self,
        layers: Sequence[int] = (2, 3, 5, 6),
        widths: Sequence[int] = (96, 160, 192),
        contexts: Sequence[int] = (32, 48, 96),
        batches: Sequence[int] = (8, 12, 24),
    ) -> str:
        """Flags of a GPT as large as takes tens of milliseconds a step, GPT-2's kind or Llama's."""
        head = self.choice((16, 32))
        llama = "--model.positions rotary --model.norm rms --model.activation swiglu --no-model.bias"
        return (
            f"--model.n_layer {self.choice(layers)} --model.d_model {(width := self.choice(widths))} "
            f"--model.n_head {width // head} --model.context {self.choice(contexts)} "
            f"--train.global_batch {self.choice(batches)} {self.choice(('', llama))}"
        )

    def plan(self, *more: str) -> str:
        """Two ranks, in some way: the cases are played on two cores."""
        words = (self.choice(("dp=2", "shard=2", "shard=2 zero=2")), *more)
        return f'--plan "{" ".join(words)}"'

    def model(self, name: str, **strength: float) -> tuple[str, dict[str, str]]:
        """(flags of a model of `planted.py`, what it reads): its size, and how strong the trouble is."""
        size = {"width": self.choice((128, 256, 320)), "layers": self.choice((2, 3, 6))}
        environ = {f"PLANTED_{key.upper()}": str(value) for key, value in (size | strength).items()}
        return custom(name, self.choice((32, 48, 96))), environ


def _slow_loader(draw: _Draw, name: str) -> Planted:
    usual = f"{draw.gpt()} {draw.plan()}"
    return Planted(
        name, ("input",), f"{usual} --data.source {DATA}:SlowText", usual, "samples that do not sleep",
        environ={"PLANTED_SLEEP": str(draw.between(0.1, 0.3))},
    )  # fmt: skip


def _small_buckets(draw: _Draw, name: str) -> Planted:
    plan = f'--plan "dp=2 sync=every_step:bucket={draw.between(0.008, 0.03, 3)}"'
    link = (f"{draw.randint(3, 9)}00mbit", f"{draw.between(1.5, 3, 1)}ms")
    return Planted(name, ("small buckets",), f"{draw.gpt((2, 3), (96, 128))} {plan}", lab=link)


def _tiny_kernels(draw: _Draw, name: str) -> Planted:
    size = (
        f"--model.n_layer {draw.randint(8, 16)} --model.n_head 2 --model.d_model {draw.choice((8, 12, 20))} "
        f"--model.context {draw.choice((4, 6, 12))} --train.global_batch {draw.choice((2, 6, 8))}"
    )
    return Planted(name, ("tiny kernels",), f"{size} {draw.plan()}")


def _uneven_stages(draw: _Draw, name: str) -> Planted:
    layers, few = draw.choice((5, 6, 7, 9)), draw.choice((1, 1, 2))
    cut = draw.choice((f"{layers - few}/{few}", f"{few}/{layers - few}"))
    plan = f"pp=2 micros={draw.choice((4, 6, 12))} schedule={draw.choice(('1f1b', 'gpipe'))}:cut={cut}"
    return Planted(name, ("uneven stages",), f'{draw.gpt((layers,))} --train.global_batch 24 --plan "{plan}"')


def _thin_link(draw: _Draw, name: str) -> Planted:
    link = (f"{draw.choice((20, 30, 60, 80))}mbit", f"{draw.between(0.3, 2, 1)}ms")
    return Planted(name, ("communication",), f"{draw.gpt()} {draw.plan()}", lab=link)


def _by_hand(
    draw: _Draw, name: str, cause: str, model: str, without: str, said: str, **strength: float
) -> Planted:
    """A trouble in a model of `planted.py`, and the model without it."""
    flags, environ = draw.model(model, **strength)
    plan = draw.plan()
    repaired = flags.replace(f":{model} ", f":{without} ")
    return Planted(name, (cause,), f"{flags} {plan}", f"{repaired} {plan}", said, environ=environ)


def _collecting(draw: _Draw, name: str) -> Planted:
    said, objects = "no collection in each pass", draw.randint(2, 6) * 100_000
    return _by_hand(draw, name, "garbage collection", "collecting", "frozen", said, objects=objects)


def _checkpoints(draw: _Draw, name: str) -> Planted:
    flags = f"{draw.gpt(widths=(224, 288, 320))} {draw.plan()} --train.save_every {draw.choice((1, 2))}"
    return Planted(name, ("checkpoints",), flags)


def _swapped(draw: _Draw, name: str) -> Planted:
    strength = {"mib": draw.choice((32, 64, 96)), "pages": draw.randint(10, 30) * 100}
    return _by_hand(
        draw, name, "host memory", "swapped", "resident", "a table that stays in memory", **strength
    )


def _counted(draw: _Draw, name: str) -> Planted:
    said, looks = "the loop as tensor operations", draw.choice((8, 12, 24))
    return _by_hand(draw, name, "python", "counted", "vectorised", said, looks=looks)


def _micro_batches(draw: _Draw, name: str) -> Planted:
    micros = draw.choice((16, 20, 24))
    size = (
        f"--model.n_layer {draw.choice((3, 5, 6))} --model.n_head 2 --model.d_model {draw.choice((24, 40, 48))} "
        f"--model.context {draw.choice((8, 12, 24))} --train.global_batch {2 * micros} --train.micro_batch 1"
    )
    return Planted(name, ("too many micro-batches",), f'{size} --plan "{draw.choice(("dp=2", "shard=2"))} '
                   f'micros={micros}"')  # fmt: skip


def _recomputed(draw: _Draw, name: str) -> Planted:
    return Planted(name, ("needless recompute",), f"{draw.gpt()} {draw.plan('recompute=full')}")


def _chaos(draw: _Draw) -> tuple[int, str]:
    """(the slow rank, the flag that slows it)."""
    who = draw.randrange(2)
    return who, f'--chaos "slow:who={who}:step=1:times={draw.between(1.7, 3, 1)}:seconds=1000000"'


def _slow_rank(draw: _Draw, name: str) -> Planted:
    (who, chaos), usual = _chaos(draw), f"{draw.gpt()} {draw.plan()}"
    return Planted(name, ("straggler",), f"{usual} {chaos}", usual, "without the slow rank", rank=who)


def _healthy(*plans: str) -> Callable[[_Draw, str], Planted]:
    """A GPT that computes much for what it sends."""

    def make(draw: _Draw, name: str) -> Planted:
        size = draw.gpt((3, 5), (160, 192), (64, 96), (32, 48))
        return Planted(name, NO_TROUBLE, f'{size} --plan "{draw.choice(plans)}"')

    return make


def _pictures(draw: _Draw, name: str) -> Planted:
    """A model of another kind, that computes a while."""
    size = f"--model.kind convnet --model.n_layer {draw.choice((3, 5))} --model.channels {draw.choice((24, 32, 48))}"
    return Planted(name, NO_TROUBLE, f"{size} --data.source digits --train.global_batch 64 {draw.plan()}")


def _six_steps(draw: _Draw, name: str) -> Planted:
    return _unclear(draw, name, f"--data.source {DATA}:SlowText --train.steps {draw.choice((4, 5, 7))}")


def _seldom(draw: _Draw, name: str) -> Planted:
    return _unclear(draw, name, f"--data.source {DATA}:HiccupText")


def _missing(draw: _Draw, name: str) -> Planted:
    who, chaos = _chaos(draw)
    return Planted(name, UNCLEAR, f"{draw.gpt()} {draw.plan()} {chaos}", without=who)


def _two_alike(draw: _Draw, name: str) -> Planted:
    return _unclear(draw, name, f"--data.source {DATA}:SlowText --callbacks.call {DATA}:dawdle")


def _unclear(draw: _Draw, name: str, more: str) -> Planted:
    sleep = {"PLANTED_SLEEP": str(draw.between(0.1, 0.3))}
    return Planted(name, UNCLEAR, f"{draw.gpt()} {draw.plan()} {more}", environ=sleep)


_PLANTED: Mapping[str, Callable[[_Draw, str], Planted]] = {
    "slow loader": _slow_loader,
    "small buckets": _small_buckets,
    "tiny kernels": _tiny_kernels,
    "uneven stages": _uneven_stages,
    "thin link": _thin_link,
    "garbage collection": _collecting,
    "frequent checkpoints": _checkpoints,
    "swap": _swapped,
    "python in the loop": _counted,
    "too many micro-batches": _micro_batches,
    "needless recompute": _recomputed,
    "one slow rank": _slow_rank,
}
_HEALTHY: Mapping[str, Callable[[_Draw, str], Planted]] = {
    "healthy: one rank": _healthy("dp=1", "dp=1 micros=2"),
    "healthy: replicas or shards": _healthy("dp=2", "shard=2", "shard=2 zero=2"),
    "healthy: accumulation": _healthy("dp=2 micros=2", "shard=2 micros=2"),
    "healthy: pictures": _pictures,
}
_AMBIGUOUS: Mapping[str, Callable[[_Draw, str], Planted]] = {
    "ambiguous: few steps": _six_steps,
    "ambiguous: seldom and long": _seldom,
    "ambiguous: events are missing": _missing,
    "ambiguous: two alike": _two_alike,
}
