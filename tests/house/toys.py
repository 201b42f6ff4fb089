"""A toy of every family, each in one file, and a program that tries all of them in one copy of the package.

The copy lies in the working folder, as `src`. Live parts of toys leave their family's noun in `used.txt`.
"""

import contextlib
import inspect
import io
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance import starters

USED = "used.txt"

_NOTED = """
    def {live}(self, *args, **more):
        with open("used.txt", "a") as used:
            used.write("{noun}\\n")
        return super().{live}(*args, **more)
"""
_MEMBER = '''
"""A toy."""

from typing import Literal

from pydantic import Field

from {module} import {base}
from unisono.spec.fidelity import Fidelity


class Toy{base}({base}):
    """A toy beside {base}."""

    name = "{name}"
    {more}
    taste: Literal["sweet", "sour"] = Field(default="sweet", description="what it tastes of")
'''
_VERB = '''
"""A toy."""

from unisono.verbs import CommandCall, Parser, Result, Verb


class {base}(Verb):
    """Greet somebody by name."""

    name = "{name}"

    def flags(self, parser: Parser) -> None:
        parser.add_argument("whom", metavar="NAME")

    def run(self, call: CommandCall) -> Result:
        call.settings.say(f"good morning, {{call.args.whom}}")
        return {{"greeted": call.args.whom}}
'''
_BENCH = '''
"""A toy."""

from unisono_contrib.measure.benches.net import NetBench


class ToyBench(NetBench):
    """Measures what net does."""

    name = "toy"
'''
_SECTION = '''
"""A toy."""

from pydantic import Field

from unisono.spec.section import Section


class ToySection(Section):
    """A toy."""

    name = "toy"

    taste: str = Field(default="sweet", description="what it tastes of")
'''
_STARTER = """
from unisono.launch.starters import Started, Starter, number, required


"""


@dataclass(frozen=True)
class Toy:
    """A member beside `module`'s `base`. live: the method that makes its live part, or is it. more: of its body."""

    module: str
    base: str
    live: str
    more: str = ""

    def text(self, noun: str, name: str) -> str:
        known = {"module": self.module, "base": self.base, "name": name, "more": self.more, "noun": noun}
        return _MEMBER.format(**known) + _NOTED.format(live=self.live, noun=noun)


_COSTS = """
    def work(self, *sizes):
        from dataclasses import replace

        return replace(super().work(*sizes), moved={moved})
"""
_LOSSY = """
    fidelity = Fidelity.LOSSY
    identities = (__import__("unisono.sync").sync.Identity("toy_policy", "every_step"),)
"""
MOVED = {"codec": 1 << 33, "policy": 1 << 34}
"""Bytes that toys move through memory in a step, beside what the members move that they are made of."""

KIND = 'kind: Literal["toy_model_kind"] = Field(default="toy_model_kind", description="a toy")'
TOYS = {
    "schedule": Toy("unisono.programs.schedules.gpipe", "GPipe", "timetable"),
    "policy": Toy("unisono.sync.every_step", "EveryStep", "bind", _COSTS.format(moved=1 << 34) + _LOSSY),
    "codec": Toy("unisono.codecs.plain", "Plain", "bind", _COSTS.format(moved=1 << 33)),
    "collective": Toy("unisono.comm.collectives.messages", "Messages", "bind"),
    "way of attention": Toy("unisono.parallel.attend.gather", "GatherWay", "bind"),
    "model kind": Toy("unisono_contrib.models.mlp", "MLPConfig", "build", KIND),
    "data source": Toy("unisono_contrib.train.data.sources.digits", "Handwriting", "load"),
    "optimiser": Toy("unisono.train.optim.sgd", "Momentum", "bind"),
    "learning-rate schedule": Toy("unisono.train.rates.linear", "Straight", "after"),
    "loss": Toy("unisono.train.losses.cross_entropy", "CrossEntropy", "bind", 'main = "taste"'),
    "metric": Toy("unisono.train.metrics.accuracy", "Accuracy", "count"),
    "sink": Toy("unisono_contrib.train.sinks.csv", "CsvSink", "open"),
    "split": Toy("unisono_contrib.federated.splits.iid", "EvenSplit", "assign"),
    "aggregate": Toy("unisono_contrib.federated.aggregates.mean", "Mean", "combine"),
    "strategy": Toy("unisono_contrib.federated.strategies.fedavg", "FedAvg", "step"),
}


_METHOD = '''
"""A toy."""

from unisono_contrib.sweep.methods import SearchMethod


class ToyMethod(SearchMethod):
    """Nothing but the first cell."""

    name = "toy"

    def propose(self, progress, folder):
        return {}
'''
_PLACE = '''
"""A toy."""

from contextlib import contextmanager

from unisono_contrib.sweep.places import TrialPlace


class ToyPlace(TrialPlace):
    """Nowhere."""

    name = "toy"

    @contextmanager
    def open(self, grace):
        yield None
'''
_SCHEDULER = '''
"""A toy."""

from unisono_contrib.submit import JobState, Submitter


class ToyScheduler(Submitter):
    """Nobody plays its jobs."""

    name = "toy"

    def files(self, job):
        return []

    def submit(self, job, folder):
        return "0"

    def state(self, job, folder):
        return JobState.UNKNOWN
'''
_ENGINE = '''
"""A toy."""

from unisono_contrib.verify.engines import StepEngine


class ToyEngine(StepEngine):
    """It plays nothing."""

    name = "toy"

    def problem(self, resolved):
        return "any recipe"

    def play(self, question, resolved, out):
        return None
'''
_OF_VERBS = {
    "bench": _BENCH, "search method": _METHOD, "place of trials": _PLACE, "section": _SECTION, "scheduler": _SCHEDULER,
    "engine": _ENGINE,
}  # fmt: skip
"""Families whose members one verb alone takes, and no run."""
BESIDE = {"starter", "verb", *_OF_VERBS}
"""Families that no recipe and no plan names."""


def name_of(noun: str) -> str:
    """The toy's name: `toy_learning_rate_schedule`."""
    return "toy_" + noun.replace(" ", "_").replace("-", "_")


def planted(package: Path, families: Mapping[str, Any]) -> None:
    """Writes every toy into a copy of the package."""
    for noun, family in families.items():
        folder = package.joinpath(*family.package.split("."))
        if noun == "verb":
            text = _VERB.format(base="GreetVerb", name=name_of(noun))
            (folder / f"{name_of(noun)}.py").write_text(text)
            continue
        place = folder / (f"{name_of(noun)}/__init__.py" if family.folders else f"{name_of(noun)}.py")
        place.parent.mkdir(exist_ok=True)
        own = {"starter": _STARTER + inspect.getsource(starters.Toy), **_OF_VERBS}
        text = own[noun] if noun in own else TOYS[noun].text(noun, name_of(noun))
        place.write_text(text.replace('name = "toy"', f'name = "{name_of(noun)}"'))
    package.with_name("mine.py").write_text(
        TOYS["sink"].text("sink", "mine")
        + _VERB.format(base="OwnVerb", name="own").replace('"""A toy."""', "")
    )


RECIPE = """\
[model]
kind = "toy_model_kind"
hidden = [8, 8]
[data]
source = "toy_data_source"
[train]
optimizer = "toy_optimiser:taste=sour"
lr_schedule = "toy_learning_rate_schedule"
loss = "toy_loss:sour"
metrics = ["toy_metric"]
steps = 2
eval_every = 2
eval_batches = 1
global_batch = 4
micro_batch = 2
[out]
track = ["toy_sink:taste=sour"]
report = false
"""
FEDERATED = """\
[federated]
clients = 2
rounds = 1
split = "toy_split"
strategy = "toy_strategy"
aggregate = "toy_aggregate"
"""
TEXTS = RECIPE.replace('kind = "toy_model_kind"\nhidden = [8, 8]', "n_layer = 1\ncontext = 8").replace(
    "toy_data_source", "text:recipe.toml"
)
PLANS = {
    "dp=2 sync=toy_policy codec=toy_codec collective=toy_collective:taste=sour": "recipe.toml",
    "pp=2 schedule=toy_schedule:taste=sour": "recipe.toml",
    "cp=2 cp_kind=toy_way_of_attention:taste=sour": "texts.toml",
}
KEYS = {
    "plan.schedule": "schedule",
    "plan.cp_kind": "cp_kind",
    "plan.sync": "sync",
    "plan.codec": "codec",
    "plan.collective": "collective",
}


PRICED = {
    "dp=3": "usual",
    "dp=3 sync=toy_policy": "policy",
    "dp=3 codec=toy_codec": "codec",
    "dp=3 collective=messages": "messages",
    "dp=3 collective=toy_collective": "collective",
    "pp=2 schedule=gpipe micros=6": "gpipe",
    "pp=2 schedule=toy_schedule micros=6": "schedule",
}
SIZES = (
    "--model.n_layer",
    "2",
    "--model.vocab",
    "512",
    "--train.global_batch",
    "6",
    "--train.micro_batch",
    "1",
)


def said(*words: str) -> dict[str, Any]:
    """A command in this process: its exit code, its stdout, its stderr."""
    from unisono.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def without_torch(families: Mapping[str, str]) -> dict[str, Any]:
    """Everything that answers at once, in a process that cannot import torch. families: noun → `module:NAME`."""
    from importlib import import_module

    sys.modules["torch"] = None  # type: ignore[assignment]
    found, told = {}, {}
    for noun, place in families.items():
        module, _, name = place.partition(":")
        family = getattr(import_module(module), name)
        found[noun] = [family.find(each).name for each in family.names()]
        if family.key in KEYS:
            told[noun] = ("--plan", f"dp=2 {KEYS[family.key]}={name_of(noun)}")
        elif "." in family.key and noun != "model kind":
            told[noun] = (f"--{family.key}", name_of(noun))
    Path("recipe.toml").write_text(RECIPE)
    Path("texts.toml").write_text(TEXTS)
    Path("federated.toml").write_text(RECIPE + FEDERATED)
    check = ("config", "check", "recipe.toml")
    answers = {
        "found": found,
        "help": said("--help"),
        "train --help": said("train", "--help"),
        "schema": said("config", "schema"),
        "right": {noun: said(*check, *words) for noun, words in told.items()},
        "no such option": {noun: said(*check, *w[:-1], f"{w[-1]}:colour=red") for noun, w in told.items()},
        "no such value": {noun: said(*check, *w[:-1], f"{w[-1]}:taste=salty") for noun, w in told.items()},
        "nobody": {noun: said(*check, *w[:-1], w[-1].replace("toy_", "tou_")) for noun, w in told.items()},
        "a key, wrong": said(*check, "--model.taste", "salty"),
        "a user's own": said(*check, "--out.track", "mine.py:ToyCsvSink:taste=sour"),
        "a user's own, wrong": said(*check, "--out.track", "mine.py:ToyCsvSink:colour=red"),
        "a user's own, misspelt": said(*check, "--out.track", "mine.py:ToyCvsSink"),
        "verb --help": said(name_of("verb"), "--help"),
        "verb": said(name_of("verb"), "Ada"),
        "verb --json": said(name_of("verb"), "Ada", "--json"),
        "a user's own verb": said("mine.py:OwnVerb", "Ada"),
        "starters": started(),
    }
    place = ("--cluster", "dgx-a100:1", "--stack", "plain", "--json")
    answers["priced"] = {
        who: said("simulate", *SIZES, "--plan", plan, *place) for plan, who in PRICED.items()
    }
    answers["priced"]["model kind"] = said("simulate", "recipe.toml", "--plan", "dp=2", *place)
    del sys.modules["torch"]
    return answers


def started() -> list[Any]:
    """What is made of environments that the toy starter and another one left, of parts of them, and of none."""
    from unisono.launch.starters import STARTERS, detect
    from unisono.spec.errors import UsageError

    toy, plain = (STARTERS.find(name)().leaves(0, 1, (3,)) for name in (name_of("starter"), "environment"))
    lacking = {key: value for key, value in toy.items() if key != "TOY_RANKS"}
    told: list[Any] = []
    for environ in ({**toy, "RANK": "2"}, plain, {}, lacking, {**toy, "TOY_RANK": "3"}):
        try:
            place = detect(environ)
            told.append(place and [place.rank, place.world])
        except UsageError as error:
            told.append(error.what)
    return told


def played() -> dict[str, Any]:
    """Two updates on two ranks, which are threads, under each plan; then the suites of all toys."""
    import unisono.launch.fork_server
    from tests.threads import ThreadForkServer

    unisono.launch.fork_server.ForkServer = ThreadForkServer  # type: ignore[attr-defined]
    runs = [said("train", file, "--plan", plan, "--json") for plan, file in PLANS.items()]
    federated = said("federate", "federated.toml", "--json")
    names = [word for noun in (*TOYS, "starter") for word in ("--conformance", name_of(noun))]
    used = Path(USED).read_text().splitlines()
    return {"runs": runs, "federated": federated, "used": used, "suites": said("verify", *names, "--json")}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    answers = without_torch(asked["families"])
    print(json.dumps(answers | played()))
