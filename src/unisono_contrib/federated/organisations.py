"""Who may take part from elsewhere: organisations with a token each, and the clients that each of them has.

    [milan]
    token = "a long text that nobody guesses"
    clients = "0-24"

A file of them belongs to who runs the server; each organisation knows its own token alone.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unisono.spec.doubtful import TEXT, read_text, toml_of
from unisono.spec.errors import UsageError

_SHORTEST = 16
"""Letters of a token, fewer of which can be guessed."""


@dataclass(frozen=True, slots=True)
class Organisation:
    """One that may take part. clients: that it may have; None: any."""

    name: str
    token: str = field(repr=False)
    clients: frozenset[int] | None = None


def organisations_in(path: str) -> Mapping[str, Organisation]:
    """By name. Raises UsageError C03 where there is no such file, C02 for what is wrong in it."""
    try:
        table = toml_of(read_text(path, TEXT))
    except FileNotFoundError as error:
        raise UsageError(
            f"no such file: {path}", where="--tokens", fix="check the path", code="C03"
        ) from error
    except (OSError, ValueError) as error:
        raise _wrong(path, str(error)) from error
    known: dict[str, Organisation] = {}
    for name, row in table.items():
        if (
            not isinstance(row, dict)
            or not isinstance(row.get("token"), str)
            or row.keys() - {"token", "clients"}
        ):
            raise _wrong(path, f"[{name}] has a token, and perhaps clients")
        if len(row["token"]) < _SHORTEST:
            raise _wrong(
                path,
                f"the token of [{name}] has {len(row['token'])} letters, {_SHORTEST} at least are wanted",
            )
        clients = frozenset(numbers_in(str(row["clients"]), path)) if "clients" in row else None
        known[name] = Organisation(name, row["token"], clients)
    if not known:
        raise _wrong(path, "it names no organisation")
    return known


def numbers_in(text: str, where: str) -> list[int]:
    """`0-3,7` is [0, 1, 2, 3, 7]. Raises UsageError C02."""
    try:
        pairs = [part.partition("-") for part in text.split(",")]
        ranges = [range(int(first), int(last if dash else first) + 1) for first, dash, last in pairs]
    except ValueError as error:
        raise UsageError(
            f"{text!r} names no clients", where=where, fix="0-24, or 3,7,12", code="C02"
        ) from error
    numbers = [number for each in ranges for number in each]
    if not numbers:
        raise UsageError(f"{text!r} names no clients", where=where, fix="0-24, or 3,7,12", code="C02")
    return sorted(set(numbers))


def token_in(path: str) -> str:
    """An organisation's own token: the only line of a file. Raises UsageError C03."""
    try:
        return read_text(path, TEXT).strip()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path}: {error}", where="--token", fix="check the path", code="C03"
        ) from error


def server_tls(certificate: str, key: str) -> ssl.SSLContext:
    """TLS 1.3 with a server's certificate and key, PEM files. Raises UsageError L12."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise _no_tls(f"{certificate} and {key} are no certificate and its key: {error}") from error
    return context


def client_tls(authority: str) -> ssl.SSLContext:
    """TLS 1.3 towards a server whose certificate this authority has signed, or which is that certificate: a PEM file.
    The server's name is checked. Raises UsageError L12."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cafile=Path(authority))
    except (OSError, ssl.SSLError) as error:
        raise _no_tls(f"{authority} is no certificate: {error}") from error
    return context


def _no_tls(what: str) -> UsageError:
    return UsageError(what, where="--certificate, --key, --authority", fix="PEM files, as openssl writes them",
                      code="L12")  # fmt: skip


def _wrong(path: str, what: str) -> UsageError:
    fix = '[milan] with token = "…" of 16 letters or more, and clients = "0-24"'
    return UsageError(f"{path}: {what}", where="--tokens", fix=fix, code="C02")
