"""Pickles that mean harm: programs for Python's own machine, and files of `torch.save` that hold them."""

import io
import random
import struct
import zipfile
from functools import cache

import torch

from tests.security.mutate import JUNK, bytes_changed

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "a.bias": torch.ones(3, dtype=torch.bfloat16),
    "n": torch.tensor(3),
}
HARMFUL = (
    "os system", "posix system", "nt system", "subprocess Popen", "builtins eval", "builtins exec", "builtins getattr", "builtins __import__",
    "__builtin__ eval", "builtins compile", "builtins open", "builtins object", "runpy run_path", "importlib import_module", "pickle loads",
    "_pickle loads", "marshal loads", "types FunctionType", "types CodeType", "operator attrgetter", "operator methodcaller", "functools partial",
    "functools reduce", "codecs decode", "_codecs encode", "copyreg _reconstructor", "collections OrderedDict", "collections defaultdict",
    "torch load", "torch.hub load", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch.serialization os.system",
    "torch Tensor", "torch float32", "torch FloatStorage", "torch.jit load", "torch Size", "numpy.core.multiarray _reconstruct", "numpy load",
    "pip main", "canary Own", "unisono.cli main", "site main", "ctypes CDLL", "shutil rmtree", "pathlib Path", "socket socket", "sys exit",
    "builtins list", "builtins set", "builtins dict", "builtins range", "builtins bytearray", "builtins int", "builtins slice",
)  # fmt: skip


def _named(name: str) -> bytes:
    module, _, attribute = name.partition(" ")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def _number(value: int) -> bytes:
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return (
        b"\x8a" + bytes([len(data)]) + data
        if len(data) < 256
        else b"\x8b" + struct.pack("<I", len(data)) + data
    )


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _call(name: str, *given: bytes) -> bytes:
    return _named(name) + b"(" + b"".join(given) + b"tR"


STORAGE = (
    b"(" + _text("storage") + _named("torch FloatStorage") + _text("0") + _text("cpu") + _number(6) + b"tQ"
)


def _tensor(order: random.Random) -> bytes:
    sizes = [order.choice((0, 1, 2, 3, 6, -1, 1 << 40, 1 << 63, 10**30)) for _ in range(order.randint(0, 4))]
    steps = [order.choice((0, 1, 2, 3, -1, 1 << 62)) for _ in sizes]
    shape, strides = (b"(" + b"".join(map(_number, part)) + b"t" for part in (sizes, steps))
    offset = order.choice((0, 0, 1, 5, 6, -1, 1 << 62))
    return _call(
        "torch._utils _rebuild_tensor_v2",
        STORAGE,
        _number(offset),
        shape,
        strides,
        b"\x89",
        _call("collections OrderedDict"),
    )


def called(name: str, word: str) -> bytes:
    """A pickle that calls one thing with one word."""
    return b"\x80\x02" + _call(name, _text(word)) + b"."


def _bombs(order: random.Random) -> bytes:
    """Small programs that take a lot: of memory, of time, of the stack."""
    n = order.choice((1 << 20, 1 << 26, (1 << 31) - 1))
    return order.choice((
        lambda: b"Nr" + struct.pack("<I", 0xFFFFFFF0),
        lambda: b"Np" + str(n).encode() + b"\n",
        lambda: b"\x8e" + struct.pack("<Q", 1 << 40),
        lambda: b"\x96" + struct.pack("<Q", order.choice((1 << 33, 1 << 40, (1 << 63) - 1))),
        lambda: b"\x95" + struct.pack("<Q", 1 << 50),
        lambda: b"B" + struct.pack("<I", 0x7FFFFFFF),
        lambda: _call("builtins list", _call("builtins range", _number(n))),
        lambda: _call("builtins set", _call("builtins range", _number(n))),
        lambda: _call("builtins list", _call("builtins bytearray", _number(n))),
        lambda: _call("builtins bytearray", _number(n * 64)),
        lambda: b"N" + b"\x85" * 200_000,
        lambda: b"}" + b"N" + b"\x85" * 200_000 + b"Ns",
        lambda: b"\x8f(" + b"N" + b"\x85" * 200_000 + b"\x90",
        lambda: b"(N" + b"\x85" * 200_000 + b"\x91",
        lambda: b"}q\x00" + _text("a") + b"h\x00s",  # a dictionary that holds itself
        lambda: b"}q\x00" + b"".join(b"}(" + _text("a") + b"h" + bytes([i]) + _text("b") + b"h" + bytes([i]) + b"uq" + bytes([i + 1]) for i in range(60)),
        lambda: b"]q\x00(" + b"N" * 50_000 + b"e" + (_named("builtins list") + b"h\x00\x85R") * 3000,
        lambda: b"}(" + b"".join(_number(i * ((1 << 61) - 1)) + b"N" for i in range(1, 30_000)) + b"u",
        lambda: b"".join(_named(f"made.up{i} Name{i}") for i in range(30_000)),
        lambda: b"(" * 300_000,
        lambda: b"\x8b" + struct.pack("<i", 0x7FFFFFFF),
        lambda: b"I" + b"9" * 200_000 + b"\n",
        lambda: _number(1 << 2000),
        lambda: nested(order),
        lambda: again_and_again(order),
    ))()  # fmt: skip


def nested(order: random.Random) -> bytes:
    """Tuples, lists or dictionaries within each other, each there many times: few bytes, and a tree without end. It is
    a key, a part of one, a tensor's size, or what holds the weights."""
    wide, deep = order.choice((2, 10, 63, 64)), order.choice((2, 5, 8, 40))
    inner = order.choice((b"N", _number(7), _text("a"), _number(1 << 60), b")", _tensor(order)))
    kind = order.choice("tld")
    made = inner + b"q\x000"
    for level in range(deep):
        again = b"h" + bytes([level])
        if kind == "d":
            made += b"}(" + b"".join(_text(chr(97 + i)) + again for i in range(min(wide, 20))) + b"u"
        else:
            made += b"(" + again * wide + (b"t" if kind == "t" else b"l")
        made += b"q" + bytes([level + 1]) + b"0"
    top = b"h" + bytes([deep])
    made += top
    return order.choice((
        made, b"}" + made + b"Ns", b"}" + made + b"Ns}" + (top + b"Ns") * 20, b"\x8f(" + made + b"\x90", b"(" + made + b"\x91",
        _named("builtins frozenset") + b"(" + made + b"l\x85R", _named("collections OrderedDict") + b"(" + made + b"N\x86l\x85R",
        _named("torch Size") + made + b"\x85R", _call("torch._utils _rebuild_tensor_v2", STORAGE, _number(0), made, b")"),
    ))  # fmt: skip


def again_and_again(order: random.Random) -> bytes:
    """One thing that is long, and again and again a few bytes that ask for all of it."""
    times = order.choice((100, 30_000))
    long, short = order.choice((
        (_text("9" * 400_000), _named("builtins int") + b"h\x00\x85R0"),
        (_text("9" * 400_000), _named("builtins float") + b"h\x00\x85R0"),
        (_text("k" * 400_000), b"}h\x00Ns0"),
        (_text("k" * 400_000) + b"0" + _text("k" * 400_000) + b"q\x000}" + _text("k" * 400_000) + b"Ns", b"h\x00Ns"),
        (_text("k" * 400_000), b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nh\x00X\x03\x00\x00\x00cpuK\x06tQ0"),
        (b"(" + b"N" * 100_000 + b"t", b"cmade\nup\nh\x00R0"),
        (b"(" + b"N" * 100_000 + b"t", b"cmade\nup\nh\x00R"),
        (b"(" + _number(1 << 2000) * 200 + b"t", b"ctorch\nSize\nh\x00\x85R0"),
        (_text("m" * 100_000), b"h\x00h\x00\x930"),
    ))  # fmt: skip
    return b"}" + long + b"q\x000" + short * times


def snippet(order: random.Random) -> bytes:
    """One value, however it came to be."""
    name = order.choice(HARMFUL)
    return order.choice((
        lambda: _call(name, _text("touch canary")),
        lambda: _call(name, _text("import pathlib; pathlib.Path('canary').touch()")),
        lambda: _call(name, _text("os"), _text("system")),
        lambda: _named(name),
        lambda: _named(name) + b"}" + _text("__code__") + _text("x") + b"sb",
        lambda: _named(name) + b"N}" + _text("__defaults__") + b")s\x86b",
        lambda: _named(name) + b")\x81",
        lambda: _named(name) + b")}\x92",
        lambda: b"(" + _text("touch canary") + b"i" + name.replace(" ", "\n").encode() + b"\n",
        lambda: b"(" + _named(name) + _text("touch canary") + b"o",
        lambda: _text(name.split()[0]) + _text(name.split()[1]) + b"\x93" + b"(" + _text("touch canary") + b"tR",
        lambda: b"\x82\x01" + b"(" + _text("touch canary") + b"tR",
        lambda: _tensor(order),
        lambda: _tensor(order) + b"(" + STORAGE + _number(0) + b"(" + _number(1 << 40) + b"t(" + _number(1) + b"ttb",
        lambda: _tensor(order) + b"(\x88NNtb",
        lambda: _tensor(order) + b"(" + _number(1) + b"e",
        lambda: STORAGE,
        lambda: b"Pelsewhere\n",
        lambda: _bombs(order),
        lambda: b"N", lambda: b"}", lambda: b"]", lambda: b")", lambda: _number(order.choice((0, -1, 1 << 70))), lambda: _text(order.choice(JUNK)),
    ))()  # fmt: skip


def program(order: random.Random) -> bytes:
    """A pickle as a dictionary of weights, among whose values are such."""
    items = [(_text(f"w{i}"), snippet(order)) for i in range(order.randint(1, 3))]
    inside = b"}(" + b"".join(key + value for key, value in items) + b"u"
    whole = order.choice((inside, b"}(" + _text("state_dict") + inside + b"u", items[0][1]))
    return bytes([0x80, order.choice((2, 2, 2, 4, 5))]) + whole + b"."


@cache
def good_file() -> tuple[bytes, dict[str, bytes]]:
    out = io.BytesIO()
    torch.save({"state_dict": TENSORS, "epoch": 3, "hyper": {"lr": 0.1}}, out)
    with zipfile.ZipFile(out) as archive:
        return out.getvalue(), {name: archive.read(name) for name in archive.namelist()}


def _zipped(parts: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return out.getvalue()


def torch_file(order: random.Random) -> bytes:
    """A file of torch.save whose pickle, or zip, is not as it was."""
    whole, parts = good_file()
    pickled = next(name for name in parts if name.endswith("data.pkl"))
    match order.randrange(10):
        case 0:
            return bytes_changed(whole, order)
        case 1:
            return _zipped({**parts, pickled: bytes_changed(parts[pickled], order)})
        case 2:
            good = parts[pickled]
            at = order.randrange(2, len(good))
            return _zipped({**parts, pickled: good[:at] + snippet(order) + good[at:]})
        case 3:
            bomb = _zipped(
                {
                    **parts,
                    pickled: parts[pickled][:-1] + b"0" + b"N0" * order.choice((9, 40_000_000)) + b"N.",
                },
                zipfile.ZIP_DEFLATED,
            )
            return bomb if order.random() < 0.1 else _zipped(parts, zipfile.ZIP_DEFLATED)
        case 4:
            name = order.choice(list(parts))
            changed = {
                n: order.randbytes(order.choice((0, 3, 24))) if n == name else d for n, d in parts.items()
            }
            return _zipped(changed if order.random() < 0.5 else {n: d for n, d in parts.items() if n != name})
        case _:
            return _zipped({**parts, pickled: program(order)})
