"""The house stands: floors import only lower floors, and what answers at once imports nothing heavy."""

import ast
import resource
import subprocess
import sys
from pathlib import Path

from tests.house.source import FILES, ROOT, module_of, place_of, tree_of

MAY_READ_ENVIRONMENT = (
    "cli.py",
    "comm/hosts.py",
    "verbs/train/",
    "launch/",
    "train/data/tokenised/worker.py",
    "lab/shell.py",
    "train/data/stream/indexing.py",
    "train/data/stream/preparing.py",
    "trackers/follow.py",
)  # workers and the follower set their own; comm/hosts reads which link Gloo was given


def test_floors_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# A core of 2024 does so many rounds of a loop in a second; a slower or a busier one gets its seconds in proportion.
ROUNDS = 12_000_000
LOOP = """
def pace():
    import time
    before, kept = time.process_time(), 0
    for number in range(1_000_000):
        kept += number * number % 7
    return time.process_time() - before
"""


def _modules_after(code: str) -> tuple[set[str], float]:
    """Names of the modules loaded by a fresh Python running `code`, and its CPU seconds on a core of ROUNDS a second.

    The loop runs before and after the code, in its process: the slower of the two is how fast the core was."""
    script = (
        f"import sys\n{LOOP}\nfirst = pace()\n{code}\nlast = pace()\n"
        "print('\\n' + ' '.join([str(first), str(last), *sys.modules]))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    first, last, *modules = done.stdout.splitlines()[-1].split()
    loops = (float(first), float(last))
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime - sum(loops)
    return set(modules), seconds / max(1.0, max(loops) * ROUNDS / 1_000_000)


HELP = (["--help"], ["train", "--help"], ["plan", "--help"], [], ["bench"], ["trian"])
JUDGED = (
    ["train", "--train.stpes", "3"],
    ["train", "--demo", "--dry-run"],
    ["verify", "--demo", "--plan", "tp=5"],
    ["config", "show"],
)


def test_help_answers_at_once() -> None:
    """All of them in one Python, which has the time that each alone may take."""
    modules, seconds = _modules_after(f"from unisono.cli import main\nfor words in {HELP}: main(words)")
    assert modules.isdisjoint({"torch", "numpy", "pydantic", "rich", "PIL"})
    assert seconds < 1.0


def test_recipes_are_judged_without_torch() -> None:
    modules, seconds = _modules_after(f"from unisono.cli import main\nfor words in {JUDGED}: main(words)")
    assert "pydantic" in modules
    assert modules.isdisjoint({"torch", "numpy", "PIL"})
    assert seconds < 1.0


def test_a_thousand_devices_are_planned_in_seconds_and_without_torch() -> None:
    sizes = "n_layer 96 n_head 96 d_model 12288 context 2048 vocab 51200".split()
    words = ["plan", "--model", "gpt", "--train.global_batch", "1536", "--cluster", "dgx-h100:128"]
    words += [
        word for key, value in zip(sizes[::2], sizes[1::2], strict=True) for word in (f"--model.{key}", value)
    ]
    modules, seconds = _modules_after(f"from unisono.cli import main; assert main({words}) == 0")
    assert modules.isdisjoint({"torch", "PIL"})
    # 3 to 4 s on one core; 4.9 on another that runs the loop as quickly and has smaller caches.
    assert seconds < 6.0


WITHOUT_TORCH = ("spec", "programs", "plan", "config", "observe", "report", "planner", "launch", "lab")


def test_these_import_no_torch() -> None:
    """One Python imports their files one after the other, and names the first after which torch is there."""
    places = [place_of(file) for file in FILES]
    assert {place.partition("/")[0] for place in places} >= {*WITHOUT_TORCH}
    names = [
        module_of(file)
        for file, place in zip(FILES, places, strict=True)
        if place.partition("/")[0] in WITHOUT_TORCH and "/" in place and "rank" not in place
    ]
    code = f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
    code += "    'torch' in sys.modules and sys.exit(name)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_file_fits_in_a_head() -> None:
    """At most 400 lines a file and 60 a function: one list of all that are longer, not a test for each file."""
    too_long = []
    for path in FILES:
        text, place = path.read_text(), path.relative_to(ROOT / "src")
        if (lines := len(text.splitlines())) > 400:
            too_long.append(f"{place}: {lines} lines")
        for node in ast.walk(tree_of(path)):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and (lines := (node.end_lineno or 0) - node.lineno + 1) > 60:
                too_long.append(f"{place}:{node.lineno}: {node.name}: {lines} lines")
    assert too_long == []


def test_few_files_read_the_environment() -> None:
    readers = [place_of(f) for f in FILES if _reads_environment(tree_of(f))]
    assert [name for name in readers if not name.startswith(MAY_READ_ENVIRONMENT)] == []


def _reads_environment(tree: ast.AST) -> bool:
    return any(
        isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv") and _is_os(n) for n in ast.walk(tree)
    )


def _is_os(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "os"
