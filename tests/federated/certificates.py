"""A certificate authority and a server's certificate, made for one test."""

import datetime
import ipaddress
from pathlib import Path

import pytest


def written(folder: Path, name: str = "127.0.0.1") -> tuple[str, str, str]:
    """(the authority's certificate, the server's, its key): PEM files."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)

    def signed(subject, issuer, key, by, *extensions):
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(by, hashes.SHA256())

    def named(text: str):
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    root = signed(
        named("authority"), named("authority"), root_key, root_key,
        (x509.BasicConstraints(ca=True, path_length=None), True), (usage, True),
        (x509.SubjectKeyIdentifier.from_public_key(root_key.public_key()), False),
    )  # fmt: skip
    server = signed(
        named("server"), named("authority"), key, root_key,
        (x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(name))]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key()), False),
    )  # fmt: skip
    files = [folder / part for part in ("authority.pem", "server.pem", "key.pem")]
    pem = serialization.Encoding.PEM
    files[0].write_bytes(root.public_bytes(pem))
    files[1].write_bytes(server.public_bytes(pem))
    files[2].write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(files[0]), str(files[1]), str(files[2])
