"""Tasks, answers and exchanges of secure rounds as frames of a link between hosts: a line of JSON, then tensors as
safetensors. No pickle."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from unisono.launch import wire
from unisono.spec.errors import UsageError
from unisono_contrib.federated.client import Task
from unisono_contrib.federated.clients import Answer
from unisono_contrib.federated.secure.frames import reply_body, reply_of, request_body, step_of
from unisono_contrib.federated.secure.messages import Reply, Request

_PIECE = 4 << 20
"""Bytes of a frame, of which a link allows 16 MiB."""
SENT, PART, GROWTH = "sent/", "part/", "growth/"
Message = tuple[dict[str, Any], dict[str, Tensor]]


def frames_of(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    """A message. facts: JSON, with its `kind`."""
    body = save({name: x.detach().cpu().contiguous() for name, x in tensors.items()}) if tensors else b""
    yield wire.dumps({**facts, "bytes": len(body)})
    for at in range(0, len(body), _PIECE):
        yield body[at : at + _PIECE]


class Inbox:
    """Puts messages together. most: bytes of a message's tensors."""

    def __init__(self, most: int) -> None:
        self._most, self._facts = most, dict[str, Any]()
        self._body, self._left = bytearray(), 0

    def feed(self, frame: bytes) -> Message | None:
        """The message that this frame completes. Raises ValueError for what no `frames_of` has made."""
        if not self._left:
            self._facts, self._body = wire.event(frame), bytearray()
            self._left = self._facts.get("bytes", 0)
            if not isinstance(self._left, int) or not 0 <= self._left <= self._most:
                raise ValueError(f"a message of {self._left!r} bytes")
        else:
            self._body += frame
            self._left -= len(frame)
            if self._left < 0:
                raise ValueError("more came than was announced")
        if self._left:
            return None
        try:
            return self._facts, load(bytes(self._body)) if self._body else {}
        except (SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(f"no tensors: {error}") from error


def task_frames(task: Task) -> Iterator[bytes]:
    names = ("number", "client", "lr", "share", "run", "heard")
    facts = {"kind": "task", **{name: getattr(task, name) for name in names}}
    sent = {f"{SENT}{name}": x for name, x in task.sent.items()}
    return frames_of(facts, {"weights": task.weights, **sent})


def task_of(message: Message) -> Task:
    """Raises KeyError, TypeError, ValueError for what `task_frames` has not made."""
    facts, tensors = message
    sent = {name.removeprefix(SENT): x for name, x in tensors.items() if name.startswith(SENT)}
    return Task(
        int(facts["number"]), int(facts["client"]), tensors["weights"], float(facts["lr"]),
        float(facts["share"]), sent, str(facts["run"]), int(facts["heard"]),
    )  # fmt: skip


def answer_frames(answer: Answer) -> Iterator[bytes]:
    facts = {
        "kind": "answer", "number": answer.number, "client": answer.client, "samples": answer.samples,
        "steps": answer.steps, "loss": answer.loss, "parts": len(answer.parts),
    }  # fmt: skip
    parts = {f"{PART}{i}": x for i, x in enumerate(answer.parts)}
    return frames_of(facts, {**parts, **{f"{GROWTH}{name}": x for name, x in answer.growth.items()}})


def answer_of(message: Message) -> Answer:
    """Raises KeyError, TypeError, ValueError for what `answer_frames` has not made."""
    facts, tensors = message
    parts = [tensors[f"{PART}{i}"] for i in range(int(facts["parts"]))]
    growth = {name.removeprefix(GROWTH): x for name, x in tensors.items() if name.startswith(GROWTH)}
    samples, steps = int(facts["samples"]), int(facts["steps"])
    if samples < 1 or steps < 1 or not all(torch.isfinite(x).all() for x in growth.values()):
        raise ValueError("an answer of no samples, of no steps, or with what is no number")
    return Answer(
        int(facts["number"]), int(facts["client"]), samples, parts, growth, steps, float(facts["loss"])
    )


@dataclass(frozen=True, slots=True)
class SecureReply:
    """A client's reply to one request of a secure round. step: the request's name. refused: (code, why) of a client
    that does not go on; reply is None then."""

    client: int
    number: int
    step: str
    reply: Reply | None
    refused: tuple[str, str] = ("", "")


def request_frames(client: int, number: int, request: Request) -> Iterator[bytes]:
    """A request of the secure round `number`, to one client."""
    facts = {"kind": "secure", "client": client, "number": number, "step": step_of(request)}
    return frames_of({**request_body(request), **facts}, {})


def reply_frames(client: int, number: int, step: str, reply: Reply | UsageError) -> Iterator[bytes]:
    """Its reply, or why there is none. Of an error goes what it says, without what it takes for likely."""
    facts = {"kind": "secure", "client": client, "number": number, "step": step}
    if isinstance(reply, UsageError):
        return frames_of({**facts, "code": reply.code, "refused": reply.what}, {})
    body, tensors = reply_body(reply)
    return frames_of({**body, **facts}, tensors)


def secure_reply_of(message: Message) -> SecureReply:
    """Raises KeyError, TypeError, ValueError for what `reply_frames` has not made."""
    facts, _ = message
    client, number, step = int(facts["client"]), int(facts["number"]), str(facts["step"])
    if "refused" in facts:
        return SecureReply(client, number, step, None, (str(facts["code"])[:8], str(facts["refused"])[:500]))
    return SecureReply(client, number, step, reply_of(step, message, client + 1))
