"""Mistakes that are found where the ranks are: in the data, in a user's model, in what an earlier run left.

All are made in one working folder, and all ranks are forked from one import of torch. `python -m tests.verbs.bad_runs`
plays all and prints the table.
"""

import contextlib
import dataclasses
import fcntl
import io
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from tests.verbs import jobs
from tests.verbs.bad_inputs import Answer, judged, working_folder
from tests.verbs.bad_inputs import Bad as _Bad
from unisono import cli
from unisono.launch import fork_server
from unisono.launch.fork_server import ForkServer
from unisono.verbs.train.run import ENTRY

MODELS = """\
import os, signal, sys
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, vocab, turn=None):
        super().__init__()
        self.embed, self.head, self.turn = nn.Embedding(256, 8), nn.Linear(8, vocab), turn
    def forward(self, x):
        y = self.head(self.embed(x))
        return self.turn(y) if self.turn else y

def own(vocab): return Own(vocab)
def nothing(vocab): pass
def a_number(vocab): return 3
def wants(vocab, nonsense): return Own(vocab)
def raises(vocab): raise RuntimeError("no weights here")
def leaves(vocab): sys.exit(0)
def no_tensor(vocab): return Own(vocab, lambda y: None)
def a_pair(vocab): return Own(vocab, lambda y: (y, y))
def small_head(vocab): return Own(7)
def one_score(vocab): return Own(vocab, lambda y: y[:, 0])
def broken_line(y): raise ValueError("boom")
def on_one(y):
    if y.sum() != 0 and os.environ["RANK"] == "1":  # of no graph, on no rank
        raise ValueError("boom on one")
    return y
def exits(y): sys.exit(0)
def ends(y): os._exit(3)
def killed(y):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return y
def not_a_number(y): return y / 0
def large(y): return torch.empty(1 << 58)
def deep(y, n=30): return deep(y, n - 1) if n else broken_line(y)
def boom(vocab): return Own(vocab, broken_line)
def boom_on_one(vocab): return Own(vocab, on_one)
def exiting(vocab): return Own(vocab, exits)
def ending(vocab): return Own(vocab, ends)
def killing(vocab): return Own(vocab, killed)
def dividing(vocab): return Own(vocab, not_a_number)
def filling(vocab): return Own(vocab, large)
def sinking(vocab): return Own(vocab, deep)
"""
SINKS = '''\
from unisono.spec.sink import Observer, Sink

class Loud(Sink):
    """Raises at its first steps."""
    name = "loud"
    def open(self, run): return Ears()

class Ears(Observer):
    def observe(self, steps): raise LookupError("no such board")
'''
LINKS = '''\
import torch
from unisono.comm.collectives.engine import Engine

class Flips(Engine):
    """Of what rank 1 gets in its fifth exchange one bit is another."""
    name = "flips"
    def bind(self, pg, axis):
        made, seen = super().bind(pg, axis), []
        begin = made.exchange
        def exchange(out, x):
            seen.append(begin(out, x))
            return Flipped(seen[-1], out) if len(seen) == 5 and pg.rank() == 1 else seen[-1]
        made.exchange = exchange
        return made

class Flipped:
    def __init__(self, pending, out): self.pending, self.out = pending, out
    def wait(self):
        self.pending.wait()
        self.out.view(torch.uint8)[0] ^= 1
'''
CODECS = """\
from unisono.codecs import Coder, Sum
from unisono.codecs.plain import Plain

class Lost(Plain):
    name = "lost"
    def bind(self):
        return Loser()

class Loser(Coder):
    def exchange(self, grad, shapes, memory):
        yield Sum(grad)
"""
FLIPS = "dp=2 collective=links.py:Flips codec=int8:dense=0+crc"
FILES = {
    "links.py": LINKS,
    "codecs.py": CODECS,
    "models.py": MODELS,
    "lacks.py": "import nothing_of_this_name\ndef own(vocab): pass\n",
    "sinks.py": SINKS,
    "short.txt": "just a few words, " * 3,
    "hidden/.a": "x",
    "some.idx": b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 99, 1, 1),
    "large.bin": struct.pack("<8H", *[60_000] * 8) * 40,
}


@dataclass(frozen=True)
class BadRun(_Bad):
    """A mistake that only ranks can find. spoil: done to the copy of a finished run before it is gone on with. said:
    what stands on stderr above the error, or, where code is "", at all: then it goes well."""

    spoil: Callable[[Path], object] | None = None
    said: str = ""
    likely: str = ""


def played(name: str, flags: str, code: str, says: str, where: str, fix: str, **more: object) -> BadRun:
    argv = ("train", "r.toml", "--train.save_every", "2", *flags.split())
    return BadRun(name, argv, code, says, where, fix, **more)  # type: ignore[arg-type]


def model(
    function: str, says: str, where: str, fix: str = "", code: str = "R01", exit: int = 1, **more: object
) -> BadRun:
    """A user's model that does something that it should not."""
    flags = f"--model.kind models.py:{function}" if ".py" not in function else f"--model.kind {function}"
    return played(f"a model: {function}", flags, code, says, where, fix, exit=exit, **more)


def resumed(name: str, spoil: Callable[[Path], object] | None, code: str, says: str, where: str, fix: str, flags: str = "",
            at: str = "", **more: object) -> BadRun:  # fmt: skip
    """A run that was finished, and then something happened to it."""
    argv = ("train", "--resume", f"RUN{at}", "--train.steps", "6", *flags.split())
    return BadRun(name, argv, code, says, where, fix, spoil=spoil, **more)  # type: ignore[arg-type]


def _tear(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def _tear_newest(run: Path) -> None:
    _tear(next((run / "checkpoints/step-000004").glob("*.safetensors")))


def _tear_all(run: Path) -> None:
    for path in run.glob("checkpoints/*/*.safetensors"):
        _tear(path)


ALL = "every rank raised it"
PLAYED = [
    played("too little data", "--data.source text:short.txt --data.val_fraction 0", "D05", "one step needs 8", "short.txt", "smaller"),
    played("letters that are none", "--data.source text:latin.txt --data.tokenizer char", "D06", "UTF-8", "latin.txt", ""),
    played("a folder with more than text", "--data.source text:mixed", "D06", "b.bin is no text", "mixed", "text alone"),
    played("a folder of hidden files", "--data.source text:hidden", "D04", "no text", "hidden", "text:PATH"),
    played("half a token", "--data.source bin:odd.bin --model.vocab 50", "D07", "7 bytes", "odd.bin", "text:"),
    played("tokens without a vocabulary", "--data.source bin:large.bin", "D08", "how large", "model.vocab", "model.vocab = 60001"),
    played("a vocabulary that is too small", "--model.vocab 9", "D08", "model.vocab is 9", "model.vocab", "leave"),
    played("a token beyond the vocabulary", "--data.source bin:large.bin --model.vocab 50", "D09", "60000", "large.bin", "vocab"),
    played("tokens with a tokenizer", "--data.source bin:large.bin --data.tokenizer char", "D11", "no tokenizer", "data.tokenizer", "out"),
    played("a data set that was never loaded", "--data.source hf:of_no_name", "D02", "no data set 'of_no_name' on this machine", "data.source", "save_to_disk"),
    played("another program's index", "--data.source bin:some.bin --model.vocab 50", "D13", "type code 99", "some.idx", "again"),
    model("nothing", "returned NoneType, not a torch.nn.Module", "models.py:14 in nothing", "return", likely=ALL),
    model("a_number", "returned int, not a torch.nn.Module", "models.py:15 in a_number", "return", likely=ALL),
    model("wants", "missing 1 required positional argument: 'nonsense'", "models.py:16 in wants", likely=ALL),
    model("raises", "RuntimeError: no weights here", "models.py:17 in raises", likely=ALL),
    model("leaves", "SystemExit: 0", "models.py:18 in leaves", likely=ALL),
    model("lacks.py:own", "ModuleNotFoundError", "lacks.py:1", "pip install nothing_of_this_name", likely=ALL),
    model("no_tensor", "forward returned NoneType, not a tensor", "models.py:9 in forward", "return the scores", likely=ALL),
    model("a_pair", "forward returned tuple, not a tensor", "models.py:9 in forward", "return the scores", likely=ALL),
    model("small_head", "the model scores 7 classes", "models.py:9 in forward", "a last layer of"),
    model("one_score", "the model's scores are [2, 256], for targets [2, 8]", "models.py:9 in forward", "scores of", likely=ALL),
    model("boom", "ValueError: boom", "models.py:23 in broken_line", likely=ALL, said='raise ValueError("boom")'),
    model("boom_on_one", "ValueError: boom on one, rank 1", "models.py:26 in on_one", likely="rank 0 was stopped because of it"),
    model("sinking", "ValueError: boom", "models.py:23 in broken_line", likely=ALL),
    model("exiting", "SystemExit: 0", "models.py:28 in exits"),
    model("ending", "left with status 3 without a word", "", code="R02"),
    model("killing", "killed by SIGKILL, rank 1", "", "fewer ranks", code="R02", exit=137),
    model("dividing", "step 1: the loss is", "first in", "--train.lr", code="N01"),
    model("filling", "can't allocate memory", "models.py:11 in forward", "micro_batch", code="M01", exit=5),
    played("a sink that raises", "--out.track sinks.py:Loud", "R01", "LookupError: no such board", "sinks.py:9 in observe", "", exit=1),
    BadRun("a codec that returns no sum", ("train", "r.toml", "--plan", "dp=2 codec=codecs.py:Lost"), "R01",
           "exchange returns nothing; it returns the sum", "codecs.py:10 in exchange", "", exit=1, likely=ALL),
    BadRun("a link that flips a bit", ("train", "r.toml", "--plan", FLIPS), "G03",
           "in step 2 what replica 0 scattered to replica 1 arrived as other bytes, rank 1", "seen on replica 1", "checkpoint", exit=1,
           likely="a flipped bit"),
    resumed("nothing happened to it", None, "", "", "", "", exit=0, said="saved"),
    resumed("another seed and another model", None, "K05", "seed = 0, not 3; model.n_layer = 2, not 1", "step-000004",
            "leave seed, model.n_layer", "--seed 3 --model.n_layer 1"),
    resumed("another optimiser", None, "K05", "train.optimizer = 'adamw', not 'sgd'", "step-000004", "leave", "--train.optimizer sgd"),
    resumed("other data under the same name", lambda run: Path("words.txt").write_text("other " * 500), "K05", "other data",
            "step-000004", "the data as it was"),
    resumed("an older checkpoint by name", None, "", "", "", "", exit=0, said="going on from step-000002; what the run made",
            at="/checkpoints/step-000002"),
    resumed("a torn checkpoint by name", _tear_newest, "K06", "no whole checkpoint", "RUN", "", at="/checkpoints/step-000004"),
    resumed("bytes in latest", lambda run: (run / "latest").write_bytes(b"\x81\xff\0"), "", "", "", "", exit=0, said="saved"),
    resumed("a stranger in latest", lambda run: (run / "latest").write_text("/etc/passwd\n"), "", "", "", "", exit=0, said="saved"),
    resumed("the newest checkpoint torn", _tear_newest, "", "", "", "", exit=0, said="step-000004 is damaged"),
    resumed("every checkpoint torn", _tear_all, "K06", "no whole checkpoint", "RUN", "without --resume"),
    resumed("a line of metrics torn", lambda run: (run / "metrics.jsonl").open("a").write('{"step": 4, "lo'), "", "", "", "", exit=0,
            said="saved"),
]  # fmt: skip
SOME = ("a folder with more than text", "a link that flips a bit", "a model: wants", "a model: no_tensor", "a model: boom_on_one", "a sink that raises",
        "another seed and another model", "bytes in latest")  # fmt: skip


@dataclass
class Place:
    """The working folder, the helper that has torch, and a finished run to copy."""

    folder: Path
    nursery: ForkServer
    finished: Path | None = None
    count: int = 0
    _words: str = field(default_factory=lambda: Path("words.txt").read_text())

    def call(self, *argv: str) -> Answer:
        """A command in this process; its ranks are forked from the one helper."""
        out, err, before, began = (
            io.StringIO(),
            io.StringIO(),
            set(os.listdir("/dev/shm")),
            time.perf_counter(),
        )
        shared = mock.patch.object(
            fork_server, "start", lambda *_, **__: contextlib.nullcontext(self.nursery)
        )
        with shared, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(list(argv))
        seconds = time.perf_counter() - began
        return Answer(code, out.getvalue(), err.getvalue(), seconds, tuple(self._left(before)))

    def _left(self, before: set[str]) -> Iterator[str]:
        """Ranks, shared memory, half-written files, and `latest` of a name that names no run to go on from."""
        yield from (f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - before)
        yield from Path(f"/proc/{self.nursery.pid}/task/{self.nursery.pid}/children").read_text().split()
        for path in self.folder.glob("runs/**/*"):
            if ".tmp-" in path.name or path.name.endswith(".part"):
                yield str(path)
        for latest in self.folder.glob("runs/*/latest"):
            if not list(
                (latest.parent / latest.read_text().strip()).glob("checkpoints/step-*/manifest.json")
            ):
                yield f"{latest} names {latest.read_text().strip()}, which holds no checkpoint"

    def play(self, bad: BadRun) -> tuple[Answer, list[str]]:
        """Makes the mistake; returns what was said, and all that is not as it should be."""
        (self.folder / "words.txt").write_text(self._words)
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        run = ""
        if bad.spoil is not None or "--resume" in bad.argv:
            run = self.finished_copy()
            if bad.spoil is not None:
                bad.spoil(Path(run))
        answer = self.call(*(word.replace("RUN", run) for word in bad.argv))
        known = dataclasses.replace(bad, where=bad.where.replace("RUN", run))
        problems = (
            judged(known, answer) if bad.code else [f"exit {answer.code}: {answer.err}"] * bool(answer.code)
        )
        if bad.said not in answer.err:
            problems.append(f"does not say {bad.said!r}: {answer.err}")
        if bad.likely not in answer.row("likely"):
            problems.append(f"likely is not {bad.likely!r}: {answer.row('likely')}")
        if bad.exit == 2 and not run and list(self.folder.glob("runs/*/*")):
            problems.append("a run folder that never began is left")
        return answer, problems

    def finished_copy(self) -> str:
        """A run of four steps with checkpoints after two and four, made once."""
        if self.finished is None:
            made = self.call("train", "r.toml", "--train.save_every", "2")
            assert made.code == 0, made.err
            self.finished = self.folder / "finished"
            (run,) = jobs.runs_of(self.folder)
            shutil.copytree(run, self.finished)
            shutil.rmtree(self.folder / "runs")
        self.count += 1
        shutil.copytree(self.finished, f"runs/tiny/{self.count}")
        return f"runs/tiny/{self.count}"


@contextlib.contextmanager
def place() -> Iterator[Place]:
    with working_folder(FILES) as folder, ForkServer(ENTRY) as nursery:
        yield Place(folder, nursery)


@contextlib.contextmanager
def held(folder: str) -> Iterator[None]:
    """Another run's lock on a run folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main() -> int:
    wrong = 0
    with place() as here:
        for bad in PLAYED:
            answer, problems = here.play(bad)
            wrong += bool(problems)
            verdict = "FAIL" if problems else "ok  "
            print(
                f"{answer.seconds * 1e3:5.0f} ms  {verdict}  {bad.name[:44]:<44}  {answer.row('')[:100]}",
                flush=True,
            )
            for problem in problems:
                print(f"{'':16}{problem}")
    print(f"{len(PLAYED)} bad runs, {wrong} not answered as they should be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
