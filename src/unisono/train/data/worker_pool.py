"""Worker processes: started, given orders as lines of JSON, heard, ended; and what is said of how far they are."""

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from subprocess import PIPE, Popen
from typing import Any

from unisono.spec.errors import UsageError, UserCodeError
from unisono.train.data.documents import unreadable

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main()"
_SAID = ("what", "where", "likely", "fix", "code")


@dataclass(slots=True)
class DataWorker:
    """One process. held: the beginning of an answer that has not come whole. about: the file that it works on."""

    process: "Popen[bytes]"
    held: bytes = field(default=b"")
    about: str = "data.source"

    @property
    def answers(self) -> int:
        """The file that answers come from, to wait for."""
        return self.process.stdout.fileno() if self.process.stdout is not None else -1

    def ask(self, request: Mapping[str, Any], body: bytes = b"") -> None:
        """Give an order, and bytes behind it. One that has died says so when it is heard."""
        files = request.get("part") or request.get("files") or request.get("look") or [self.about]
        self.about = str(files[0])
        try:
            if self.process.stdin is not None:
                self.process.stdin.write(json.dumps(request).encode() + b"\n" + body)
                self.process.stdin.flush()
        except BrokenPipeError:
            return

    def heard(self, out: str) -> list[dict[str, Any]]:
        """The answers that have come, after waiting for something to come. out: where it writes. Raises what they tell:
        UsageError, UserCodeError, OSError where it cannot write; UsageError D16 where the process has died."""
        read = os.read(self.answers, 1 << 16)
        if not read:
            raise UsageError(
                f"a process that reads the data ended with {self.process.wait()}",
                code="D16",
                where=self.about,
                likely="it ran out of memory, or the reason stands above",
                fix="data.workers = 1",
            )
        *lines, self.held = (self.held + read).split(b"\n")
        return [_answer(json.loads(line), out) for line in lines]


def _answer(reply: dict[str, Any], out: str) -> dict[str, Any]:
    if "errno" in reply:
        error = OSError(reply["errno"], os.strerror(reply["errno"] or 0))
        is_ours = not reply["file"] or reply["file"].startswith(out)
        raise error if is_ours else unreadable(Path(reply["file"]), error)
    raised(reply)
    return reply


def raised(reply: Mapping[str, Any]) -> None:
    """Raise what another process has raised, if `failure` has written the reply."""
    if "error" in reply:
        raise UsageError(**reply["error"])
    if "raised" in reply:
        error = UserCodeError(**reply["raised"])
        error.shown, error.trace = reply["shown"], reply["trace"]
        raise error


def failure(error: Exception) -> dict[str, Any]:
    """The answer of a worker that has raised an error, for `DataWorker.heard`. Raises what is nobody's mistake."""
    if isinstance(error, UserCodeError):
        said = {key: getattr(error, key) for key in _SAID}
        return {"raised": said, "shown": error.shown, "trace": error.trace}
    if isinstance(error, UsageError):
        return {"error": {key: getattr(error, key) for key in _SAID}}
    if isinstance(error, OSError):
        return {"errno": error.errno, "error": str(error), "file": str(error.filename or "")}
    raise error


def start(module: str, files: Sequence[int] = ()) -> DataWorker:
    """A process that runs `main` of a module and waits for orders, until `end` or until nobody can give it any.
    files: that it has too."""
    command = [sys.executable, "-c", _START.format(module=module), json.dumps(sys.path)]
    return DataWorker(Popen(command, stdin=PIPE, stdout=PIPE, pass_fds=files))


def end(workers: Sequence[DataWorker]) -> None:
    """Kill these processes."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
        for pipe in (worker.process.stdin, worker.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


@contextmanager
def working(module: str, count: int) -> Iterator[list[DataWorker]]:
    """Processes that run `main` of a module and wait for orders; none is left behind."""
    workers: list[DataWorker] = []
    try:
        for _ in range(count):
            workers.append(start(module))
        yield workers
    finally:
        end(workers)


def served(
    module: str,
    count: int,
    jobs: Sequence[Mapping[str, Any]],
    out: str,
    heard: Callable[[int, dict[str, Any]], bool],
) -> None:
    """All jobs, by `count` processes that each have one at a time. heard(number of the job, an answer) → whether that
    was its last. out: the beginning of the paths that they write. Raises what `DataWorker.heard` and `heard` raise."""
    with working(module, min(count, len(jobs))) as workers, DefaultSelector() as selector:
        waiting, busy, left = deque(range(len(jobs))), dict[int, int](), len(jobs)

        def give(at: int) -> None:
            if waiting:
                busy[at] = waiting.popleft()
                workers[at].ask(jobs[busy[at]])

        for at, worker in enumerate(workers):
            selector.register(worker.answers, EVENT_READ, at)
            give(at)
        while left:
            for key, _ in selector.select():
                for answer in workers[key.data].heard(out):
                    if heard(busy[key.data], answer):
                        left -= 1
                        give(key.data)


def progress(what: str, done: int, total: int, unit: str, seconds: float) -> str:
    """How far something is, in a line."""
    share = done / max(1, total)
    left = f", {seconds * (1 / share - 1):.0f} s left" if 0 < share < 1 and seconds > 1 else ""
    return f"{what}: {share:4.0%} of {total:,} {unit}, {seconds:.1f} s{left}"


def on_stderr(text: str) -> None:
    """A line that is written over where somebody looks at it; elsewhere only what ends one."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text.endswith("\n"):
        print(text, end="", file=sys.stderr, flush=True)
