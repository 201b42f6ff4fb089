"""Odd inputs, and what becomes of each: records, paths, the environment, and loops that break off and go on.

`python -m tests.verbs.odd_inputs` plays all and prints a row for each: verdict, input, what was expected, what was
observed; and a summary. With words it plays those groups alone: records, paths, data, said, environment, loops.
"""

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.library import breaks
from tests.ports import kept_port
from tests.threads import on_threads
from tests.train.data.tokenised.odd_records import ODD, observed
from tests.verbs import jobs
from tests.verbs.bad_inputs import RECIPE, Answer, _no_ranks, called, put, working_folder
from unisono.config import DataConfig, ModelConfig
from unisono.launch import fork_server
from unisono.spec.errors import UsageError
from unisono.spec.source import SOURCES
from unisono.train.data.load import load

NAMES = (
    "a,b", "a:b", "a+b", "a + b", "a[1]", "a*b", "a?b", "~a", "$HOME", "a#b", "100%", "a b", " a", "a ", "it's",
    'say "a"', "a\nb", "a\tb", "é", "模型", "a=b", "a,text=b", "a:size=3", "x.py:y", "{a}", "a;b", "a|b", "a\\b", "&a",
    "(a)", "!a", "a@b", "a*", "0.5*text", "jsonl:x", "none", "auto",
)  # fmt: skip
"""Names of folders and files that some shell, pattern or syntax of ours could take for something else."""
LINE = b'{"text": "words of a line"}\n'
OWN = """\
import unisono
def r():
    given = dict(train={"steps": 1, "global_batch": 4, "micro_batch": 2}, model={"context": 8})
    return unisono.Recipe(data={"source": "text:words.txt"}, **given), "dp=1"
def own(vocab): ...
"""
FAULTS = '[[fault]]\nwhat = "pause"\nwho = 0\nafter = 0.1\nseconds = 0.1\n'


@dataclass(frozen=True)
class Row:
    """One input: what it is, what was expected and observed, and all that is not as it should be."""

    name: str
    expected: str
    observed: str
    problems: Sequence[str]


def ways(name: str) -> Iterator[tuple[str, ...]]:
    """Commands that name files called so in a folder called so, under every key that takes a path."""
    train, at = ("train", "r.toml"), f"{name}/{name}"
    sources = (
        f"text:{at}.txt",
        f"text:{name}/*.txt",
        f"jsonl:{at}.jsonl",
        f"jsonl:{name}",
        f"jsonl:{at}.jsonl,text=text",
        f"jsonl:{name}/*.jsonl:text=text",
        f"mixture:0.5*jsonl:{at}.jsonl,text=text + 0.5*text:{at}.txt",
        f"mixture:text:{at}.txt + jsonl:{name}/*.jsonl",
    )
    yield "train", f"{at}.toml"
    yield "train", f"{at}.py:r"
    yield from ((*train, "--data.source", source) for source in sources)
    yield *train, "--data.source", f"bin:{at}.bin", "--model.vocab", "256"
    yield "train", "pictures.toml", "--data.source", f"images:{name}/pictures,size=8"
    yield *train, "--data.cache", f"{name}/cache"
    yield *train, "--out.dir", f"{name}/out"
    yield *train, "--chaos", f"{at}.faults"
    yield *train, "--model.kind", f"{at}.py:own"
    yield "simulate", "--demo", "--cluster", f"{at}.cluster.toml"


def unseen(source: str) -> str:
    """Why its files are not found; "" where they are."""
    try:
        SOURCES.read(source).look()
    except UsageError as error:
        return error.render()
    return ""


def loaded(name: str) -> Row:
    """Files of such a name in such a folder, as tokens: those of a process that reads, and those read here."""
    files = {f"{name}/{name}.txt": "a b " * 9, f"{name}/{name}.jsonl": LINE * 3}
    with working_folder(files) as place:
        model, cached = ModelConfig(context=4), str(place / name / "cache")
        texts = f"text:{name}/*.txt", f"jsonl:{name}/{name}.jsonl,text=text"
        made = [load(DataConfig(source=text, val_fraction=0.0, cache=cached), model) for text in texts]
        sizes = [len(one.train) for one in made]
    wanted = [(4 * 9 - 1) // 4, (3 * 16 - 1) // 4]
    return Row(
        f"data in {name!r}",
        f"{wanted} windows",
        f"{sizes}",
        [] if sizes == wanted else [f"{sizes} are not {wanted}"],
    )


def path(name: str) -> Row:
    """A name under every key: each command would run."""
    files: Mapping[str, str | bytes] = {
        f"{name}/{name}.txt": jobs.words(300), f"{name}/{name}.jsonl": LINE * 60, f"{name}/{name}.bin": b"\1\0" * 400,
        f"{name}/{name}.toml": RECIPE, f"{name}/{name}.py": OWN, f"{name}/{name}.faults": FAULTS,
        f"{name}/{name}.cluster.toml": 'like = "dgx-h100"\nnodes = 1\n', f"{name}/pictures/one/a.png": b"",
        "pictures.toml": '[model]\nkind = "convnet"\n[train]\nsteps = 1\nglobal_batch = 4\nmicro_batch = 2\n',
    }  # fmt: skip
    problems, count = [], 0
    with working_folder(files) as place, mock.patch.object(fork_server, "start", _no_ranks):
        for argv in ways(name):
            count += 1
            answer = called((*argv, "--dry-run"), place, {})
            if answer.code:
                problems.append(f"{argv}: {answer.row('')}; {answer.row('try')}")
            elif "--data.source" in argv and (why := unseen(argv[argv.index("--data.source") + 1])):
                problems.append(f"{argv}: {why}")
    return Row(f"a path with {name!r}", f"taken by {count} keys", f"by {count - len(problems)}", problems)


@dataclass(frozen=True)
class Said:
    """A command that cannot run, and parts of what is to be said of it: first line, `where`, `likely` and `try`."""

    name: str
    argv: tuple[str, ...]
    says: str
    where: str = ""
    likely: str = ""
    fix: str = ""
    environ: Mapping[str, str] | None = None


def _source(name: str, source: str, says: str, **more: Any) -> Said:
    return Said(name, ("train", "r.toml", "--data.source", source), says, **more)


BYTES = "gr\udcfc\udcdfe"  # as Python shows bytes that are no UTF-8
SAID = (
    _source("no such path of odd letters", "jsonl:odd, dir:1+[x]/d*.jsonl", "D02  no file is called odd, dir:1+[x]/d*.jsonl",
            likely="odd, dir:1+[x] does not exist", fix="in a shell the value stands in '...'"),
    _source("no such file with a colon", "text:a:b, c.txt", "D02  no such file or folder: a:b, c.txt", fix="in '...'"),
    _source("no such part of a mixture", "mixture:text:words.txt + text:a + b", "C06  there is no data source 'b'"),
    _source("an option misspelt behind a file", "jsonl:mixed,mesages=x", "takes no option mesages; did you mean messages?"),
    _source("an empty path before an option", "jsonl:,text=x", "C06", fix="path (a file"),
    _source("bytes that are no UTF-8", f"text:{BYTES}", "C02  b'text:gr\\xfc\\xdfe' is not UTF-8", fix="ln -s OLD NEW"),
    Said("such bytes as a recipe", ("train", BYTES), "C02  b'gr\\xfc\\xdfe' is not UTF-8", fix="ln -s OLD NEW"),
    Said("such bytes as a run", ("train", "--resume", BYTES), "C02  b'gr\\xfc\\xdfe' is not UTF-8", fix="ln -s OLD NEW"),
    Said("such bytes in a variable", ("train", "r.toml"), "is not UTF-8", "env UNISONO_OUT_DIR", environ={"UNISONO_OUT_DIR": BYTES}),
    Said("a recipe whose name begins with a dash", ("train", "-a/r.toml"), "-a/r.toml begins with a dash", fix="./-a/r.toml"),
    Said("a function of such a file", ("train", "-a/x.py:r"), "-a/x.py:r begins with a dash", fix="./-a/x.py:r"),
    Said("a run whose name begins with a dash", ("train", "--resume", "-a"), "expected one argument", fix="--resume=VALUE"),
    Said("a cluster of such a name", ("simulate", "--demo", "--cluster", "-a/c.toml"), "expected one", fix="--cluster=VALUE"),
)  # fmt: skip


def said(one: Said) -> Row:
    """What is said of a command that cannot run, without ranks."""
    files = {"-a/r.toml": RECIPE, "-a/x.py": OWN, "mixed/c.jsonl": LINE}
    with working_folder(files) as place, mock.patch.object(fork_server, "start", _no_ranks):
        answer = called(one.argv, place, one.environ or {})
    return Row(one.name, one.says, answer.row(""), _lacking(one, answer, 2))


def _lacking(one: Any, answer: Answer, code: int) -> list[str]:
    wanted = (("", one.says), ("where", one.where), ("likely", one.likely), ("try", one.fix))
    parts = [
        f"{row or 'says'}: no {part!r} in {answer.row(row)!r}"
        for row, part in wanted
        if part not in answer.row(row)
    ]
    return [*parts, *([f"exit {answer.code}: {answer.err[-500:]}"] if answer.code != code else [])]


@dataclass(frozen=True)
class Outside:
    """A real process of the command line in an odd environment. says: parts of its error block; "" where it runs.
    ranks: variables of each of several that a starter began; one process where there is none."""

    name: str
    environ: Mapping[str, str]
    says: str = ""
    where: str = ""
    likely: str = ""
    fix: str = ""
    argv: tuple[str, ...] = ("--data.source", "text:words.txt")
    gone: bool = False
    ranks: int = 0


C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
JSONL = ("--data.source", "jsonl:école/模型.jsonl", "--plan", "dp=1")
RENDEZVOUS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
QUICK = ("--data.source", "text:words.txt", "--launch.timeout", "3")
OUTSIDE = (
    Outside("LC_ALL=C, paths of other letters", C, argv=(*JSONL, "--out.dir", "école/r", "--data.cache", "模型/c")),
    Outside("POSIX, ranks", {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, argv=(*JSONL[:2], "--out.dir", "é")),
    Outside("a locale that is not there", {"LC_ALL": "xx_YY.ISO-8859-1", "LANG": "nonsense"}, argv=JSONL),
    Outside("stdout of ASCII", {"PYTHONIOENCODING": "ascii"}, argv=(*JSONL, "--out.dir", "模型/r")),
    Outside("a home that cannot be made", {"HOME": "/proc/nohome"}, "U-D15  the cache of data", ".cache", "HOME", "data.cache = FOLDER",
            ("--data.source", "jsonl:lines.jsonl", "--plan", "dp=1")),
    Outside("such a home, and text", {"HOME": "/proc/nohome"}),
    Outside("a cache that cannot be made", {}, "U-D15  the cache of data", "/proc/c", "", "data.cache = FOLDER",
            ("--data.source", "jsonl:lines.jsonl", "--data.cache", "/proc/c", "--plan", "dp=1")),
    Outside("a cache below a file", {}, "U-D15  the cache of data", "words.txt", "", "data.cache = FOLDER",
            ("--data.source", "jsonl:lines.jsonl", "--data.cache", "words.txt/c", "--plan", "dp=1")),
    Outside("TMPDIR that is not there", {"TMPDIR": "/nonexistent"}),
    Outside("TMPDIR that takes nothing", {"TMPDIR": "/proc"}),
    Outside("TMPDIR that is a file", {"TMPDIR": "/dev/full"}),
    Outside("a current folder that was removed", {}, "U-D02  no such file or folder", "", "current folder has been removed", gone=True),
    Outside("GLOO_SOCKET_IFNAME of another host", {"GLOO_SOCKET_IFNAME": "ib7"}, "U-L13  the variable GLOO_SOCKET_IFNAME is wrong here",
            "GLOO_SOCKET_IFNAME", "", "ip -brief address"),
    Outside("one of two of another host", {"GLOO_SOCKET_IFNAME": "lo,ib7"}, "U-L13", "GLOO_SOCKET_IFNAME", "", "unset"),
    Outside("the same under a starter", {**RENDEZVOUS, "GLOO_SOCKET_IFNAME": "ib7"}, "U-L13", "GLOO_SOCKET_IFNAME", "", "unset", QUICK, ranks=2),
    Outside("a transport that there is not", {"GLOO_DEVICE_TRANSPORT": "FAST"}, "U-L13  the variable GLOO_DEVICE_TRANSPORT",
            "GLOO_DEVICE_TRANSPORT", "", "or TCP"),
    Outside("a level that torch does not know", {"TORCH_DISTRIBUTED_DEBUG": "ALL"}, "U-L13  the variable TORCH_DISTRIBUTED_DEBUG",
            "TORCH_DISTRIBUTED_DEBUG", "", "unset"),
    Outside("MASTER_ADDR of nobody", {**RENDEZVOUS, "MASTER_ADDR": "no.such.host.invalid"}, "U-L01  cannot meet", "MASTER_ADDR",
            "no host is called no.such.host.invalid", argv=QUICK, ranks=2),
    Outside("NCCL_SOCKET_IFNAME, on CPUs", {"NCCL_SOCKET_IFNAME": "ib7"}),
    Outside("proxies", {"http_proxy": "http://nowhere:1", "ALL_PROXY": "socks5://nowhere:1"}),
    Outside("OMP_NUM_THREADS=abc", {"OMP_NUM_THREADS": "abc", "MKL_NUM_THREADS": "-1"}),
    Outside("CUDA_VISIBLE_DEVICES=abc", {"CUDA_VISIBLE_DEVICES": "abc"}),
)  # fmt: skip


_SECONDS = 300.0  # on however busy a machine


def outside(one: Outside, port: Callable[[], int]) -> Row:
    """A run of four steps in that environment, or its refusal. port: one that is free."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        lines = LINE * 60
        put(
            place,
            {"r.toml": RECIPE, "words.txt": jobs.words(600), "lines.jsonl": lines, "école/模型.jsonl": lines},
        )
        environ = {**os.environ, "HOME": name, **one.environ}
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(one.ranks)] or [{}]
        if one.ranks:
            environ["MASTER_PORT"] = str(port())
        command = [sys.executable, "-m", "unisono", "train", str(place / "r.toml"), "--quiet", *one.argv]
        cwd = place / "gone" if one.gone else place
        cwd.mkdir(exist_ok=True)
        line = ["bash", "-c", 'rmdir "$0" && exec "$@"', str(cwd), *command] if one.gone else command
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        begun: list[Any] = [
            subprocess.Popen(line, cwd=cwd, env={**environ, **more}, **streams) for more in places
        ]
        try:
            ended = [process.communicate(timeout=_SECONDS) for process in begun]
        except subprocess.TimeoutExpired:
            return Row(one.name, one.says or "trains", "", [f"it has not ended in {_SECONDS:g} s"])
        finally:
            for process in begun:
                process.kill()
        told = [
            Answer(process.returncode, str(out, "utf-8"), str(err, "utf-8", "replace"), 0.0, ())
            for process, (out, err) in zip(begun, ended, strict=True)
        ]
        answer = next((each for each in told if "error U-" in each.err), told[0])
        problems = _lacking(one, answer, 2 if one.says else 0)
        if not one.says and not list(place.rglob("checkpoints/step-000004")):
            problems.append("no checkpoint of the last step")
        return Row(one.name, one.says or "trains", answer.row("") or "trains", problems)


def loop(kind: str, how: str, left: int, ranks: tuple[int, int], folder: Path, run: Any) -> Row:
    """A loop over a loader of this kind that leaves its first pass after `left` batches, saves and goes on."""
    given: Any = {"kind": kind, "folder": str(folder), "breaks": left, "group": False}
    (alone,) = run(breaks.life, 1, plan="dp=1", how="", **given)
    parts = [
        run(breaks.life, size, plan=f"dp={size}", how=how, again=again, **given)[0]
        for size, again in zip(ranks, (False, True), strict=True)
    ]
    seen, wanted = ([sorted(batch) for batch in one] for one in ([*parts[0], *parts[1]], alone))
    same = sum(a == b for a, b in zip(seen, wanted, strict=False))
    name = f"{kind}: left after {left}, saved {how}, dp={ranks[0]} to dp={ranks[1]}"
    problems = [] if seen == wanted else [f"{seen} are not {wanted}"]
    return Row(name, f"{len(wanted)} batches of one process", f"{same} of {len(seen)}", problems)


def records() -> Iterator[Row]:
    for one in ODD:
        with tempfile.TemporaryDirectory() as folder:
            found, problems = observed(one, Path(folder))
        yield Row(f"record: {one.name}", one.says or "; ".join(one.told) or "a document", found, problems)


def loops() -> Iterator[Row]:
    for kind, (how, left) in itertools.product(
        breaks.KINDS, (("after", 1), ("after", 3), ("after", 6), ("end", 2))
    ):
        with tempfile.TemporaryDirectory() as folder:
            yield loop(kind, how, left, (2, 3), Path(folder), on_threads)


def environment() -> Iterator[Row]:
    for one in OUTSIDE:
        with kept_port() as port:
            yield outside(one, lambda port=port: port)


GROUPS: Mapping[str, Callable[[], Iterator[Row]]] = {
    "records": records,
    "paths": lambda: map(path, NAMES),
    "data": lambda: map(loaded, NAMES),
    "said": lambda: map(said, SAID),
    "environment": environment,
    "loops": loops,
}


def main(asked: Sequence[str]) -> int:
    """Prints a row for each input, and how many are not as they should be."""
    count = bad = 0
    for name in asked or GROUPS:
        for row in GROUPS[name]():
            count, bad = count + 1, bad + bool(row.problems)
            verdict = "WRONG" if row.problems else "right"
            print(
                f"{verdict}  {row.name[:52]!r:<56} {row.expected[:44]!r:<48} {row.observed[:90]!r}",
                flush=True,
            )
            for problem in row.problems:
                print(f"       {problem}")
    print(f"{count} odd inputs, {bad} not as they should be")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
