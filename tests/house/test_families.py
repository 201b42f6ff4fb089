"""A new member of any family is one new file: written into a copy of the package, it is found, listed and run."""

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from unisono.cli import LATER
from unisono.spec.finder import Finder

SOURCE = Path(__file__).parents[2] / "src" / "unisono"


def families() -> dict[str, Finder[Any]]:
    """Every family of the source, `module:NAME` → family: the values of top-level names made by Family or Finder."""
    known: dict[str, Finder[Any]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            call, target = getattr(node, "value", None), getattr(node, "target", None)
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Family", "Finder"):
                module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(
                    ".__init__"
                )
                known[f"{module}:{target.id}"] = getattr(import_module(module), target.id)
    return known


FAMILIES = families()

VERB = '''
"""`unisono greet`."""

from unisono.verbs import CommandCall, Parser, Result, Verb


class GreetVerb(Verb):
    """Greet somebody by name."""

    name = "greet"

    def flags(self, parser: Parser) -> None:
        parser.add_argument("whom", metavar="NAME")

    def run(self, call: CommandCall) -> Result:
        call.settings.say(f"good morning, {call.args.whom}")
        return {"greeted": call.args.whom}
'''

SINK = '''
"""dots.txt."""

from pydantic import Field

from unisono.spec.sink import Observer, Sink


class Dots(Sink):
    """dots.txt: a line for each step."""

    name = "dots"

    sign: str = Field(default=".", description="what stands before the loss")

    def open(self, run):
        path = run.run_dir / "dots.txt"
        lines = path.read_text().splitlines()[: run.step] if path.is_file() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line + "\\n" for line in lines))
        return _Dots(path, self.sign)


class _Dots(Observer):
    def __init__(self, path, sign):
        self.path, self.sign = path, sign

    def observe(self, steps):
        with self.path.open("a") as out:
            out.writelines(f"{self.sign}{one.loss!r}\\n" for one in steps)
'''


@pytest.fixture
def copied(tmp_path: Path):
    """Runs Python in a copy of the package that holds these files besides: relative path → content."""

    def run(more: dict[str, str], *argv: str) -> str:
        package = tmp_path / "src" / "unisono"
        if not package.exists():
            shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
        for name, content in more.items():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text(content)
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(package.parent)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_source_has_these_families() -> None:
    nouns = {family.noun for family in FAMILIES.values()}
    assert nouns >= {"schedule", "policy", "codec", "optimiser", "sink", "starter", "verb"}
    assert all(family.names() for family in FAMILIES.values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", FAMILIES)
def test_a_member_is_one_file_found_and_listed(copied, place: str) -> None:
    """A member's file under another name is another member, and no other file is touched."""
    family = FAMILIES[place]
    known = family.find(family.names()[0])
    home = Path(sys.modules[known.__module__].__file__ or "")
    folder = home.parent.parent if home.name == "__init__.py" else home.parent
    below = folder.relative_to(SOURCE)
    sources = {
        str(below / "toyish" / path.relative_to(home.parent))
        if home.name == "__init__.py"
        else f"{below}/toyish.py": path
        for path in (home.parent.glob("*.py") if home.name == "__init__.py" else [home])
    }
    files = {
        name: path.read_text()
        .replace(f'name = "{known.name}"', 'name = "toyish"')
        .replace(f'name: ClassVar[str] = "{known.name}"', 'name: ClassVar[str] = "toyish"')
        for name, path in sources.items()
    }
    module, _, name = place.partition(":")
    told = copied(
        files,
        "-c",
        f"from {module} import {name} as f; print('toyish' in f.names(), f.find('toyish').name, f.key)",
    )
    assert told.split()[:2] == ["True", "toyish"]
    if family.key == "unisono":
        assert "  toyish " in copied({}, "-m", "unisono", "--help")
    elif family.key.startswith("plan."):
        key = family.key.removeprefix("plan.")
        assert f" {key} " in (listed := copied({}, "-m", "unisono", "train", "--help"))
        assert "toyish" in listed
        assert "toyish" in copied({}, "-m", "unisono", "config", "schema")
        assert copied({}, "-m", "unisono", "config", "check", "--plan", f"dp=2 {key}=toyish").startswith("ok")
        assert f"{family.noun} toyish  ok" in copied({}, "-m", "unisono", "verify", "--conformance", "toyish")
        words = ("-m", "unisono", "config", "check", "--plan", f"{family.key.removeprefix('plan.')}=nobody")
        with pytest.raises(AssertionError, match="toyish"):
            copied({}, *words)
    elif "." in family.key:
        assert "toyish" in copied({}, "-m", "unisono", "config", "schema")


def test_declarations_of_all_members_need_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None\nfrom importlib import import_module\n"
    for place in FAMILIES:
        module, _, name = place.partition(":")
        script += f"f = import_module({module!r}).{name}\nfor name in f.names(): f.find(name)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_verb_is_one_file(copied) -> None:
    listed = copied({"verbs/greet.py": VERB}, "-m", "unisono", "--help")
    assert "  greet " in listed and "Greet somebody by name" in listed
    assert "NAME" in copied({}, "-m", "unisono", "greet", "--help")
    assert copied({}, "-m", "unisono", "greet", "Ada") == "good morning, Ada\n"
    assert json.loads(copied({}, "-m", "unisono", "greet", "Ada", "--json"))["greeted"] == "Ada"


def test_a_verb_that_the_contract_names_is_no_longer_later_once_it_has_a_file(copied) -> None:
    name = next(iter(LATER))
    listed = copied({f"verbs/{name}.py": VERB.replace("greet", name)}, "-m", "unisono", "--help")
    assert listed.count("not yet in this version") == len(LATER) - 1
    assert copied({}, "-m", "unisono", name, "Ada") == "good morning, Ada\n"


def test_a_verb_in_a_users_own_file_is_named_by_its_path(copied, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(VERB)
    assert copied({}, "-m", "unisono", "mine.py:GreetVerb", "Ada") == "good morning, Ada\n"


@pytest.mark.timeout(300)
def test_a_sink_is_one_file(copied, tmp_path: Path) -> None:
    known = json.loads(copied({"train/sinks/dots.py": SINK}, "-m", "unisono", "config", "schema"))
    assert "dots" in known["$defs"]["OutConfig"]["properties"]["track"]["description"]
    words = "train --train.steps 2 --model.n_layer 1 --model.d_model 16 --train.global_batch 2 --quiet"
    copied({}, "-m", "unisono", *words.split(), "--no-out.report", "--out.track", "dots:sign=+")
    (dots,) = (tmp_path / "runs").glob("run/*/dots.txt")
    assert [line[0] for line in dots.read_text().splitlines()] == ["+", "+"]
    suite = (
        "from pathlib import Path; from unisono.spec.sink import SINKS; from unisono.verify.conformance.sink import faults\n"
        "print('dots' in SINKS.names(), list(faults(SINKS.read('dots'), Path('held'))))"
    )
    assert copied({}, "-c", suite) == "True []\n"


def test_a_users_own_sink_is_refused_before_torch_where_it_is_wrong(copied, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SINK)
    words = ("-m", "unisono", "config", "check", "--out.track")
    assert copied({}, *words, "mine.py:Dots:sign=x").startswith("ok")
    with pytest.raises(AssertionError, match="takes no option colour"):
        copied({}, *words, "mine.py:Dots:colour=red")
    with pytest.raises(AssertionError, match=r"mine.py has no sink Dashes"):
        copied({}, *words, "mine.py:Dashes")
