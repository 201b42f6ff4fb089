"""Kinds of hostile input from other hosts: greetings of strangers at the door of a run, answers where a host calls,
frames over a link that somebody else has his hands on, and doors that say anything."""

import json
import os
import random
import select
import socket
from pathlib import Path
from typing import Any

from tests.security.confined import Kind
from tests.security.mutate import JUNK, bytes_changed
from tests.security.streams import value
from unisono.launch import agent, link, wire
from unisono.launch.host_listener import HostListener
from unisono.launch.link import Broken, HostLink, Refused
from unisono.verbs import host as host_verb

TOKEN, OTHER = "a" * 64, "b" * 64
HOST = {"name": "b", "room": 2, "cores": 4}


def _nested(order: random.Random) -> str:
    depth = order.choice((1, 100, 400, 480, 490, 495, 600, 900, 950, 970, 980, 985, 990, 995, 1300))
    return order.choice(("[" * depth + "]" * depth, '{"a":' * (depth // 2) + "1" + "}" * (depth // 2)))


def _greeting(order: random.Random) -> tuple[str, Any]:
    """(how it is made, of what): what follows from the challenge is made when there is one."""
    way = order.choice(("bytes", "bytes", "said", "said", "wrong", "again", "late", "right"))
    if way == "bytes":
        pieces = [
            order.choice((
                order.randbytes(order.randint(0, 60)), wire.HEAD.pack(order.choice((0, 1, 4096, 4097, 2**31, 2**32 - 1))), b"GET / HTTP/1.1\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + order.randbytes(32), wire.frame(_nested(order).encode()[:4096]),
                wire.frame(b'{"nonce": "x", "proof": "y", "a": %s}' % _nested(order).encode()), wire.frame(b"\xff" * 9), wire.frame(b"null"),
            ))
            for _ in range(order.randint(1, 3))
        ]  # fmt: skip
        return way, pieces
    said = {key: value(order) if order.random() < 0.3 else good for key, good in HOST.items()}
    return way, said | ({order.choice(JUNK): value(order)} if order.random() < 0.2 else {})


def play_greeting(one: tuple[str, Any]) -> str:
    """Nobody gets in but who knows the token and says what a host says; the next one is heard as before."""
    refused = list[str]()
    listener = HostListener.at("127.0.0.1")
    listener.token, listener.refused = TOKEN, refused.append
    stranger, asked = _called(listener)
    joined = list[Any]()
    for piece in _sent(one, asked):
        try:
            stranger.send(piece)
        except OSError:
            break
        joined += _turned(listener)
    if joined and one[0] != "right":
        raise AssertionError("a stranger got in")
    if any(TOKEN in text for text in refused):
        raise AssertionError("the token is told")
    stranger.close()
    friend, asked = _called(listener)
    friend.send(wire.frame(wire.dumps(link.answer(TOKEN, asked, HOST))))
    (known,) = _turned(listener)
    known.close(), friend.close(), listener.close()
    for some in joined:
        some.close()
    return "joined" if joined else "refused" if refused else "not heard out"


def _called(listener: HostListener) -> tuple[socket.socket, dict[str, Any]]:
    """Who has called, and what is asked of him."""
    sock = socket.create_connection(("127.0.0.1", listener.port))
    _turned(listener)
    return sock, link.parse(wire.read_frame(sock))


def _turned(listener: HostListener) -> list[Any]:
    """Who has got in, once all that was sent has come."""
    joined = list[Any]()
    while select.select([listener], [], [], 0.002)[0]:
        joined += listener.turn()
    return joined


def _sent(one: tuple[str, Any], asked: dict[str, Any]) -> list[bytes]:
    way, said = one
    if way == "bytes":
        return said
    given = [asked, link.challenge()][way == "again"]  # again: what was right for another challenge
    answer = link.answer(OTHER if way == "wrong" else TOKEN, given, said)
    if way == "said":
        answer |= {"proof": "0" * 64}
    if way == "late":  # changed after it was proven
        answer |= {"room": 60000, "name": "other"}
    frame = wire.frame(json.dumps(answer).encode())
    return [frame[:5], frame[5:]]


def _answers(order: random.Random) -> list[bytes]:
    """What somebody says who answers where a run's supervisor should."""
    asked = {"unisono": 1, "nonce": "n" * 64}
    proved: dict[str, Any] = {"proof": "0" * 64}
    for tree in (asked, proved):
        if order.random() < 0.5:
            tree[order.choice(("unisono", "nonce", "proof", "x"))] = value(order)
    frames = [wire.frame(json.dumps(tree).encode()) for tree in (asked, proved)]
    if order.random() < 0.4:
        at = order.randrange(2)
        frames[at] = order.choice((
            bytes_changed(frames[at], order), order.randbytes(50), wire.HEAD.pack(2**32 - 1) + bytes(50), wire.frame(_nested(order).encode()[:4096]),
            b"", b"HTTP/1.1 400 Bad Request\r\n\r\n",
        ))  # fmt: skip
    return frames


def play_answers(frames: list[bytes]) -> str:
    """A host that calls hangs up on who does not know the token."""
    near, far = socket.socketpair()
    far.sendall(b"".join(frames))
    far.shutdown(socket.SHUT_WR)
    try:
        asked = link.parse(agent._greeting(near))
        answered = link.answer(TOKEN, asked, HOST)
        link.check_called(TOKEN, asked, answered, link.parse(agent._greeting(near)))
    except (Refused, ConnectionError) as error:
        return "refused" if isinstance(error, Refused) else "it left"
    finally:
        near.close(), far.close()
    raise AssertionError("a stranger was believed")


def _tampered(order: random.Random) -> tuple[list[bytes], list[tuple[str, int, bytes]]]:
    payloads = [order.randbytes(order.choice((0, 1, 40, 3000))) for _ in range(order.randint(1, 5))]
    ways = [(order.choice(("drop", "again", "swap", "flip", "put in", "cut", "length", "fine")), order.randrange(5), order.randbytes(24))
            for _ in range(order.randint(0, 2))]  # fmt: skip
    return payloads, ways


def play_tampered(one: tuple[list[bytes], list[tuple[str, int, bytes]]]) -> str:
    """What comes out of a link is what went in, in its order, up to where somebody touched it."""
    payloads, ways = one
    (near, wire_in), (wire_out, far) = socket.socketpair(), socket.socketpair()
    sends, takes = _end(near, False), _end(far, True)
    wire_in.setblocking(True)
    frames = []
    for payload in payloads:
        sends.send(payload)
        head = wire_in.recv(4, socket.MSG_WAITALL)
        frames.append(head + wire_in.recv(wire.HEAD.unpack(head)[0], socket.MSG_WAITALL))
    for way, at, junk in ways:
        _tamper(frames, way, at % max(1, len(frames)), junk)
    wire_out.sendall(b"".join(frames))
    got, ended = list[bytes](), False
    try:
        while frame := takes.receive():
            got += frame
        wire_out.close()
        takes.receive()
    except Broken:
        ended = True
    for sock in (near, wire_in, wire_out, far):
        sock.close()
    if got != payloads[: len(got)]:
        raise AssertionError("a frame that nobody sent so")
    return "ended where it was touched" if ended and len(got) < len(payloads) else "came whole"


def _end(sock: socket.socket, is_caller: bool) -> HostLink:
    """As `HostLink.between`, over what is no TCP."""
    made = HostLink.__new__(HostLink)
    keys = (b"k" * 32, b"l" * 32)
    sock.setblocking(False)
    HostLink.__init__(made, sock, keys[is_caller], keys[not is_caller])
    return made


def _tamper(frames: list[bytes], way: str, at: int, junk: bytes) -> None:
    if not frames:
        return
    match way:
        case "drop":
            del frames[at]
        case "again":
            frames.insert(at, frames[at])
        case "swap":
            frames[at], frames[0] = frames[0], frames[at]
        case "flip":
            changed = bytearray(frames[at])
            changed[junk[0] % len(changed)] ^= 1 << junk[1] % 8
            frames[at] = bytes(changed)
        case "put in":
            frames.insert(at, wire.frame(junk))
        case "cut":
            frames[at] = frames[at][: junk[0] % len(frames[at])]
        case "length":
            frames[at] = junk[:4] + frames[at][4:]


def _door(order: random.Random) -> str:
    good: dict[str, Any] = {
        "address": "127.0.0.1",
        "port": 5,
        "token": TOKEN,
        "certificate": "",
        "silent": 10.0,
    }
    for _ in range(order.choice((0, 1, 1, 2))):
        good[order.choice(list(good))] = value(order)
    text = json.dumps(good)
    odd = (
        "",
        "pipe",
        "[" * 200_000,
        '{"address":' * 40_000,
        "null",
        "[]",
        text[:-1],
        text * 2,
        "1" * 5000,
        "\x1b[2J",
    )
    return order.choice(odd) if order.random() < 0.15 else text


def play_door(text: str) -> str:
    """A door, from a file: told where it leads, or why it leads nowhere."""
    if text == "pipe":
        os.mkfifo("door.json")
    else:
        Path("door.json").write_text(text)
    try:
        door = host_verb._door("door.json")
        return "a door" if isinstance(door["port"], int) else "none"
    finally:
        os.unlink("door.json")


GREETINGS = Kind("greetings", _greeting, play_greeting, share=5, allows=("socket.connect", "socket.bind"))
ANSWERS = Kind("answers", _answers, play_answers, share=3)
TAMPERED = Kind("links", _tampered, play_tampered, share=5)
DOORS = Kind("doors", _door, play_door, share=1)
