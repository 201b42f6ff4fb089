"""The secret that ranks and data hosts share, the index of shards that a host lends to who knows it, and what is wrong
with a host. No torch before a host is called."""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from unisono.spec.errors import UsageError
from unisono.spec.paths import at_home

if TYPE_CHECKING:
    from unisono.config import DataConfig

PATIENCE = 15.0
"""Seconds for which a host may say nothing."""


def secret_path(data: "DataConfig") -> str:
    """The file that has the secret."""
    return data.hosts_token or str(Path(data.cache) / "hosts.token")


def token_at(file: str, makes: bool = False) -> bytes:
    """The secret that ranks and hosts share. makes: a new one where there is none. Raises UsageError D20."""
    path = at_home(file)
    try:
        if makes:
            _make(path)
        token = path.read_bytes().strip()
    except OSError as error:
        raise _misfit(
            f"the secret of data hosts cannot be read: {error.strerror}", str(path),
            "data.hosts_token = FILE, a copy of hosts.token in data.cache of a data host",
        ) from error  # fmt: skip
    if len(token) < 16:
        raise _misfit(f"a secret of {len(token)} letters", str(path), "a file with 16 letters or more")
    return token


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(aside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(aside, path)  # of two that make one, the first counts
    except FileExistsError:
        pass
    finally:
        aside.unlink()


def differing(where: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> UsageError | None:
    """The error for a host of other data; None where it is the same."""
    odd = [f"{key} {theirs.get(key)}, not {ours[key]}" for key in ours if theirs.get(key) != ours[key]]
    if not odd:
        return None
    return _misfit(
        f"a data host has other data: {'; '.join(odd)}", where, "the same recipe and shards on all of them"
    )


def stranger(where: str) -> UsageError:
    """The error for a host that has another secret."""
    return _misfit(
        "a data host does not know the secret",
        where,
        "data.hosts_token = FILE, the same text on ranks and data hosts",
    )


def _misfit(what: str, where: str, fix: str) -> UsageError:
    return UsageError(what, code="D20", where=where, fix=fix)


@dataclass(frozen=True, slots=True)
class IndexLenders:
    """Hosts that may have indexed a shard. secret: the file that has it."""

    hosts: Sequence[str] = ()
    secret: str = ""

    def lend(self, key: Mapping[str, Any], out: Path) -> Mapping[str, Any] | None:
        """Write the files of an index, as `cache.kept` knows it by this key, into a folder; what is said of it. None
        where no host has it. Raises UsageError D20 for a host with another secret."""
        if not self.hosts:
            return None
        from multiprocessing import AuthenticationError

        from unisono_contrib.sync._servers import wire

        token, first = token_at(self.secret), crc32(str(key).encode()) % len(self.hosts)
        for where in (*self.hosts[first:], *self.hosts[:first]):
            address, _, port = where.rpartition(":")
            try:
                with wire.call(address.strip("[]"), int(port), token, {}, PATIENCE) as connection:
                    connection.recv_bytes()  # what data it has
                    connection.send_bytes(wire.packed({"index": key}))
                    said, bodies = wire.unpacked(connection.recv_bytes())
            except AuthenticationError:
                raise stranger(where) from None
            except (OSError, EOFError, ValueError):
                continue
            if said.get("meta") is not None:
                for name, body in zip(said["files"], bodies, strict=True):
                    (out / Path(name).name).write_bytes(b"" if body is None else body.numpy().tobytes())
                return said["meta"]
        return None
