"""What the documents show is true: every fenced snippet parses, and what is marked `run` runs.

```bash        is parsed by bash; its `unisono` and `make` commands must exist, and so must their flags
```bash run    is executed in an empty folder
```python      is compiled
```python run  is executed in an empty folder
```bash walk   are executed with all that are marked so on the page, one after the other, in one folder; $EXAMPLES
```python walk names examples/
```toml        is a whole recipe, held against its plan
```toml walk F the same, and the file F of a walk
```toml part   is TOML only

Every command of README.md and docs/index.md is a line of a fence that is executed.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forked import Forked
from unisono import config
from unisono.cli import summaries
from unisono.config.fields import keys
from unisono.planner.clusters import CLUSTER_KEYS, DEVICE_KEYS, LINK_KEYS

ROOT = Path(__file__).parents[2]
PAGES = [
    p
    for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if p.exists()
]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@dataclass(frozen=True)
class Snippet:
    place: str
    language: str
    mark: str
    body: str


def snippets() -> list[Snippet]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            language, _, mark = match["info"].strip().partition(" ")
            line = text[: match.start()].count("\n") + 1
            body = "\n".join(row.removeprefix(match["indent"]) for row in match["body"].splitlines())
            found.append(Snippet(f"{page.relative_to(ROOT)}:{line}", language, mark, body + "\n"))
    return found


def of(*languages: str, run: bool = False):
    chosen = [s for s in snippets() if s.language in languages and (s.mark == "run" or not run)]
    return pytest.mark.parametrize("snippet", chosen, ids=[s.place for s in chosen])


def environment() -> dict[str, str]:
    """Snippets find `unisono` as a reader would, in the environment that runs the tests."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@of("bash", "sh", "console")
def test_commands_exist(snippet: Snippet) -> None:
    done = subprocess.run(["bash", "-n"], input=snippet.body, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in snippet.body.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:1] == ["make"]:
            assert {w for w in words[1:] if "=" not in w} <= TARGETS, line
        if words[:1] == ["unisono"] and len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in summaries(), line
            flags, _ = config.split_flags(words[2:])
            assert {name for name, _ in flags} <= set(keys()), line


@pytest.mark.slow
@of("bash", "sh", run=True)
@pytest.mark.timeout(600)
def test_commands_run(snippet: Snippet, tmp_path: Path) -> None:
    subprocess.run(["bash", "-eu", "-c", snippet.body], cwd=tmp_path, env=environment(), check=True)


def walked(snippet: Snippet) -> str:
    """The shell commands that play a snippet of a walk."""
    if snippet.language == "bash":
        return snippet.body
    start = "python -" if snippet.language == "python" else f"cat > {snippet.mark.split()[1]}"
    return f"{start} <<'WALKED'\n{snippet.body}WALKED\n"


def walks(languages: Sequence[str] = ("bash", "python", "toml")) -> dict[str, str]:
    """Page → a script of all its snippets that are marked `walk`."""
    scripts: dict[str, str] = {}
    for snippet in snippets():
        if snippet.mark.split()[:1] == ["walk"] and snippet.language in languages:
            page = snippet.place.partition(":")[0]
            scripts[page] = scripts.get(page, "") + walked(snippet)
    return scripts


def commands(text: str) -> set[str]:
    """The command lines of a shell script, without comments."""
    lines = (shlex.join(shlex.split(line, comments=True)) for line in text.replace("\\\n", " ").splitlines())
    return {line for line in lines if line}


WITHOUT_TORCH = ("unisono config ", "unisono new ", "unisono completion ")
BY_HAND = ("make ", "pip install ", "git clone ")
"""What changes the environment of the tests: each runs such commands at its set-up."""


def test_commands_of_walks_that_need_no_torch_run(tmp_path: Path) -> None:
    for page, script in walks(("bash",)).items():
        quick = [line for line in sorted(commands(script)) if line.startswith(WITHOUT_TORCH)]
        files = walks(("toml",)).get(page, "")
        if quick and files:
            lines = "\n".join(quick)
            done = subprocess.run(
                ["bash", "-eu", "-c", files + lines], cwd=tmp_path, env=environment(), check=False
            )
            assert done.returncode == 0, (page, quick)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_command_of_the_first_pages_is_executed(page: str) -> None:
    """As it stands, in a fence of some page that a test executes."""
    executed = [s.body for s in snippets() if s.language == "bash" and s.mark in ("run", "walk")]
    known = set().union(*map(commands, executed))
    shown = set().union(
        *(commands(s.body) for s in snippets() if s.place.startswith(page) and s.language == "bash")
    )
    assert shown
    assert {line for line in shown if not line.startswith(BY_HAND)} <= known


@pytest.mark.slow
@pytest.mark.parametrize("page", walks())
@pytest.mark.timeout(1200)
def test_pages_can_be_walked(page: str, tmp_path: Path) -> None:
    """Every command as it stands; runs are shorter than a reader's, but longer than the last fault of a script."""
    known = environment() | {"EXAMPLES": str(ROOT / "examples"), "UNISONO_TRAIN_STEPS": "130"}
    subprocess.run(["bash", "-eu", "-c", walks()[page]], cwd=tmp_path, env=known, check=True)


@pytest.mark.timeout(120)
def test_three_commands_lead_from_a_model_to_a_plan_that_runs(tmp_path: Path) -> None:
    """The README's link to the planner: first lines say memory, tokens/s, days and error, and `train` takes the plan."""
    assert "(docs/plan.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    first = next(s for s in snippets() if s.place.startswith("docs/plan.md"))
    assert (first.mark, first.body.count("\nunisono ")) == ("run", 3)
    done = subprocess.run(
        ["bash", "-eu", "-c", first.body.replace("\nunisono ", "\necho ==; unisono ")],
        cwd=tmp_path, env=environment(), check=True, capture_output=True, text=True,
    )  # fmt: skip
    searched, priced, would = (text.strip().splitlines() for text in done.stdout.split("==\n")[1:])
    for page in (searched, priced):
        head = dict(line.split(maxsplit=1) for line in page[:13] if line[:1].strip())
        assert {"plan", "memory", "speed", "training", "error", "batch"} <= set(head)
        assert "GiB" in head["memory"] and "tokens/s" in head["speed"] and "days" in head["training"]
        assert "±" in head["error"] or "not known" in head["error"]
        assert "never measured: no run of ours" in "\n".join(page[:10])
    chosen = head["plan"]
    assert any(line.partition(". ")[2].startswith(f"{chosen} ") for line in searched), "one of the best"
    assert f'plan = "{chosen}"' in "\n".join(would)


def test_every_key_of_a_cluster_file_is_on_its_page() -> None:
    page = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
    missing = [key for key in (*CLUSTER_KEYS, *LINK_KEYS, *DEVICE_KEYS) if not re.search(rf"\b{key}\b", page)]
    assert not missing


@of("python")
def test_python_compiles(snippet: Snippet) -> None:
    compile(snippet.body, snippet.place, "exec")


@of("python", run=True)
@pytest.mark.timeout(300)
def test_python_runs(snippet: Snippet, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(snippet.body, encoding="utf-8")
    done = Forked([str(script)], tmp_path, environment())
    said = done.stderr.read()
    assert done.wait() == 0, said


@of("toml")
def test_recipes_hold(snippet: Snippet, tmp_path: Path) -> None:
    tomllib.loads(snippet.body)
    if snippet.mark == "part":
        return
    path = tmp_path / "recipe.toml"
    path.write_text(snippet.body, encoding="utf-8")
    got = config.load(path)
    config.resolve(got.recipe, got.plan, None, got.origins)


def test_targets_of_the_make_file_are_there() -> None:
    assert {"setup", "demo", "test", "test-all", "test-gpu", "check", "fmt", "bench", "docs"} <= TARGETS
