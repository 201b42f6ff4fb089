"""The parts of these pages that the program itself knows: keys, verbs, timetables, the checkpoint format.

`python docs/blocks.py` writes them again between `<!-- block NAME -->` and `<!-- end -->`, and a test holds the pages
to it. No torch.
"""

import ast
import difflib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from unisono.comm.collectives import COLLECTIVES, ProgramCollective
from unisono.config.fields import SECTIONS, keys
from unisono.parallel.attend import CONTEXT_WAYS, tiles
from unisono.plan.grammar import KEYS, NAMED, known
from unisono.plan.plan import DEFAULTS
from unisono.programs import draw
from unisono.programs.collectives import draw as moves
from unisono.programs.collectives import ring as ring_program
from unisono.programs.pipeline import bubble, lower, peak_held, play_costs
from unisono.programs.schedules import SCHEDULES
from unisono.spec.finder import Finder
from unisono.spec.source import SOURCES
from unisono.spec.training import OPTIMISERS
from unisono.verbs import VERBS

DOCS = Path(__file__).parent
ROOT = DOCS.parent
SOURCE = ROOT / "src" / "unisono"
TABLES = sorted((DOCS / "data").glob("*.md"))
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *TABLES)
BLOCK = re.compile(r"(<!-- block ([\w.-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CODE = re.compile(r"[A-Z]\d\d")

PLAN_MEANINGS = {
    "dp": "replicas; -1: as many as the available ranks allow",
    "shard": "ranks over which one replica's state is sharded",
    "zero": "what `shard` splits: 1 optimiser, 2 and gradients, 3 and parameters;"
    " `3:wire=int8`, `3:prefetch=2` ([sharding](sharding.md))",
    "pp": "pipeline stages",
    "schedule": "the stages' timetable",
    "micros": "micro-batches of a step on one data rank",
    "tp": "ranks that split every matrix product, in one row or in rows and columns",
    "cp": "ranks that split the positions of a sample",
    "ep": "ranks that split the experts, or the tables",
    "cp_kind": "how `cp` exchanges keys and values",
    "sync": "how replicas stay together",
    "collective": "algorithm of the all-reduce on `dp`",
    "codec": "compression of gradients on `dp`",
    "precision": "dtype of the computation; weights and optimiser keep fp32 (fp64 with fp64);"
    " `bf16:params`, `bf16:stochastic`, `bf16:fp8` ([precision](precision.md))",
    "recompute": "which activations are recomputed in backward",
    "offload": "what is offloaded to the host or a file",
    "blocks": "settings for ranges of blocks",
}

# What the contract names for the time after this version: family → names. A name that has a member is left out.
PROMISED: tuple[tuple[str, Finder[Any], tuple[str, ...]], ...] = (
    (
        "`train.optimizer`",
        OPTIMISERS,
        ("adascale", "kfac", "lamb", "lans", "lars", "muon", "shampoo", "soap"),
    ),
    ("`data.source`", SOURCES, ("mds", "s3", "tar")),
    ("commands", VERBS, ("ask", "compare", "dash", "evaluate", "runs", "scale", "sweep")),
)
# Plans that a reader might expect to work: what they ask for, and the plan. Each is refused with exit code 2.
REFUSED = {
    "blocks of one stage that differ in `shard`": "dp=2 shard=2 blocks=0:shard=1",
    "blocks of one stage that differ in their degree of `tp`, but for `tp=1`": "tp=4 blocks=0:tp=2",
    "a codec without replicas": "tp=2 codec=int8",
    "a codec under `sync=canonical`": "dp=2 sync=canonical codec=int8",
}


def fenced(text: str) -> str:
    return f"```text\n{text}\n```"


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def timetable(name: str, ranks: int, micros: int) -> str:
    """A timetable as our own code draws it, with backward twice as dear as forward."""
    return fenced(draw.text(play_costs(SCHEDULES.read(name).timetable(ranks, micros), 1.0, 2.0)))


def several(name: str, ranks: int, micros: int) -> str:
    """A timetable of several stages a rank or of weight gradients apart: F, B and W of a stage cost the same."""
    table = SCHEDULES.read(name).timetable(ranks, micros)
    return fenced(draw.text(play_costs(table, 1.0, 1.0 if table.splits_backward else 2.0, weight=1.0)))


def rounds(name: str, op: str, ranks: int) -> str:
    """A collective's program as our own code draws it."""
    member = COLLECTIVES.read(name)
    if not isinstance(member, ProgramCollective):
        raise TypeError(f"{name} is no program")
    return fenced(moves.text(member.program(op, ranks)))


def collectives() -> str:
    """Rounds and bytes of an all-reduce of every algorithm of rounds, counted on its programs."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name in COLLECTIVES.names():
            member = COLLECTIVES.read(name)
            if isinstance(member, ProgramCollective):
                programs = [member.program("all_reduce", n) for n in (4, 6, 16)]
                cells = (f"{len(p.rounds)}, {p.most(720 * p.size) / (720 * p.size):.2f}" for p in programs)
                yield f"`{name}`", member.summary().rstrip("."), *cells

    return table(("`collective=`", "is", "4 ranks", "6 ranks", "16 ranks"), rows())


def bubbles() -> str:
    """The bubble of 1F1B and what is held, for some sizes, measured on the played timetable."""

    def rows() -> Iterator[tuple[str, ...]]:
        for ranks, micros in ((2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (4, 16), (4, 32)):
            both = [SCHEDULES.read(name).timetable(ranks, micros) for name in ("gpipe", "1f1b")]
            share = bubble(play_costs(both[1], 1.0, 2.0))
            held = [str(max(peak_held(one))) for one in both]
            yield str(ranks), str(micros), f"{100 * share:.1f} %", *held

    return table(("stages", "micro-batches", "bubble of both", "held by gpipe", "held by 1f1b"), rows())


def ring(ranks: int) -> str:
    """Which keys (columns) each chunk of queries (rows) meets at which step of ring attention, and on which rank."""
    way = CONTEXT_WAYS.read("ring")
    held = [way.places(2 * ranks, i, ranks) for i in range(ranks)]
    met = [["."] * (2 * ranks) for _ in range(2 * ranks)]
    for i, mine in enumerate(held):
        for step in range(ranks):
            theirs = held[(i - step) % ranks]
            own, keys = ([n for n, _ in places.stretches] for places in (mine, theirs))
            for rows, columns, causal in tiles(mine, theirs):
                for q, k in product(own[rows], keys[columns]):
                    met[q][k] = str(step) if k <= q or not causal else "."
    owner = {n: i for i, places in enumerate(held) for n, _ in places.stretches}
    head = "chunk  rank   keys of chunk " + " ".join(map(str, range(2 * ranks)))
    rows_ = [f"{q:>5}{owner[q]:>6}{'':17}{' '.join(met[q])}" for q in range(2 * ranks)]
    return fenced("\n".join((head, *rows_)))


def lowered() -> str:
    """One row of a timetable with its messages."""
    rows = lower(SCHEDULES.read("1f1b").timetable(2, 2)).rows
    return fenced("\n".join(f"rank {n}  {' '.join(str(a) for a in row)}" for n, row in enumerate(rows)))


def section_keys(section: str) -> str:
    """The keys of one section of a recipe with their defaults."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name, key in keys().items():
            at, _, leaf = name.rpartition(".")
            if at == section and not (section == "" and name in SECTIONS):
                default = "not set" if key.default is None else _word(key.default)
                words = " | ".join(map(str, get_args(key.annotation))) if _literal(key.annotation) else ""
                yield f"`{leaf}`", default, ": ".join(filter(None, (key.description, words)))

    return table(("key", "default", "meaning"), rows())


def _literal(annotation: object) -> bool:
    return get_origin(annotation) is Literal


def _word(value: object) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def plan_keys() -> str:
    """The keys of a plan: their defaults and values."""

    def rows() -> Iterator[tuple[str, ...]]:
        for key in KEYS:
            default = "from the batch" if DEFAULTS[key] is None else f"`{DEFAULTS[key]}`"
            if key in NAMED:
                here = " ".join(f"`{v}`" for v in known(key))
            else:
                here = {
                    "zero": "`1` `2` `3`",
                    "dp": "a number, `-1`",
                    "tp": "a number, `2x2`, `4:chunks=2`",
                    "blocks": "ranges, `0-3:recompute=full`",
                }.get(key, "a number")
            yield f"`{key}`", default, here, PLAN_MEANINGS[key]

    return table(("key", "default", "values", "meaning"), rows())


def verbs() -> str:
    """The verbs that do something in this version."""
    return table(("command", "does"), ((f"`unisono {n}`", VERBS.find(n).summary()) for n in VERBS.names()))


def not_yet() -> str:
    """Names of the contract that this version lacks, by the key that would take them."""

    def rows() -> Iterator[tuple[str, ...]]:
        for where, family, names in PROMISED:
            if missing := [name for name in dict.fromkeys(names) if name not in family.names()]:
                yield where, " ".join(f"`{name}`" for name in missing)

    missing = [*rows()]
    return (
        table(("where", "refused today"), iter(missing))
        if missing
        else "None: every name of the contract is here."
    )


def refused() -> str:
    """Plans that are refused, each with what it asks for."""
    return table(("what", "plan"), ((what, f"`{plan}`") for what, plan in REFUSED.items()))


def proven() -> str:
    """How many plans the table of proven plans has, by what they promise."""
    rows = re.findall(
        r"^\| `([^`]+)` \| (\d+) \| (\w+) ",
        (DOCS / "data" / "proven.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    count = Counter(promise for _, _, promise in rows)
    ranks = [int(number) for _, number, _ in rows]
    parts = ", ".join(f"{count[promise]} {promise}" for promise in ("EXACT", "ROUNDING", "LOSSY"))
    return f"{len(rows)} plans on {min(ranks)} to {max(ranks)} ranks: {parts}. Each is within its bound."


def checkpoint_format() -> str:
    """The format as the code that writes it states it."""
    path = SOURCE / "train" / "state" / "checkpoint" / "__init__.py"
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return said.partition("\n\n")[2]


def difference(script: str) -> str:
    """What a script of examples/doors changes to run on several ranks."""
    before, after = (f"examples/doors/{script}_{when}.py" for when in ("before", "after"))
    a, b = ((ROOT / name).read_text(encoding="utf-8").splitlines() for name in (before, after))
    return fenced("\n".join(map(str.rstrip, difflib.unified_diff(a, b, before, after, n=1, lineterm=""))))


def codes() -> dict[str, set[str]]:
    """Every error code in the source -> the files that raise it."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for value in _candidates(node):
                word = value.value if isinstance(value, ast.Constant) else None
                if isinstance(word, str) and CODE.fullmatch(word):
                    found.setdefault(word, set()).add(str(path.relative_to(ROOT / "src")))
    return found


def _candidates(node: ast.AST) -> list[ast.expr | None]:
    """The expressions that are error codes by their place: code="C01", Problem("C01", ...), default_code = "C01"."""
    if isinstance(node, ast.keyword) and node.arg == "code":
        return [node.value]
    if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Problem":
        return list(node.args[:1])
    if isinstance(node, ast.AnnAssign | ast.Assign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(t, ast.Name) and t.id in ("default_code", "code") for t in targets):
            return [node.value]
    return []


PICTURES: Mapping[str, Callable[[], str]] = {
    "images/all-reduce-ring.svg": lambda: moves.svg(ring_program.program("all_reduce", 4)),
}
BLOCKS: Mapping[str, Callable[[], str]] = {
    "accumulate": lambda: timetable("accumulate", 1, 4),
    "gpipe": lambda: timetable("gpipe", 4, 4),
    "1f1b": lambda: timetable("1f1b", 4, 4),
    "1f1b-8": lambda: timetable("1f1b", 4, 8),
    "pipedream": lambda: fenced(draw.text(play_costs(SCHEDULES.read("pipedream").flow(3, 3, 3), 1.0, 2.0))),
    "demo-timetable": lambda: timetable("1f1b", 2, 4),
    "interleaved": lambda: several("interleaved", 2, 4),
    "zb1p": lambda: several("zb1p", 4, 4),
    "zbv": lambda: several("zbv", 2, 4),
    "lowered": lowered,
    "ring": lambda: ring(4),
    "bubbles": bubbles,
    "collectives": collectives,
    "round-ring": lambda: rounds("ring", "all_reduce", 4),
    "round-halving": lambda: rounds("halving_doubling", "all_reduce", 5),
    "round-hierarchical": lambda: rounds("hierarchical:node=2", "all_reduce", 4),
    "plan": plan_keys,
    "verbs": verbs,
    "not-yet": not_yet,
    "refused": refused,
    "proven": proven,
    "checkpoint-format": checkpoint_format,
    "diff-nanogpt": lambda: difference("nanogpt"),
    "diff-titan": lambda: difference("titan"),
    "top": lambda: section_keys(""),
    **{section: (lambda section=section: section_keys(section)) for section in SECTIONS},
}


def written(text: str) -> str:
    """A page's text with its blocks made anew. Raises KeyError for a block that nobody makes."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n\n{found[4]}", text)


def main() -> int:
    for page in PAGES:
        if page.exists():
            text = page.read_text(encoding="utf-8")
            fresh = written(text)
            if fresh != text:
                page.write_text(fresh, encoding="utf-8")
                print(f"written again: {page.relative_to(ROOT)}", file=sys.stderr)
    for name, picture in PICTURES.items():
        (DOCS / name).write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
