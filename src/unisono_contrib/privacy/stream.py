"""Random numbers that nobody can guess, and that who has the key can draw again: ChaCha20 by `cryptography`.

torch's and NumPy's generators are predicted from a few of their outputs, and their state is global. A number here is a
function of (key, purpose, round, name): of no process, no rank and no order of calls.
"""

import os
import stat
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono.spec.errors import UsageError

KEY_BYTES = 32


def key_of_seed(seed: int) -> bytes:
    """A key that follows from a recipe's seed, for proofs and trials. Whoever knows the seed can subtract the noise."""
    return blake2b(
        seed.to_bytes(16, "little", signed=True), digest_size=KEY_BYTES, person=b"unisono-seed"
    ).digest()


def key_of_file(path: Path) -> bytes:
    """The key in a file of 32 bytes, made by `head -c 32 /dev/urandom > KEY`. Raises UsageError C03 where there is none
    or where others may read it."""
    fix = f"head -c {KEY_BYTES} /dev/urandom > {path}; chmod 600 {path}"
    try:
        mode, key = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        what = f"the key {path} cannot be read: {error.strerror}"
        raise UsageError(what, where="privacy.key", fix=fix, code="C03") from error
    if len(key) != KEY_BYTES:
        what = f"the key {path} has {len(key)} bytes, not {KEY_BYTES}"
        raise UsageError(what, where="privacy.key", fix=fix, code="C03")
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        what = f"others may read the key {path}, and with it subtract the noise"
        raise UsageError(what, where="privacy.key", fix=f"chmod 600 {path}", code="C03")
    return key


def secret_of(path: str | None, seed: int) -> bytes:
    """The key of all noise: of the file that `[privacy] key` names, or of the seed. Raises UsageError C03."""
    return key_of_seed(seed) if path is None else key_of_file(Path(path))


def uniforms(key: bytes, purpose: str, number: int, name: str, count: int) -> "NDArray[np.uint64]":
    """Uniform integers below 2^64, [count]. number: of the round or step. Raises UsageError E01 without
    `cryptography`."""
    label = b"\0".join((purpose.encode(), str(number).encode(), name.encode()))
    stream_key = blake2b(label, key=key, digest_size=KEY_BYTES).digest()
    return np.frombuffer(keystream(stream_key, 8 * count), dtype="<u8").astype(np.uint64, copy=False)


def normals(key: bytes, purpose: str, number: int, name: str, count: int) -> "NDArray[np.float64]":
    """Standard normal numbers, float64 [count], by Box and Muller (1958); none is beyond 8.6."""
    pairs = (count + 1) // 2
    drawn = (uniforms(key, purpose, number, name, 2 * pairs) >> np.uint64(11)).astype(np.float64)
    radius = np.sqrt(-2.0 * np.log((drawn[:pairs] + 1.0) * 2.0**-53))
    angle = (2.0 * np.pi * 2.0**-53) * drawn[pairs:]
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:count]


def keystream(key: bytes, size: int) -> bytes:
    """The first `size` bytes of ChaCha20's stream under a key of 32 bytes. Raises UsageError E01 where `cryptography`
    is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ImportError as error:
        raise UsageError(
            "the library cryptography is not installed",
            where="privacy",
            likely="noise for privacy is drawn by ChaCha20, since other generators can be predicted",
            fix='pip install "unisono[privacy]"',
            code="E01",
        ) from error
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))
