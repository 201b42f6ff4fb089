"""Kinds of hostile input that come over a line or lie where ranks are asked: frames, requests, messages, answers."""

import json
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.security.confined import Kind
from tests.security.mutate import JUNK, NUMBERS
from unisono.launch import doctor_hang, hang_report, inspect, inspect_folder, wire
from unisono.launch.rank.channel import SocketChannel
from unisono.launch.run import events
from unisono.launch.store import StoreServer

# --- frames ---

_LENGTHS = (0, 1, 3, 4, 255, 256, wire.MOST - 1, wire.MOST, wire.MOST + 1, 2**31 - 1, 2**31, 2**32 - 1)


def _frames(order: random.Random) -> list[bytes]:
    """Pieces in which a stream comes: good frames, then perhaps anything."""
    stream = b"".join(
        wire.frame(order.randbytes(order.choice((0, 1, 7, 300)))) for _ in range(order.randint(0, 4))
    )
    match order.randrange(6):
        case 0:
            stream += wire.HEAD.pack(order.choice(_LENGTHS)) + order.randbytes(order.randint(0, 40))
        case 1:
            stream += order.randbytes(order.randint(0, 3000))
        case 2:
            stream = stream[: order.randint(0, len(stream))]
        case 3:
            stream += b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * order.randint(1, 9)
        case 4:
            stream += wire.HEAD.pack(0) * order.choice((1, 100, 20_000))
        case _:
            changed = bytearray(stream + b"\0")
            changed[order.randrange(len(changed))] ^= 1 << order.randrange(8)
            stream = bytes(changed)
    return list(_pieces(stream, order))


def _pieces(stream: bytes, order: random.Random) -> Iterator[bytes]:
    while stream:
        size = order.choice((1, 2, 3, 5, 64, 1 << 16)) if len(stream) < 2000 else 1 << 16
        yield stream[:size]
        stream = stream[size:]


def play_frames(pieces: list[bytes]) -> str:
    """All that reads frames: the cutter, fields of a payload, a blocking reader, messages with files."""
    whole, frames, became = b"".join(pieces), wire.Frames(), "frames"
    try:
        got = [frame for piece in pieces for frame in frames.feed(piece)]
        if not whole.startswith(b"".join(map(wire.frame, got))):
            raise AssertionError("frames that nobody sent")
        for frame in got:
            _no_more_than(lambda frame=frame: wire.split(frame), ValueError)
    except ValueError:
        became = "refused"
    _no_more_than(lambda: wire.split(whole), ValueError)
    near, far = socket.socketpair()
    with near, far:
        far.sendall(whole[:60_000])
        far.shutdown(socket.SHUT_WR)
        _no_more_than(lambda: [wire.read_frame(near) for _ in range(30_000)], ConnectionError, ValueError)
    return became


def _no_more_than(read: Any, *errors: type[Exception]) -> None:
    try:
        read()
    except errors:
        pass


# --- requests to the store ---

_OPS = (
    b"set",
    b"get",
    b"wait",
    b"add",
    b"check",
    b"delete",
    b"count",
    b"compare_set",
    b"",
    b"SET",
    b"exec",
    b"\xff" * 40,
)
_FIELDS = (b"", b"k", b"other", b"0", b"1", b"-1", b"1e9", b"nan", b"inf", b"-inf", b"1e-320", b"0x1", b"1_0", b"9" * 25, b"9" * 5000, b"\0" * 9,
           b"\xff\xfe", "٣".encode(), b"1.5", b" 1 ", b"k" * 70_000)  # fmt: skip


def _requests(order: random.Random) -> list[tuple[int, list[bytes]]]:
    """Requests of three ranks, one after the other."""
    return [
        (order.randrange(3), [str(i).encode(), *([order.choice(_OPS)] * (order.random() < 0.95)),
                              *(order.choice(_FIELDS) for _ in range(order.choice((0, 1, 1, 2, 2, 3, 5))))][order.random() < 0.02 :])
        for i in range(order.randint(1, 12))
    ]  # fmt: skip


def play_requests(requests: list[tuple[int, list[bytes]]]) -> str:
    """A store answers each request once, soon or late, and nobody else's; it stays as it was for the others."""
    clock = [0.0]
    server, owed = StoreServer(lambda: clock[0]), list[tuple[int, bytes]]()
    server.handle(9, [b"0", b"set", b"mine", b"kept"])

    def take(answers: list[tuple[int, list[bytes]]]) -> None:
        for who, (id, *_) in answers:
            owed.remove((who, id))

    bad = 0
    for who, fields in requests:
        if len(fields) >= 2:
            owed.append((who, fields[0]))
        try:
            take(server.handle(who, fields))
        except ValueError:
            bad += 1
            if len(fields) >= 2:
                raise AssertionError(f"no answer to {fields[:3]!r}") from None
        clock[0] += 0.5
        take(server.expire())
        due = server.next_deadline()
        if due is not None and due != due:
            raise AssertionError("a deadline that is no time")
    if server.handle(9, [b"1", b"get", b"mine", b"1"]) != [(9, [b"1", b"+", b"kept"])]:
        raise AssertionError("another's key has changed")
    for who in range(3):
        take(server.leave(who))
    if owed:
        raise AssertionError(f"never answered: {owed[:3]}")
    return "nonsense" if bad else "answered"


# --- messages of a supervisor to its rank, and the other way ---


def value(order: random.Random, depth: int = 0) -> Any:
    plain = (
        None,
        True,
        0,
        -1,
        1.5,
        10**30,
        "x",
        "",
        [],
        {},
        order.choice(JUNK),
        order.choice(NUMBERS),
        1e308,
        float("nan"),
    )
    if depth < 3 and order.random() < 0.3:
        return order.choice(
            (
                [value(order, depth + 1)] * 2,
                {order.choice(("kind", "epoch", "a", "")): value(order, depth + 1)},
            )
        )
    return order.choice(plain)


def _messages(order: random.Random) -> list[bytes]:
    texts = []
    for _ in range(order.randint(1, 4)):
        said = {
            "kind": order.choice(("stop", "hurry", "leave", "regroup", "step", "odd", value(order))),
            "epoch": value(order),
        }
        text = json.dumps(said if order.random() < 0.8 else value(order)).encode()
        if order.random() < 0.15:
            text = order.choice(
                (
                    b"",
                    b"[" * 100_000,
                    b'{"a":' * 30_000,
                    b"\xff",
                    text[:-1],
                    b"NaN",
                    b"1" * 5000,
                    b'{"kind": "\\ud800"}',
                )
            )
        texts.append(text)
    return texts


def play_messages(texts: list[bytes]) -> str:
    """What is no message of ours is none, on either side of the line."""
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.settimeout(5)
        channel = SocketChannel(near)
        for text in texts:
            events.from_worker(1, wire.event(text))
            for at in range(0, len(data := wire.frame(text)), 4000):
                far.sendall(data[at : at + 4000])
                channel.stop_requested()
        channel.hurried()
    return "stop" if channel.stop_requested() else "heard"


# --- where ranks are asked from outside ---

_LIVING = {
    "rank": 0, "world": 2, "pid": 1, "start": 1, "host": "h", "home": ["x", 1], "main": 1, "lines": 3, "run": "r", "began": 1.0, "private": False,
}  # fmt: skip
_SAID = {
    "token": "t",
    "status": {"rank": 0, "state": "waits", "host": "h", "part": "a step", "op": "all_reduce", "place": "m.py:3 in f", "odd": 0, "idle": 2.0, "step": 4},
    "frames": [["m.py", 3, "f"], ["torch/x.py", 9, "g"]],
    "calls": {"dp": {"axis": "dp", "ranks": [0, 1], "begun": 4,
                     "calls": {"3": {"op": "all_reduce", "over": True, "part": "a", "place": "p", "odd": 0, "says": "x"},
                               "4": {"op": "all_reduce", "over": False, "part": "a", "place": "p", "odd": 0, "says": "y"}}}},
    "kernel": {"state": "sleeping", "in": "futex", "tracer": 0}, "since": 1.0, "usual": 0.1, "clashed": False,
}  # fmt: skip


def _changed(tree: Any, order: random.Random) -> Any:
    """A copy in which some values are others."""
    if isinstance(tree, dict):
        kept = {key: _changed(value, order) for key, value in tree.items() if order.random() > 0.02}
        return kept | (
            {order.choice(("x", "rank", "9" * 5000, "²", "")): value(order)} if order.random() < 0.05 else {}
        )
    if isinstance(tree, list):
        return [_changed(value, order) for value in tree if order.random() > 0.02]
    return value(order) if order.random() < 0.06 else tree


def _alive(order: random.Random) -> dict[str, str]:
    """Files of a folder in which ranks are seen."""
    files = {"ask": json.dumps({"token": "t", "home": ["x", 1]}).ljust(256)}
    for rank in range(2):
        files[f"rank{rank}.json"] = json.dumps(_changed({**_LIVING, "rank": rank}, order))
        said = json.loads(json.dumps(_SAID))
        said["status"]["rank"] = rank
        files[f"rank{rank}.says"] = json.dumps(_changed(said, order))
    if order.random() < 0.2:
        name = order.choice(list(files))
        files[name] = order.choice(
            (
                "",
                "PIPE",
                "LINK",
                "DEVICE",
                "FOLDER",
                "[" * 200_000,
                '{"a":' * 50_000,
                "\0" * 9,
                "null",
                "[]",
                "1" * 5000,
                "{",
            )
        )
    return files


def play_alive(files: dict[str, str]) -> str:
    """Asked as `doctor hang` asks, without waiting for anybody."""
    folder = Path("alive")
    folder.mkdir(exist_ok=True)
    try:
        for name, text in files.items():
            _put(folder / name, text)
        inspect_folder.question(folder)
        ranks = inspect_folder.living(folder)
        inspect_folder.sweep(folder)
        if not ranks:
            return "nobody"
        told = {
            one.rank: said
            for one in ranks
            if (said := inspect_folder.answer_of(folder, one.rank, "t")) is not None
        }
        seen = [inspect._witness(one, told.get(one.rank)) for one in ranks]
        judged = doctor_hang.judge(seen, None, 1.0)
        facts, lines = hang_report.report(folder, seen, judged.error, judged.waited, judged.limit)
        json.dumps(facts).encode()
        if odd := [line for line in lines if not line.replace("\n", "").isprintable()]:
            raise AssertionError(f"it steers a terminal: {odd[0]!a}")
        return "healthy" if judged.error is None else f"U-{judged.error.code}"
    finally:
        for path in folder.iterdir():
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def _put(path: Path, text: str) -> None:
    match text:
        case "PIPE":
            os.mkfifo(path)
        case "LINK":
            path.symlink_to("/etc/passwd")
        case "DEVICE":
            path.symlink_to("/dev/zero")
        case "FOLDER":
            path.mkdir()
        case _:
            path.write_text(text, encoding="utf-8", errors="surrogatepass")


FRAMES = Kind("frames", _frames, play_frames, share=9)
STORE = Kind("store", _requests, play_requests, share=8)
MESSAGES = Kind("messages", _messages, play_messages, share=4)
ALIVE = Kind("alive", _alive, play_alive, share=4)
