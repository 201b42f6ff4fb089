"""A new member of any family is one new file: toys of all families are written into one copy of the package, and found,
listed, checked, used by a run and judged there. No other file is touched."""

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from tests.house import toys
from tests.house.source import FILES, ROOT, SOURCE, module_of, tree_of
from unisono.spec.finder import Finder


def families() -> dict[str, Finder[Any]]:
    """Every family of the source, `module:NAME` → family: the values of top-level names made by Family or Finder."""
    known: dict[str, Finder[Any]] = {}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if "Family(" not in text and "Finder(" not in text:
            continue  # to parse every file would take seconds, in each worker
        for node in tree_of(path).body:
            call, target = getattr(node, "value", None), getattr(node, "target", None)
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Family", "Finder"):
                module = module_of(path)
                known[f"{module}:{target.id}"] = getattr(import_module(module), target.id)
    return known


FAMILIES = families()
PLACES = {family.noun: place for place, family in FAMILIES.items()}
NOUNS = sorted(PLACES)
OF_PLANS = [family.noun for family in FAMILIES.values() if family.key.startswith("plan.")]
WRITTEN = sorted({*toys.TOYS} - {"model kind"})
"""Those with a text of their own in a plan or recipe: a model's options are keys."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program `toys` saw in a copy of the package."""
    place = tmp_path_factory.mktemp("toys")
    package = place / "src"
    # With what is compiled of it, for that takes longer than the rest; not what is being written at the moment.
    shutil.copytree(SOURCE.parent, package, ignore=shutil.ignore_patterns("*.pyc.*", "*.egg-info"))
    before = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}
    toys.planted(package, {family.noun: family for family in FAMILIES.values()})
    assert all(path.read_bytes() == text for path, text in before.items())
    done = subprocess.run(
        [sys.executable, "-m", "tests.house.toys", json.dumps({"families": PLACES})],
        cwd=place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_family_has_a_toy() -> None:
    assert {*PLACES} == {*toys.TOYS, *toys.BESIDE}
    assert len(PLACES) == len(FAMILIES) and all(family.names() for family in FAMILIES.values())


@pytest.mark.parametrize("noun", NOUNS)
def test_it_is_found_and_no_declaration_needs_torch(told: dict[str, Any], noun: str) -> None:
    assert set(told["found"][noun]) == {*FAMILIES[PLACES[noun]].names(), toys.name_of(noun)}


@pytest.mark.parametrize("noun", sorted({*NOUNS} - toys.BESIDE))
def test_help_or_schema_list_it(told: dict[str, Any], noun: str) -> None:
    assert toys.name_of(noun) in told["schema"]["out"]
    if noun in OF_PLANS:
        assert toys.name_of(noun) in told["train --help"]["out"]


@pytest.mark.parametrize("noun", WRITTEN)
def test_its_options_are_checked(told: dict[str, Any], noun: str) -> None:
    assert told["right"][noun]["code"] == 0, told["right"][noun]["err"]
    name, seen = toys.name_of(noun), {key: told[key][noun]["err"] for key in told if key.startswith("no")}
    assert f"{noun} {name} takes no option colour" in seen["no such option"]
    assert f"{noun} {name}: taste: input should be 'sweet' or 'sour'" in seen["no such value"]
    assert f"did you mean {name}?" in seen["nobody"]


def test_a_kinds_keys_are_checked(told: dict[str, Any]) -> None:
    assert told["a key, wrong"]["code"] == 2 and "'sweet' or 'sour'" in told["a key, wrong"]["err"]


@pytest.mark.parametrize("noun", toys.TOYS)
def test_a_run_uses_it(told: dict[str, Any], noun: str) -> None:
    for run, plan in zip(told["runs"], toys.PLANS, strict=True):
        assert run["code"] == 0, run["err"]
        done = json.loads(run["out"])
        assert done["steps"] == done["ranks"] == 2
        assert all(word in done["plan"] for word in plan.split() if "toy" in word)
    assert told["federated"]["code"] == 0, told["federated"]["err"]
    assert noun in told["used"]


@pytest.mark.parametrize("noun", [*toys.TOYS, "starter"])
def test_its_suite_passes_it(told: dict[str, Any], noun: str) -> None:
    judged = {one["family"]: one for one in json.loads(told["suites"]["out"])["results"]}
    assert judged[noun]["member"] == toys.name_of(noun)
    assert judged[noun]["suites"] == ["member", noun]
    assert judged[noun]["faults"] == []


def test_it_is_priced_by_its_own_file(told: dict[str, Any]) -> None:
    assert all(one["code"] == 0 for one in told["priced"].values()), told["priced"]
    priced = {who: json.loads(one["out"]) for who, one in told["priced"].items()}
    usual, bandwidth = priced["usual"], 2.039e12  # of an A100 with 80 GB
    for noun, moved in toys.MOVED.items():
        more = priced[noun]["step_s"] - usual["step_s"]
        assert moved / bandwidth < more < 3 * moved / bandwidth
        assert priced[noun]["comm"]["dp"]["bytes"] == pytest.approx(usual["comm"]["dp"]["bytes"], rel=1e-6)
    assert priced["policy"]["fidelity"] == "LOSSY" and "toy_policy: A toy" in priced["policy"]["fidelity_why"]
    assert priced["codec"]["fidelity"] == usual["fidelity"] == "ROUNDING"
    assert priced["schedule"]["step_s"] == priced["gpipe"]["step_s"]
    assert priced["schedule"]["mem_gib"] == priced["gpipe"]["mem_gib"]
    assert priced["model kind"]["step_s"] > 0.0 and priced["model kind"]["comm"]["dp"]["bytes"] > 0


def test_a_starter_is_asked_in_its_turn_and_its_mistakes_are_told(told: dict[str, Any]) -> None:
    of_the_toy, of_another, of_none, of_parts, of_nonsense = told["starters"]
    assert (of_the_toy, of_another, of_none) == ([1, 3], [1, 3], None)
    assert "TOY_RANKS is not set" in of_parts
    assert "rank 3 of 3" in of_nonsense


def test_a_verb_is_listed_and_run(told: dict[str, Any]) -> None:
    assert f"  {toys.name_of('verb')} " in told["help"]["out"]
    assert "Greet somebody by name" in told["help"]["out"] and "NAME" in told["verb --help"]["out"]
    assert told["verb"]["out"] == told["a user's own verb"]["out"] == "good morning, Ada\n"
    assert json.loads(told["verb --json"]["out"])["greeted"] == "Ada"


def test_a_users_own_is_refused_before_torch_where_it_is_wrong(told: dict[str, Any]) -> None:
    assert told["a user's own"]["code"] == 0
    assert "takes no option colour" in told["a user's own, wrong"]["err"]
    assert "mine.py has no sink ToyCvsSink" in told["a user's own, misspelt"]["err"]
