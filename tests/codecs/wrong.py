"""Codecs of a user's own, each with one mistake."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.codecs.own import Rounded
from unisono.codecs import Codec, Coder, Deal, Gather, Sent, Sum
from unisono.codecs.plain import Plain


class Unfinished(Codec):
    """Does not say what it sends."""

    name = "unfinished"

    def bind(self):
        return FunctionCoder(lambda grad, shapes, memory: iter(()))


class Nameless(Codec):
    """Has no name."""

    def work(self, shapes, itemsize, dp):
        return Plain().work(shapes, itemsize, dp)

    def bind(self):
        return FunctionCoder(whole)


class FunctionCoder(Coder):
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def exchange(self, grad, shapes, memory):
        return self.function(grad, shapes, memory)


def whole(grad, shapes, memory):
    return (yield Sum(grad))


def too_short(grad, shapes, memory):
    return (yield Sum(grad))[:-5]


def without_zeros(grad, shapes, memory):
    total = yield Sum(grad)
    return total[: sum(shape.numel() for shape in shapes)].clone()


def at_once(grad, shapes, memory):
    return grad


def nothing(grad, shapes, memory):
    yield Sum(grad)


def bare(grad, shapes, memory):
    return (yield grad)


def endless(grad, shapes, memory):
    while True:
        yield Sum(grad)


def alone(grad, shapes, memory):
    if memory.place:
        yield Sum(grad)
    return grad


def uneven(grad, shapes, memory):
    yield Gather(grad[: 5 + memory.place])
    return grad


def undealt(grad, shapes, memory):
    yield Deal(grad[:7])
    return grad


def unnamed(grad, shapes, memory):
    memory["left"].add_(grad)
    return (yield Sum(grad))


def overlong(grad, shapes, memory):
    yield Sent(lambda: grad.new_zeros(len(grad) + 1))
    return (yield Sum(grad))


FUNCTIONS = {f.__name__: f for f in (
    whole, too_short, without_zeros, at_once, nothing, bare, endless, alone, uneven, undealt, unnamed, overlong,
)}  # fmt: skip


class Wrong(Plain):
    """A sum in one of the wrong ways above."""

    name = "wrong"
    main = "way"
    tells = True

    way: str = "too_short"

    def bind(self):
        return FunctionCoder(FUNCTIONS[self.way])


class Unbound(Plain):
    """Gives no coder."""

    name = "unbound"

    def bind(self):
        return self


class Unworked(Plain):
    """Says bytes as a number."""

    name = "unworked"

    def work(self, shapes, itemsize, dp):
        return 17


class AlmostAll(Rounded):
    """Leaves a call of a few bytes out of what it declares."""

    name = "almost_all"

    def work(self, shapes, itemsize, dp):
        own = super().work(shapes, itemsize, dp)
        less = replace(own.calls[0], nbytes=own.calls[0].nbytes - 30)
        return replace(own, calls=(less, *own.calls[1:]))


class TooSure(Rounded):
    """Declares a smaller error than it has."""

    name = "too_sure"
    error = 1e-4

    def lost(self, dp):
        return 1e-4
