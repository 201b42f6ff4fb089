"""Random numbers by key: their distribution, what they depend on, and keys that are refused."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

from unisono.spec.errors import UsageError
from unisono_contrib.privacy.stream import key_of_seed, keystream, normals, secret_of, uniforms

pytest.importorskip("cryptography", reason="the extra `privacy` is not installed")
KEY = key_of_seed(1)


def test_the_stream_is_chacha20s() -> None:
    """RFC 8439, appendix A.1, test vector 1: key, nonce and counter of zeros."""
    assert keystream(bytes(32), 8).hex() == "76b8e0ada0f13d90"


def test_normal_numbers_are_normal() -> None:
    x = normals(KEY, "noise", 0, "w", 200_001)
    assert len(x) == 200_001 and np.isfinite(x).all() and np.abs(x).max() < 8.7
    assert abs(x.mean()) < 0.01 and x.std() == pytest.approx(1.0, abs=0.01)
    for z, share in ((1.0, 0.841345), (2.0, 0.977250), (3.0, 0.998650)):
        assert (x < z).mean() == pytest.approx(share, abs=0.004)
    assert abs(np.corrcoef(x[:100_000], x[100_001:])[0, 1]) < 0.015


def test_numbers_follow_from_all_that_names_them() -> None:
    base = ("noise", 3, "w")
    others = [
        ("client", 3, "w"),
        ("noise", 4, "w"),
        ("noise", 3, "v"),
        ("noise", 3, "w\0"),
        ("noise\x003", 3, "w"),
    ]
    first = uniforms(KEY, *base, 4).tolist()
    assert first == uniforms(KEY, *base, 8)[:4].tolist()
    assert all(uniforms(KEY, *other, 4).tolist() != first for other in others)
    assert uniforms(key_of_seed(2), *base, 4).tolist() != first
    assert len({key_of_seed(seed) for seed in (-1, 0, 1, 2**63 - 1)}) == 4


def test_a_key_comes_from_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(UsageError, match="cannot be read"):
        secret_of(str(path), 0)
    path.write_bytes(bytes(range(31)))
    path.chmod(0o600)
    with pytest.raises(UsageError, match="31 bytes, not 32"):
        secret_of(str(path), 0)
    path.write_bytes(bytes(range(32)))
    assert secret_of(str(path), 0) == secret_of(str(path), 9) == bytes(range(32))
    assert secret_of(None, 5) == key_of_seed(5)
    if os.name == "posix":
        path.chmod(0o644)
        with pytest.raises(UsageError, match="others may read"):
            secret_of(str(path), 0)


def test_no_number_of_a_stream_is_infinite() -> None:
    """log(0) is not asked for: uniforms of the radius are above 0."""
    assert math.sqrt(-2.0 * math.log(2.0**-53)) < 8.6
