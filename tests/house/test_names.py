"""One word, one thing; and nobody asks for a member's name where a trait would do."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.house.source import FILES, SOURCE, place_of, tree_of
from tests.house.test_families import FAMILIES
from unisono.plan.grammar import known

# What a family's key is called in code: `plan.sync == "canonical"`, `model.kind in ("gpt", "moe")`.
WORDS = {
    "plan.sync": "sync",
    "plan.codec": "codec",
    "plan.schedule": "schedule",
    "plan.collective": "collective",
    "model.kind": "kind",
    "data.source": "source",
    "train.optimizer": "optimizer",
    "train.lr_schedule": "lr_schedule",
}


def test_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(place_of(path))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_nobody_branches_on_a_members_name() -> None:
    """Comparisons of a family's key with the name of one of its members, but in the member's own file."""
    found = []
    for path in FILES:
        place = place_of(path)
        for line, key, name in _questions(tree_of(path)):
            package = next(f.package for f in FAMILIES.values() if f.key == key)
            if not place.startswith(package.removeprefix("unisono.").replace(".", "/")):
                found.append(f"{place}:{line}: {key} compared with {name!r}")
    assert found == []


def test_prices_and_checks_hold_no_list_of_members_names() -> None:
    """A fact of a schedule, policy or codec stands in its file, or is read off its value."""
    named = {name for key in ("schedule", "sync", "codec") for name in known(key)} - {
        "plain",
        "block",
        "auto",
    }
    found = []
    for path in [*sorted((SOURCE / "planner").rglob("*.py")), SOURCE / "plan" / "checks.py"]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Compare | ast.Tuple | ast.List | ast.Set | ast.Dict):
                texts = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                found += [f"{path.relative_to(SOURCE)}:{node.lineno}: {name}" for name in texts & named]
    assert found == []


def _questions(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, key of the family, member's name) of every comparison of a key with a name."""
    names = {WORDS[f.key]: (f.key, frozenset(f.names())) for f in FAMILIES.values() if f.key in WORDS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            words = {getattr(side, "attr", getattr(side, "id", "")) for side in sides}
            texts = {c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)}
            for word in words & names.keys():
                key, members = names[word]
                yield from ((node.lineno, key, str(name)) for name in texts & members)


def test_the_question_is_recognised() -> None:
    said = [
        (key, name)
        for _, key, name in _questions(ast.parse("x = plan.sync == 'canonical' or a.kind in ('gpt', 'b')"))
    ]
    assert ("plan.sync", "canonical") in said
    assert not list(_questions(ast.parse("event.kind == 'note' or plan.recompute == 'full'")))


def test_files_that_the_source_names_are_there() -> None:
    """What a rank is in is told by the file of a frame, and pages lead to files: a name that moved on says nothing."""
    named = re.compile(r"""["'`]((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)\b""")
    gone = []
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for name in named.findall(line):
                places = (SOURCE, SOURCE.parent, SOURCE.parent / "unisono_contrib", SOURCE.parents[1])
                if not name.startswith("torch/") and not any((place / name).exists() for place in places):
                    gone.append(f"{path.relative_to(SOURCE)}:{number}: {name}")
    assert gone == []
