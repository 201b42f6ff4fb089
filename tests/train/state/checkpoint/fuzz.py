"""Hostile checkpoints: manifests and headers as a forger would write them, files that are no files.

Each is made from a real checkpoint, with all checksums right again, so that what stands behind them is reached. It is
read in a forked process that may have only so much memory, whose opened files are listened to, and which is stopped
where a read takes too long. Right is an error of the house (K01, K03), or a checkpoint read inside its folder.
"""

import contextlib
import copy
import hashlib
import json
import os
import random
import resource
import signal
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.train.state.checkpoint.cuts import make, save_all
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import load, newest_whole, read_full, tensor_names, verify_folder
from unisono.train.state.checkpoint.manifest import MANIFEST

ROOM = 512 << 20  # bytes that reading may take beside what the process has
SECONDS = 10
TENSORS = {
    "model/w": make((6, 4), torch.float32, 0),
    "model/b": make((4,), torch.bfloat16, 1),
    "n": torch.tensor(3),
}
RANKS = [[("model/w", (0, 0), (3, 4)), ("n", (), ())], [("model/w", (3, 0), (3, 4)), ("model/b", (0,), (4,))]]
DATA = "rank-00000.safetensors"
SECRET = "secret-outside"

PATHS = ("../x", "/etc/passwd", "rank-00000.safetensors/../../x", "..", "", ".", "rank-00000.safetensors\0", "a" * 5000,
         "\ud800", "\x1b[2J\x1b]0;owned\x07", "rank-00000.SAFETENSORS", "rank-00001.safetensors", "file:///etc/passwd")  # fmt: skip
NUMBERS = (-1, 0, 1, 2, 7, 8, 2**31, 2**31 - 1, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**400, -(2**63), 0.5,
           1e308, float("nan"), float("inf"), True, False)  # fmt: skip
ODD: tuple[Any, ...] = (
    None,
    [],
    {},
    [[]],
    [None],
    "0",
    "F32",
    "F64",
    "BOOL",
    "00000000",
    {"a": {}},
    [1] * 70,
    [2**62] * 64,
    [0] * 64,
)


HEARD = (
    "open",
    "os.listdir",
    "exec",
    "compile",
    "import",
    "os.system",
    "subprocess.Popen",
    "pickle.find_class",
)


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


def fuzz(place: Path, tries: int, seed: int = 0) -> dict[str, Any]:
    """{tried, wrong: texts, seen: outcome → how often}."""
    ours, theirs = os.pipe()
    place.mkdir(parents=True)
    warm = prepared(place / "warm")
    outcomes_of(warm.parent.parent)  # imports happen here and not under the listener
    "\x1b".encode("unicode_escape")
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        told = {"tried": 0, "wrong": ["the process ended"], "seen": {}}
        with contextlib.suppress(BaseException):
            told = _confined(place / "forged", tries, seed)
        with os.fdopen(theirs, "w") as out:
            json.dump(told, out)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as told:
        text = told.read()
    _, status = os.waitpid(pid, 0)
    found = json.loads(text) if text else {"tried": 0, "wrong": [], "seen": {}}
    if status:
        found["wrong"].append(f"the reader died with status {status}")
    return found


def prepared(run: Path) -> Path:
    """A checkpoint of two ranks, and a secret beside the run."""
    folder = save_all(run, 1, TENSORS, RANKS, {"step": 1, "recipe": {"seed": 1}}, token="f")
    assert folder is not None
    (run.parent / SECRET).write_bytes(folder.joinpath(DATA).read_bytes())
    return folder


def outcomes_of(run: Path) -> dict[str, str]:
    """What each way of reading says: a value's digest, or an error of the house. Others pass through."""
    folder = run / "checkpoints/step-000001"

    def said(read: Callable[[], Any]) -> str:
        try:
            return f"read {read()}"
        except UsageError as error:
            error.render().encode()  # it can be printed and kept
            if error.code not in ("K01", "K03"):
                raise
            return error.code

    return {
        "verify": said(lambda: len("".join(verify_folder(folder)).encode()) > 0),
        "full": said(lambda: {name: list(t.shape) for name, t in read_full(folder).items()}),
        "state": said(lambda: type(load(folder, [])).__name__),
        "names": said(lambda: len(tensor_names(folder))),
        "newest": said(lambda: newest_whole(run)),
    }


def _confined(run: Path, tries: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    order, wrong, seen = random.Random(seed), list[str](), dict[str, int]()
    folder = prepared(run)
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    opened: list[str] = []
    listening = [False]

    def hear(event: str, given: tuple[Any, ...]) -> None:
        if not listening[0] or event not in HEARD or isinstance(given[0], int):
            return
        what = os.fsdecode(given[0]) if isinstance(given[0], bytes | os.PathLike) else str(given[0])
        if event not in ("open", "os.listdir") or not _inside(what, run):
            opened.append(f"{event} {what[:200]}")

    sys.addaudithook(hear)
    signal.signal(signal.SIGALRM, _too_long)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM, held + ROOM))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(tries):
        what, dirty = forge(folder, good, order)
        opened.clear()
        try:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            listening[0] = True
            found = outcomes_of(run)
        except BaseException as error:
            found = {}
            listening[0] = False
            at = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(
                f"{number} {what!a}: {type(error).__name__}: {str(error)[:200]!a} at {at.filename}:{at.lineno}"
            )
        finally:
            listening[0] = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        wrong += [f"{number} {what!a}: {name!a}" for name in opened]
        outcome = "refused" if found.get("full", "").startswith("K") else "read in its folder"
        seen[outcome] = seen.get(outcome, 0) + 1
        _clean(folder, good, dirty)
        if len(wrong) > 50:
            break
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    seen["MiB more at the most"] = grown >> 10
    return {"tried": number + 1 if tries else 0, "wrong": wrong, "seen": seen}


def _inside(path: str, run: Path) -> bool:
    return os.path.realpath(os.path.dirname(path)).startswith(str(run))


def _too_long(*_: object) -> None:
    raise TimeoutError(f"took more than {SECONDS} s")


def _clean(folder: Path, good: dict[str, bytes], dirty: set[str]) -> None:
    for name in dirty:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        if name in good:
            path.write_bytes(good[name])
    (folder.parents[1] / "latest").unlink(missing_ok=True)
    (folder.parents[1] / "latest").write_text("checkpoints/step-000001\n")


# --- forging --------------------------------------------------------------------------------------------------------


def forge(folder: Path, good: dict[str, bytes], order: random.Random) -> tuple[str, set[str]]:
    """Change the folder; what was done, and which names are to be set right afterwards."""
    way = order.choices((_bytes, _tree, _text, _header, _place), weights=(2, 8, 2, 6, 1))[0]
    return way(folder, good, order)


def _bytes(folder: Path, good: dict[str, bytes], order: random.Random) -> tuple[str, set[str]]:
    """Bytes of a file, checksums as they were."""
    name = order.choice(sorted(good))
    data = bytearray(good[name])
    for _ in range(order.randint(1, 8)):
        at = order.randrange(len(data))
        match order.randrange(4):
            case 0:
                data[at] = order.randrange(256)
            case 1:
                del data[at : at + order.randint(1, 40)]
            case 2:
                data[at:at] = order.randbytes(order.randint(1, 40))
            case _:
                data[at : at + 8] = order.choice((b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7))
        data = data or bytearray(b"{")
    (folder / name).write_bytes(data)
    return f"bytes of {name}", {name}


def _tree(folder: Path, good: dict[str, bytes], order: random.Random) -> tuple[str, set[str]]:
    """Some values of the manifest's tree, with a right digest."""
    fields = json.loads(good[MANIFEST])
    fields.pop("blake2b")
    said = [mutate(fields, order) for _ in range(order.choice((1, 1, 1, 2, 3)))]
    (folder / MANIFEST).write_bytes(signed(json.dumps(fields)))
    return f"manifest {'; '.join(said)}", {MANIFEST}


def mutate(tree: Any, order: random.Random) -> str:
    nodes = list(_nodes(tree, ()))
    where, holder, key = order.choice(nodes)
    # What decides is deep down and rare, the rest is state: look there more often.
    if order.random() < 0.7 and (chosen := [n for n in nodes if n[0][:1] in (("files",), ("tensors",))]):
        where, holder, key = order.choice(chosen)
    match order.randrange(6):
        case 0:
            holder[key] = order.choice(NUMBERS)
        case 1:
            holder[key] = order.choice(PATHS)
        case 2:
            holder[key] = copy.deepcopy(order.choice(ODD))
        case 3:
            del holder[key]
            return f"{where} deleted"
        case 4 if isinstance(holder, dict):
            holder[order.choice(PATHS)] = holder.pop(key)
            return f"{where} renamed"
        case _:
            _, other, name = order.choice(nodes)
            holder[key] = copy.deepcopy(
                other[name] if (name in other if isinstance(other, dict) else name < len(other)) else 0
            )
            return f"{where} is another's"
    return f"{where} = {str(holder[key])[:60]}"


def _nodes(tree: Any, where: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """(path, what holds it, its key in there) of each value below."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield (*where, key), tree, key
        if isinstance(tree[key], dict | list):
            yield from _nodes(tree[key], (*where, key))


def _text(folder: Path, good: dict[str, bytes], order: random.Random) -> tuple[str, set[str]]:
    """What no tree can say: keys twice, nesting without end, numbers that are none; with a right digest."""
    body = good[MANIFEST].partition(b"\n")[2].decode()
    at = order.choice([i for i, c in enumerate(body) if c in ":,[{"]) + 1
    piece = order.choice(
        (f'"x": {deep(order.choice((50, 5000, 200_000)))},', '"step": 2, ', '"files": {}, ', "NaN, ", "-Infinity, ", "1" * 5000,
         '"\\ud800": 1, ', "[" * order.choice((10, 100_000)), '{"a":' * 50_000, '"w": 1e999, ', "\0", "\ufeff", '"tensors": {}, ')
    )  # fmt: skip
    (folder / MANIFEST).write_bytes(signed("{" + body[:at] + piece + body[at:], raw=True))
    return f"text {piece[:40]!r} at {at}", {MANIFEST}


def signed(text: str, raw: bool = False) -> bytes:
    """The object with its digest in front, as `manifest.encode` does."""
    body = text.encode("utf-8", "surrogatepass")[1:] + b"\n"
    return b'{"blake2b": "%s",\n' % hashlib.blake2b(body, digest_size=32).hexdigest().encode() + body


def _header(folder: Path, good: dict[str, bytes], order: random.Random) -> tuple[str, set[str]]:
    """The header of a safetensors file, with lengths and checksums right again in the manifest, or nearly so."""
    data = good[DATA]
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    said = mutate(header, order)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    match order.randrange(8):
        case 0:
            text = text[:-1] + b', "model/w@0,0": {"dtype": "F32"}}'
        case 1:
            text = deep(order.choice((100, 100_000))).encode()
        case 2:
            text = order.randbytes(order.randint(0, 64))
        case _:
            pass
    stated = order.choice((len(text),) * 6 + (0, 2**63 - 1, 2**64 - 1, len(text) + len(rest) + 9))
    head = stated.to_bytes(8, "little") + text
    (folder / DATA).write_bytes(head + rest)
    fields = json.loads(good[MANIFEST])
    fields.pop("blake2b")
    entry = fields["files"][DATA]
    entry["header_crc32"] = f"{zlib.crc32(head):08x}"
    entry["bytes"], entry["header_bytes"] = len(head) + len(rest), len(head)
    if order.random() < 0.2:
        said += "; " + mutate(fields, order)
    (folder / MANIFEST).write_bytes(signed(json.dumps(fields)))
    return f"header {said}", {DATA, MANIFEST}


def _place(folder: Path, good: dict[str, bytes], order: random.Random) -> tuple[str, set[str]]:
    """Links, pipes, folders and devices in the place of files; a pointer to elsewhere."""
    name = order.choice((*sorted(good), "latest"))
    path = folder / name if name != "latest" else folder.parents[1] / "latest"
    path.unlink()
    what = order.choice(("link", "link to a folder", "pipe", "folder", "device", "loop", "missing"))
    match what:
        case "link":
            path.symlink_to(folder.parents[2] / SECRET)
        case "link to a folder":
            path.symlink_to("/etc")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir() if name != "latest" else path.write_text(
                "../../etc/passwd\n" * order.randint(1, 9999)
            )
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
    return f"{name}: {what}", {name} if name != "latest" else set()
