"""Keys and masks of secure aggregation, by the library `cryptography`: X25519, HKDF, ChaCha20 and Poly1305."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unisono.spec.errors import UsageError
from unisono_contrib.privacy.stream import keystream

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

KEY_BYTES = 32


def require_library() -> None:
    """Raises UsageError E01 where `cryptography` is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "the library cryptography is not installed",
            where="federated.secure",
            likely="secure aggregation agrees on keys by X25519",
            fix='pip install "unisono[federated]"',
            code="E01",
        ) from error


def new_key() -> "X25519PrivateKey":
    """A private key, drawn by the operating system."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate()


def key_of(raw: bytes) -> "X25519PrivateKey":
    """The private key of these 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(raw)


def agreed(private: "X25519PrivateKey", public: bytes, purpose: bytes) -> bytes:
    """32 bytes that both ends of a pair of keys know, and nobody else. purpose: what they are for; another purpose
    gives others. Raises UsageError A03 for a public key that is none."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        what = "a public key of secure aggregation is not a point of Curve25519, or has a low order"
        raise UsageError(what, where="federated.secure", fix="leave its client out", code="A03") from error
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=b"unisono " + purpose).derive(shared)


def mask(seed: bytes, size: int) -> NDArray[np.uint64]:
    """Uniform integers modulo 2^64, uint64 [size], that follow from 32 bytes. A seed is used once."""
    return np.frombuffer(keystream(seed, 8 * size), dtype="<u8").astype(np.uint64, copy=False)


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate. A key seals one text, so its nonce may be zero. about: authenticated beside it."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(bytes(12), text, about)


def opened(key: bytes, body: bytes, about: bytes) -> bytes:
    """What was sealed. Raises UsageError A03 where somebody has changed it."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), body, about)
    except InvalidTag as error:
        what = "a share of secure aggregation was changed on its way, or is of another round"
        raise UsageError(
            what, where="federated.secure", fix="leave its sender out of the round", code="A03"
        ) from error
