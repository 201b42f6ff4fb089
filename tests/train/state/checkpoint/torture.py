"""Checkpoints under torture: killed while saving, damaged, on a full or read-only disk, loaded by other worlds, forged.

    python -m tests.train.state.checkpoint.torture              all of it, some minutes; prints counts, exits with 1 if any is wrong
    python -m tests.train.state.checkpoint.torture --quick      a little of each
    python -m tests.train.state.checkpoint.torture --only flips,disk
    python -m tests.train.state.checkpoint.torture --fuzz 100000   hostile manifests and headers alone

Each try is right if no weight is wrong, the newest good checkpoint is still found, and what is wrong is said with the
file's name.
"""

import argparse
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tests.train.state.checkpoint.cuts import make, save_all, view
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import Box, Saver, latest, load, newest_whole, read_full, verify_folder
from unisono.train.state.checkpoint.find import step_of
from unisono.train.state.checkpoint.manifest import MANIFEST

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model/w": ((96, 80), torch.float32),
    "model/b": ((1200,), torch.bfloat16),
    "optim/w/exp_avg": ((96, 80), torch.float64),
    "optim/w/step": ((), torch.float32),
}
OPERATIONS = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "close")


@dataclass
class Count:
    """What was tried of one kind. wrong: what must never be, in words; skipped: why it could not be tried."""

    what: str
    tried: int = 0
    wrong: list[str] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    skipped: str = ""

    def check(self, right: bool, what: str) -> None:
        if not right:
            self.wrong.append(what)

    def saw(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def line(self) -> str:
        if self.skipped:
            return f"{self.what:<42} SKIPPED: {self.skipped}"
        seen = ", ".join(f"{count} {what}" for what, count in sorted(self.seen.items()))
        return f"{self.what:<42} {self.tried:>7} tried {len(self.wrong):>5} wrong   {seen}"


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        name: make(shape, dtype, 97 * step + i) for i, (name, (shape, dtype)) in enumerate(SHAPES.items())
    }


def cut_for(ranks: int) -> list[list[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """Each tensor by rows, dealt to the ranks; the counter to the first."""
    out: list[list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = [[] for _ in range(ranks)]
    for name, (shape, _) in SHAPES.items():
        if not shape:
            out[0].append((name, (), ()))
            continue
        edges = [shape[0] * i // ranks for i in range(ranks + 1)]
        for rank, (low, high) in enumerate(pairwise(edges)):
            out[rank].append((name, (low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:])))
    return out


def save_step(run: Path, step: int, ranks: int, token: str, **more: Any) -> Path:
    folder = save_all(
        run, step, tensors(step), cut_for(ranks), {"step": step}, token=f"{token}{step}", **more
    )
    assert folder is not None
    return folder


def is_right(folder: Path) -> bool:
    """Whether the weights are those of the step that the checkpoint says."""
    step, full = load(folder, [])["step"], read_full(folder)
    wanted = tensors(step)
    return full.keys() == wanted.keys() and all(torch.equal(full[name], wanted[name]) for name in wanted)


# --- killed ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_operations(strike: Callable[[int], None]) -> Iterator[None]:
    """Every changing call of `os` first calls strike(number); a write is done by half before it."""
    true = {name: getattr(os, name) for name in OPERATIONS}
    count = 0

    def wrap(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if name == "write":
                fd, data = arguments
                half = len(data) // 2
                true["write"](fd, data[:half])
                strike(count)
                return half + true["write"](fd, data[half:])
            strike(count)
            return None if name == "fsync" else true[name](*arguments, **options)

        return call

    for name in OPERATIONS:
        setattr(os, name, wrap(name))
    try:
        yield
    finally:
        for name, function in true.items():
            setattr(os, name, function)


def in_child(work: Callable[[], None]) -> int:
    """The process's id. It ends by itself or is killed; nothing of this process is flushed in it."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return pid


def killed_at_operations(place: Path, tries: int, seed: int = 0) -> Count:
    """SIGKILL of a forked writer before a certain call of the system, for all calls or a sample of them."""
    count, order = Count("killed at an operation of a save"), random.Random(seed)
    template = place / "template"
    for step in (1, 2):
        save_step(template, step, 2, "first")
    scenarios = [(3, None), (3, 1), (2, None), (2, 1)]  # a new step, one that makes room, one saved anew
    points = []
    for step, keep in scenarios:
        run, total = place / "dry", [0]
        shutil.copytree(template, run)
        with file_operations(lambda number, total=total: total.__setitem__(0, number)):
            save_step(run, step, 2, "second", keep=keep)
        shutil.rmtree(run)
        points += [(step, keep, at) for at in range(1, total[0] + 1)]
    for step, keep, at in order.sample(points, min(tries, len(points))):
        run = place / "run"
        shutil.copytree(template, run)

        def strike(number: int, at: int = at) -> None:
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)

        def work(step: int = step, keep: int | None = keep, strike: Any = strike, run: Path = run) -> None:
            with file_operations(strike):
                save_step(run, step, 2, "second", keep=keep)

        _, status = os.waitpid(in_child(work), 0)
        said = f"step {step}, keep {keep}, killed at operation {at}"
        count.tried += 1
        count.check(os.WIFSIGNALED(status), f"{said}: it was not killed")
        found = newest_whole(run)
        count.check(found is not None and step_of(found) in (2, step), f"{said}: lost, {found}")
        count.check(found is None or is_right(found), f"{said}: a wrong weight")
        count.check(found == latest(run), f"{said}: latest is {latest(run)}")
        count.saw("with the new one" if found is not None and step_of(found) == 3 else "with the one before")
        with file_operations(lambda number: None):
            after = save_step(run, 4, 2, "third")  # and the next save finds no stumbling block
        left = {path.name for path in after.parent.iterdir()}
        count.check(newest_whole(run) == after and all("." not in name for name in left), f"{said}: {left}")
        shutil.rmtree(run)
    return count


def killed_at_times(place: Path, tries: int, seed: int = 0) -> Count:
    """SIGKILL at a random time of a process whose two ranks save again and again beside each other."""
    count, order = Count("killed at a random time"), random.Random(seed)
    for index in range(tries):
        run = place / f"timed{index}"
        ours, theirs = os.pipe()

        def work(run: Path = run, theirs: int = theirs) -> None:
            def rank(number: int) -> None:
                saver = Saver(run, number, 2, token="t", keep=2)
                for step in range(1, 400):
                    parts = [
                        Box(n, tuple(tensors(step)[n].shape), a, view(tensors(step)[n], a, s))
                        for n, a, s in cut_for(2)[number]
                    ]
                    saver.save(step, parts, {"step": step}, blocking=step % 2 == 0)
                    saver.wait()
                    if number == 0:
                        os.write(theirs, b"%d\n" % step)

            second = threading.Thread(target=rank, args=(1,))
            second.start()
            rank(0)

        pid = in_child(work)
        os.close(theirs)
        with os.fdopen(ours, "rb") as told:
            acknowledged = int(told.readline())  # it is under way
            time.sleep(order.uniform(0.0, 0.15))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            acknowledged = max([acknowledged, *map(int, told.read().split())])
        found = newest_whole(run)
        said = f"try {index}, {acknowledged} saves told"
        count.tried += 1
        count.check(found is not None and (step_of(found) or 0) >= acknowledged, f"{said}: lost, {found}")
        count.check(found is None or is_right(found), f"{said}: a wrong weight")
        count.saw("saves told before" if acknowledged else "none")
        shutil.rmtree(run)
    return count


# --- damaged --------------------------------------------------------------------------------------------------------


def _zero_page(data: bytes) -> bytes:
    at = len(data) // 2 // 512 * 512
    return data[:at] + bytes(min(4096, len(data) - at)) + data[at + 4096 :]


def damages(other: Path) -> dict[str, Callable[[Path], None]]:
    """What may befall a file. other: the same file of another step."""

    def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
        return lambda path: (path.write_bytes(change(path.read_bytes())), None)[1]

    flip = lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]
    return {
        "cut to half": rewritten(lambda data: data[: len(data) // 2]),
        "cut by a byte": rewritten(lambda data: data[:-1]),
        "emptied": rewritten(lambda data: b""),
        "flipped": rewritten(flip),
        "zeroed by a page": rewritten(_zero_page),
        "doubled": rewritten(lambda data: data + data),
        "removed": Path.unlink,
        "swapped": lambda path: (path.write_bytes(other.read_bytes()), None)[1],
        "linked": lambda path: (path.unlink(), path.symlink_to(other))[1],
        "a pipe": lambda path: (path.unlink(), os.mkfifo(path))[1],
        "a folder": lambda path: (path.unlink(), path.mkdir())[1],
    }


def _judge(count: Count, folder: Path, file: str, said: str) -> None:
    """The checkpoint is refused with the file's name, and the one before it is found."""
    count.tried += 1
    problems = verify_folder(folder)
    count.check(bool(problems), f"{said}: not noticed")
    named = {part for problem in problems for part in (file, MANIFEST) if part in problem}
    count.check(bool(named), f"{said}: {problems[:1]} names no file")
    older = newest_whole(folder.parent.parent)
    count.check(older is not None and step_of(older) == (step_of(folder) or 0) - 1, f"{said}: then {older}")
    count.check(older is None or is_right(older), f"{said}: a wrong weight in {older}")
    try:
        read_full(folder)
        count.check(False, f"{said}: loaded")
    except UsageError as error:
        count.check(error.code == "K01" and "is damaged" in error.what, f"{said}: {error.what}")
        count.check(
            "step-2 is possible" in str(error.fix) or "step-000002" in str(error.fix), f"{said}: {error.fix}"
        )


def damaged(place: Path, tries: int = 0) -> Count:
    """Every file of a checkpoint by four ranks, in every way."""
    count, run = Count("each file damaged in each way"), place / "damaged"
    for step in (1, 2, 3):
        save_step(run, step, 4, "t")
    folder, before = run / "checkpoints/step-000003", run / "checkpoints/step-000002"
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, data in good.items():
        for what, harm in damages(before / name).items():
            harm(folder / name)
            _judge(count, folder, name, f"{name} {what}")
            shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink(
                missing_ok=True
            )
            (folder / name).write_bytes(data)
    for name in good:  # all of it is another step's
        shutil.copy(before / name, folder / name)
    _judge(count, folder, MANIFEST, "all files of another step")
    return count


def flips(place: Path, tries: int, seed: int = 0) -> Count:
    """One random bit of a random file."""
    count, order, run = Count("one random bit flipped"), random.Random(seed), place / "flips"
    for step in (2, 3):
        save_step(run, step, 4, "t")
    folder = run / "checkpoints/step-000003"
    files = sorted(folder.iterdir())
    sizes = [path.stat().st_size for path in files]
    for _ in range(tries):
        (path,) = order.choices(files, weights=sizes)
        bit = order.randrange(8 * path.stat().st_size)
        for turn in ("flip", "back"):
            with path.open("r+b") as file:
                file.seek(bit // 8)
                byte = file.read(1)[0]
                file.seek(bit // 8)
                file.write(bytes([byte ^ 1 << bit % 8]))
            if turn == "flip":
                _judge(count, folder, path.name, f"{path.name} bit {bit}")
    count.check(is_right(folder), "flipped back, it is as it was")
    return count


# --- disks ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_disk(place: Path, options: str) -> Iterator[str]:
    """A file system of its own at `place`; why there is none, "" if there is."""
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
    )
    try:
        yield made.stderr.strip() if made.returncode else ""
    finally:
        if not made.returncode:
            subprocess.run(["umount", "-l", str(place)], check=True)


def disk(place: Path, tries: int) -> Count:
    """A disk that is full at some point of a save, for disks of many sizes, then read-only."""
    count = Count("disk full or read-only")
    if os.geteuid() != 0:
        count.skipped = "mounting a small disk takes root"
        return count
    for index in range(tries):
        kib = 400 + 1200 * index // max(1, tries - 1)  # a checkpoint takes about 100 KiB
        with own_disk(place / f"disk{index}", f"size={kib}k") as why:
            if why:
                count.skipped = why
                return count
            _fill_up(count, place / f"disk{index}", kib)
    return count


def _fill_up(count: Count, disk: Path, kib: int) -> None:
    run, saved, said = disk / "run", 0, f"a disk of {kib} KiB"
    ballast = disk / "ballast"
    for step in range(1, 40):
        try:
            save_step(run, step, 2, "t", keep=20, patience=0.05)
            saved = step
        except UsageError as error:
            full = "No space left on device" in error.what or "nothing was heard" in error.what
            count.check(error.code == "K02" and full, f"{said}: {error.what}")
            break
    count.tried += 1
    found = newest_whole(run)
    count.check(saved > 0 and found is not None and step_of(found) == saved, f"{said}: {found}, not {saved}")
    count.check(found is None or is_right(found), f"{said}: a wrong weight")
    halves = list(run.glob("checkpoints/*.tmp-*/*.safetensors"))
    count.check(not halves, f"{said}: {halves} are left")
    count.saw("full")
    with contextlib.suppress(OSError):
        ballast.unlink(missing_ok=True)
        shutil.rmtree(run / "checkpoints/step-000001")
    try:
        save_step(run, 90, 2, "again", keep=1)
        count.check(
            newest_whole(run) == latest(run) and is_right(run / "checkpoints/step-000090"), f"{said}: after"
        )
    except UsageError as error:
        count.check(False, f"{said}: with room again, {error.what}")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        save_step(run, 91, 2, "ro", patience=0.05)
        count.check(False, f"{said}: written to a read-only disk")
    except UsageError as error:
        count.check(os.strerror(errno.EROFS) in error.what, f"{said}: {error.what}")
    count.tried += 1
    count.saw("read-only")
    count.check(is_right(newest_whole(run) or run), f"{said}: lost on a read-only disk")


# --- other worlds ---------------------------------------------------------------------------------------------------


def worlds(place: Path, tries: int, seed: int = 0) -> Count:
    """Saved by some ranks in some cut, loaded by 1, 2, 3, 4 and 8 in others."""
    count, order = Count("loaded by other numbers of ranks"), random.Random(seed)
    for index in range(tries):
        run, saved_by = place / f"worlds{index}", order.choice((1, 2, 3, 4, 8))
        folder = save_step(run, 1, saved_by, f"w{index}")
        for ranks in (1, 2, 3, 4, 8):
            count.tried += 1
            for name, start, size in [box for rank in cut_for(ranks) for box in rank]:
                shape, dtype = SHAPES[name]
                box = Box(name, shape, start, torch.empty(size, dtype=dtype))
                load(folder, [box])
                wanted = view(tensors(1)[name], start, size)
                count.check(
                    torch.equal(box.tensor, wanted), f"{saved_by} to {ranks} ranks: {name} at {start}"
                )
        shutil.rmtree(run)
    return count


PLANS = (
    "dp=1", "dp=2", "tp=2", "pp=2", "shard=2", "shard=3", "dp=3", "dp=2 pp=2", "dp=2 shard=2", "tp=2 pp=2", "shard=4 zero=1",
    "dp=4", "dp=8", "shard=8", "dp=2 shard=2 tp=2", "pp=2 dp=2 tp=2",
)  # fmt: skip


def plans(place: Path, tries: int, seed: int = 0) -> Count:
    """Trained and saved under one plan, loaded under others by a real run, on ranks that are threads."""
    from tests.train.state.checkpoint.under_plans import restored_pieces, trained
    from unisono.plan import Plan

    count, order = Count("loaded under other plans"), random.Random(seed)
    pairs = [(saved, wanted) for saved in PLANS[:8] for wanted in PLANS]
    folders: dict[str, Path] = {}
    for saved, wanted in order.sample(pairs, min(tries, len(pairs))):
        if saved not in folders:
            folders[saved] = trained(place / f"plan {saved}", saved)
        full = read_full(folders[saved])
        count.tried += 1
        for boxes in restored_pieces(place, folders[saved], wanted):
            for name, start, value in boxes:
                same = torch.equal(view(full[name], start, value.shape), value)
                count.check(same, f"{saved} to {wanted}: {name} at {start}")
        count.saw(f"on {Plan.parse(wanted).world} ranks")
    return count


def fuzzed(place: Path, tries: int, seed: int = 0) -> Count:
    from tests.train.state.checkpoint.fuzz import fuzz

    count = Count("hostile manifests, headers and files")
    told = fuzz(place / "fuzz", tries, seed)
    count.tried, count.wrong, count.seen = told["tried"], told["wrong"], told["seen"]
    return count


# name → (what, tries in all, tries of --quick)
PARTS: dict[str, tuple[Callable[[Path, int], Count], int, int]] = {
    "operations": (killed_at_operations, 1000, 12),
    "times": (killed_at_times, 100, 4),
    "damaged": (damaged, 0, 0),
    "flips": (flips, 1000, 40),
    "disk": (disk, 40, 3),
    "worlds": (worlds, 40, 4),
    "plans": (plans, 60, 3),
    "fuzz": (fuzzed, 100_000, 1000),
}


def play(only: list[str], quick: bool, fuzz: int | None = None) -> list[Count]:
    counts = []
    for name in only:
        part, full, few = PARTS[name]
        tries = fuzz if name == "fuzz" and fuzz is not None else few if quick else full
        with tempfile.TemporaryDirectory() as place:
            counts.append(part(Path(place), tries))
        print(counts[-1].line(), *counts[-1].wrong[:5], sep="\n  WRONG ", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a little of each")
    parser.add_argument("--only", default="", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--fuzz", type=int, metavar="N", help="so many hostile manifests, and nothing else")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    only = (
        ["fuzz"]
        if given.fuzz is not None and not given.only
        else given.only.split(",")
        if given.only
        else [*PARTS]
    )
    counts = play(only, given.quick, given.fuzz)
    wrong = sum(len(count.wrong) for count in counts)
    if given.json:
        rows = [{"what": c.what, "tried": c.tried, "wrong": c.wrong, "skipped": c.skipped} for c in counts]
        print(json.dumps({"schema_version": 1, "rows": rows}))
    print(f"{sum(count.tried for count in counts)} tried, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
