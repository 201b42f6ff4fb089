"""Hangs and mismatches, and who is named for them: `python -m tests.launch.hangs [NAME ...]` plays them and prints a table.
With `--doctor`, the deadline is far away and no rank ends the run: `unisono doctor hang` is asked from another process.

Each case is a whole run of its own: a recipe or a user's loop, under `unisono train` or torchrun, with a fault on one
rank (`hanging`). It is right if the one culprit is named with its line and what it was in, the others with what they
wait in, within ten seconds of the deadline, with 6, and nobody is left behind.
"""

import json
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import Forked
from tests.ports import kept_port

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("hanging.py")
DEADLINE = 3.0
LATE = 10.0
DOCTOR = 40.0
"""Seconds in which `unisono doctor hang` has named the culprit of a hang that has just begun."""


@dataclass(frozen=True)
class Case:
    """fault: what:where:rank:turn. code: of the error, "" where nothing is wrong: a rank only lags. line: the comment that ends the line to be shown, if not the fault's name. says: what
    the error has to say besides, for example what the others wait in."""

    kind: str  # recipe, loop
    starter: str  # own, torchrun, plain
    plan: str
    fault: str
    says: str
    code: str = "H01"
    line: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.starter}-{self.plan}-{self.fault}".replace(" ", ",").replace("=", "")

    @property
    def rank(self) -> int:
        return int(self.fault.split(":")[2])

    @property
    def ranks(self) -> int:
        size = 1
        for part in self.plan.split():
            key, _, value = part.partition("=")
            size *= int(value) if key in ("dp", "tp", "pp", "shard") else 1
        return size


CASES = (
    Case("recipe", "own", "dp=2", "sleep:model:1:8", "rank 0 waits in the exchange of gradients"),
    Case("recipe", "own", "dp=2", "stop:model:0:8", "rank 0 is stopped by a signal"),
    Case("recipe", "own", "dp=2", "busy:model:0:8", "rank 1 waits in the exchange of gradients"),
    Case("recipe", "own", "dp=2", "sleep:data:1:4", "rank 0 waits in the exchange of gradients"),
    Case("recipe", "own", "dp=2", "lock:metric:0:2", "rank 1 waits in validation"),
    Case("recipe", "own", "dp=2", "barrier:model:1:8", "rank 1 is in barrier", "H02"),
    Case("recipe", "own", "dp=2", "shapes:model:1:8", "rank 1 called all_reduce of float32 [403]; rank 0 called all_reduce of float32 [3]", "H02"),
    Case("recipe", "own", "dp=4", "lock:model:2:5", "ranks 0, 1, 3 wait in the exchange of gradients"),
    Case("recipe", "own", "shard=2", "sleep:model:1:8", "rank 0 waits in the exchange of weights or gradients"),
    Case("recipe", "own", "shard=2 zero=1", "stop:model:1:8", "rank 1 is stopped by a signal"),
    Case("recipe", "own", "tp=2", "stop:model:0:8", "rank 0 is stopped by a signal"),
    Case("recipe", "own", "tp=2", "read:model:1:8", "rank 0 waits in"),
    Case("recipe", "own", "pp=2", "stop:model:1:8", "rank 0 waits in the pipeline's messages"),
    Case("recipe", "own", "pp=2", "sleep:model:0:8", "rank 1 waits in the pipeline's messages"),
    Case("recipe", "own", "dp=2 pp=2", "sleep:model:3:7", "wait in the exchange of gradients"),
    Case("recipe", "own", "dp=2 shard=2", "stop:model:2:8", "rank 2 is stopped by a signal"),
    Case("recipe", "torchrun", "dp=2", "sleep:model:1:8", "rank 0 waits in the exchange of gradients"),
    Case("recipe", "torchrun", "dp=2", "stop:model:0:8", "rank 0 is stopped by a signal"),
    Case("recipe", "torchrun", "pp=2", "stop:model:1:8", "rank 0 waits in the pipeline's messages"),
    Case("recipe", "torchrun", "tp=2", "lock:model:0:8", "rank 1 waits in"),
    Case("recipe", "torchrun", "shard=2", "read:model:0:8", "rank 1 waits in the exchange of weights or gradients"),
    Case("loop", "torchrun", "dp=2", "sleep:loop:1:3", "rank 0 waits in the exchange of gradients"),
    Case("loop", "torchrun", "dp=2", "lock:loop:0:3", "rank 1 waits in the exchange of gradients"),
    Case("loop", "torchrun", "dp=2", "stop:loop:1:3", "rank 1 is stopped by a signal"),
    Case("loop", "torchrun", "dp=2", "busy:loop:1:3", "rank 0 waits in the exchange of gradients"),
    Case("loop", "torchrun", "dp=2", "held:loop:1:3", "rank 0 waits in the exchange of gradients"),
    Case("loop", "torchrun", "dp=3", "sleep:data:1:9", "ranks 0, 2 wait in the exchange of gradients"),
    Case("loop", "torchrun", "dp=2", "clip:loop:0:3", "rank 0 is in job.clip", "H02"),
    Case("loop", "torchrun", "shard=2", "clip:loop:0:3", "rank 0 is in job.clip", "H02"),
    Case("loop", "torchrun", "dp=2", "save:loop:0:3", "rank 0 is in job.save", "H02"),
    Case("loop", "torchrun", "dp=2", "break:loop:1:3", "rank 1 left the loop early", "H02", "-"),
    Case("loop", "torchrun", "dp=3", "exit:loop:0:3", "rank 0 left the loop early; ranks 1, 2 wait", "H02", "-"),
    Case("loop", "torchrun", "dp=2", "skip:loop:1:3", "rank 1 called backward on batch", "H02", "backward"),
    Case("loop", "torchrun", "shard=2", "skip:loop:1:3", "rank 1", "H02", "-"),
    Case("loop", "torchrun", "dp=2", "shapes:loop:1:3", "[403]; rank 0 called all_reduce of float32 [3]", "H02"),
    Case("loop", "torchrun", "shard=2", "fewer:loop:1:3", "[403]; rank 0 called broadcast of float32 [3]", "H02"),
    Case("loop", "plain", "dp=2", "dtype:loop:1:9", "int32 [3]; rank 0 called all_reduce of float32 [3]", "H02"),
    Case("loop", "torchrun", "dp=2", "message:loop:1:3", "rank 1 got another message", "H02"),
    Case("loop", "torchrun", "dp=2", "mean:loop:1:3", "rank 1 is in job.mean (all_reduce over", "H02"),
    Case("loop", "torchrun", "dp=3", "log:loop:2:3", "rank 2 is in job.log", "H02"),
    Case("loop", "torchrun", "shard=2", "weights:loop:1:3", "rank 1 is in job.weights", "H02"),
    Case("loop", "torchrun", "dp=2", "barrier:loop:0:3", "rank 0 is in barrier", "H02"),
    Case("loop", "plain", "dp=2", "break:loop:1:3", "rank 1 left the loop early", "H02", "-"),
    Case("loop", "plain", "dp=2", "stop:loop:0:3", "rank 0 is stopped by a signal"),
    Case("loop", "plain", "dp=2", "sleep:loop:0:3", "rank 1 waits in the exchange of gradients"),
    *(Case("recipe", "own", plan, "lag:model:1:8", "", "") for plan in (
        "dp=2", "dp=4", "shard=2", "shard=2 zero=1", "tp=2", "pp=2", "dp=2 pp=2", "dp=2 shard=2",
    )),
    *(Case("loop", "torchrun", plan, "lag:loop:1:3", "", "") for plan in ("dp=2", "dp=3", "shard=2")),
)  # fmt: skip


@dataclass(frozen=True)
class Played:
    """What a case came to: what is wrong with it (nothing if right), the error's block, seconds beyond the deadline."""

    wrong: tuple[str, ...]
    block: str
    late: float
    output: str


RECIPE = """
[model]
kind = "{program}:net"
context = 8
[data]
source = "{program}:Fed"
tokenizer = "byte"
[train]
steps = 40
global_batch = 8
micro_batch = 2
eval_every = 3
eval_batches = 1
metrics = ["{program}:Slow"]
[launch]
timeout = {deadline}
backend = "gloo"
threads_per_rank = 1
[out]
report = false
"""


def play(case: Case, folder: Path, deadline: float = DEADLINE) -> Played:
    """Play a case in a folder of its own and judge it."""
    with began(case, folder, deadline) as (processes, mark):
        codes = _codes(processes)
        ended = time.time()
        left = left_of(mark)
    output = (folder / "output").read_text(errors="replace") + f"\ncodes {' '.join(codes)}\n"
    late = (
        ended - float((folder / "began").read_text() or 0) - deadline if (folder / "began").exists() else 0.0
    )
    return _judged(case, output, late, left)


@contextmanager
def began(
    case: Case, folder: Path, deadline: float, *flags: str, **more: str
) -> Iterator[tuple[list[Forked], str]]:
    """A case under way, and a word that stands in the environment of all its processes; what is there at the end is
    killed. flags: of the recipe. more: variables."""
    (folder / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    (folder / "run.toml").write_text(RECIPE.format(program=PROGRAM, deadline=deadline))
    mark = secrets.token_hex(8)
    environ = {**os.environ, "HANG": case.fault, "HANG_MARK": mark, "OMP_NUM_THREADS": "1", **more}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    program = [str(PROGRAM), case.plan, str(deadline)]
    if case.kind == "recipe":
        program = [
            "-m",
            "unisono",
            "train",
            "run.toml",
            "--plan",
            case.plan,
            "--launch.recover",
            "false",
            *flags,
        ]
    with (folder / "output").open("w") as file, kept_port() as port:
        streams = (file.fileno(), file.fileno())
        commands = _commands(case, program, environ, port)
        processes = [Forked(argv, folder, env, mark, streams=streams) for argv, env in commands]
        try:
            yield processes, mark
        finally:
            for process in processes:
                if process.returncode is None:
                    with suppress(ProcessLookupError):  # it has ended, and nobody has asked it yet
                        os.killpg(process.pid, 9)
                    process.wait(10)
            for pid in left_of(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)


def _commands(
    case: Case, program: list[str], environ: dict[str, str], port: int
) -> list[tuple[list[str], dict[str, str]]]:
    if case.starter == "torchrun":
        flags = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
        return [([*flags, *program], environ)]
    if case.starter == "plain":
        place = {"WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [(program, {**environ, **place, "RANK": str(rank)}) for rank in range(case.ranks)]
    return [(program, environ)]


def _codes(processes: list[Forked]) -> list[str]:
    codes = []
    for process in processes:
        try:
            codes.append(str(process.wait(90)))
        except TimeoutError:
            os.killpg(process.pid, 9)
            codes.append("never")
    return codes


def left_of(mark: str) -> list[int]:
    """Processes of a case that are still there a moment later."""
    until, left = time.monotonic() + 3, [0]
    while left and time.monotonic() < until:
        left = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark.encode() in path.read_bytes():
                    left.append(int(path.parent.name))
            except OSError:
                continue
        time.sleep(0.05)
    return left


def _judged(case: Case, output: str, late: float, left: list[int]) -> Played:
    found = re.findall(r"^error U-.*(?:\n  (?:where|likely|try) .*)*", output, re.MULTILINE)
    block = found[-1] if found else ""
    codes = output.rsplit("codes ", 1)[1].split()
    if not case.code:
        told = [*found, *(f"exit {code}" for code in codes if code != "0"), *map(str, left)]
        return Played(tuple(told), block or "nothing told", late, output)
    wrong = []
    if not block.startswith(f"error U-{case.code}"):
        wrong.append("code")
    if not re.search(rf", rank {case.rank}, host", block.split("\n")[0]):
        wrong.append("culprit")
    marker = case.line or case.fault.split(":")[0]
    lines = [n for n, text in enumerate(PROGRAM.read_text().splitlines(), 1) if text.endswith(f"# {marker}")]
    if marker != "-" and not any(f"hanging.py:{n} in " in block for n in lines):
        wrong.append("line")
    if case.says not in block:
        wrong.append("operation")
    if len(found) != 1:
        wrong.append(f"{len(found)} errors")
    right = {"own": codes == ["6"], "torchrun": codes == ["1"] and "exitcode  : 6" in output}.get(
        case.starter, "6" in codes and set(codes) <= {"6", "-9"}
    )
    if not right:
        wrong.append("exit " + " ".join(codes))
    if case.starter == "own" and not output.rsplit("\ncodes", 1)[0].rstrip().endswith(block or "-"):
        wrong.append("not last")
    if late > LATE:
        wrong.append("late")
    if left:
        wrong.append(f"left {left}")
    return Played(tuple(wrong), block, late, output)


def ask(case: Case, folder: Path, *flags: str) -> Played:
    """Play a case whose ranks wait, and have `unisono doctor hang` name the culprit from outside. flags: of it."""
    more = {"HANG_PATIENT": "seen"}
    with began(case, folder, 600.0, **more) as (processes, _):
        until = time.monotonic() + 60
        while not (folder / "began").exists() and time.monotonic() < until:
            time.sleep(0.05)
        asked = time.time()
        code, told, printed = doctor(folder, "runs" if case.kind == "recipe" else "seen", *flags)
        took = time.time() - asked
        ended = [process.pid for process in processes if _has_ended(process.pid)]
    output = (folder / "output").read_text(errors="replace") + printed
    return _asked(case, code, told, output, took, ended)


def doctor(folder: Path, run: str, *flags: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, the object, all that was printed) of `unisono doctor hang RUN --json`, asked in a folder."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        streams = (out.fileno(), err.fileno())
        command = ["-m", "unisono", "doctor", "hang", run, "--json", *flags]
        code = Forked(command, folder, environ, secrets.token_hex(8), streams=streams).wait(90)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return code, json.loads(texts[0] or "{}"), "".join(texts)


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _asked(case: Case, code: int, told: dict[str, Any], output: str, took: float, ended: list[int]) -> Played:
    error, wrong = told.get("error") or {}, []
    block = f"{error.get('code')} {error.get('what')} | {error.get('where')} | {error.get('likely')}"
    if not case.code:
        faults = [block] * bool(error) + [f"exit {code}"] * bool(code)
        return Played(tuple(faults), told.get("cause", ""), took, output)
    if code != 4:
        wrong.append(f"exit {code}")
    if error.get("code") != f"U-{case.code}":
        wrong.append("code")
    if told.get("culprit") != case.rank:
        wrong.append("culprit")
    marker = case.line or case.fault.split(":")[0]
    lines = [n for n, text in enumerate(PROGRAM.read_text().splitlines(), 1) if text.endswith(f"# {marker}")]
    if marker != "-" and not any(f"hanging.py:{n} in " in block for n in lines):
        wrong.append("line")
    if case.says not in block:
        wrong.append("operation")
    if not told.get("remedy"):
        wrong.append("remedy")
    if ended:
        wrong.append("the run has ended")
    if took > DOCTOR:
        wrong.append("late")
    return Played(tuple(wrong), block, took, output + json.dumps(told, indent=1))


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--doctor"]
    outside = "--doctor" in sys.argv[1:]
    chosen = [case for case in CASES if not words or any(word in case.name for word in words)]
    right = 0
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            played = (ask if outside else play)(case, Path(folder))
        right += not played.wrong
        print(
            f"{case.name:<42} {'ok' if not played.wrong else 'WRONG: ' + ', '.join(played.wrong):<24}",
            end=" ",
        )
        print(
            f"{played.late:+5.1f} s  {played.block.splitlines()[0] if played.block else played.output[-2000:]}",
            flush=True,
        )
        if played.wrong and outside:
            print(played.output[-6000:])
    what = "culprit, line, operation, remedy, in time, the run goes on" if outside else ""
    print(f"{right} of {len(chosen)} right: {what or 'culprit, line, operation, exit code, nobody left'}")
    return int(right < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
