"""A process that decodes, transforms and tokenises parts of shards: orders on stdin, answers on stdout, see
`worker_pool`. No torch here.

It ends with whoever gives it orders, however that ends and whatever it is busy with.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

from unisono.spec.errors import UnisonoError
from unisono.train.data.tokenised.chats import BadRecord
from unisono.train.data.worker_pool import failure
from unisono_contrib.train.data.stream.decode import Decoding
from unisono_contrib.train.data.stream.formats import format_of
from unisono_contrib.train.data.stream.reading import Reading, Tokeniser


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever gives orders
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    orders: SimpleQueue[tuple[dict[str, Any], bytes]] = SimpleQueue()
    Thread(target=_listen, args=(sys.stdin.buffer, orders), daemon=True).start()
    tokenisers: dict[str, Tokeniser] = {}
    while True:
        order, body = orders.get()
        try:
            answer = decoded(order, body) if "sizes" in order else _tokenised(order, body, tokenisers)
        except (UnisonoError, OSError) as error:
            answer = failure(error)
        try:
            print(json.dumps(answer), file=answers, flush=True)
        except BrokenPipeError:
            os._exit(0)


def _listen(stream: BinaryIO, orders: "SimpleQueue[tuple[dict[str, Any], bytes]]") -> None:
    """A thread of its own, so that the end of orders ends a user's function too that never returns."""
    for line in iter(stream.readline, b""):
        order = json.loads(line)
        orders.put((order, stream.read(order["bytes"])))
    os._exit(0)


def decoded(order: Mapping[str, Any], body: bytes) -> dict[str, Any]:
    """Decode pictures that stand in `body` one behind the other, and write them to the open file `pixels`; or say which
    of them is bad, and why."""
    decoding, at, into = Decoding(tuple(order["shape"]), order["transform"]), 0, 0
    for row, (size, draw) in enumerate(zip(order["sizes"], order["draws"], strict=True)):
        try:
            picture = decoding.pixels(body[at : at + size], draw and tuple(draw), order["files"][row])
        except BadRecord as error:
            return {"bad": [row, str(error)]}
        at += size
        into += os.pwrite(order["pixels"], picture.tobytes(), into)
    return {"bad": None}


def _tokenised(order: Mapping[str, Any], body: bytes, tokenisers: dict[str, Tokeniser]) -> dict[str, Any]:
    """Write the tokens of a part to the folder `out`."""
    reading = Reading(**order["reading"])
    key = json.dumps(order["reading"])
    tokeniser = tokenisers.setdefault(key, Tokeniser(reading.token_order))
    unpacked = format_of(order["format"]).unpack(body, order["start"], order["extra"])
    tokeniser.put(unpacked, Path(order["out"]))
    return {}
