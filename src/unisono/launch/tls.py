"""TLS around links between hosts: a certificate of the run's own, which hosts know by its hash. No torch.

Nobody signs it and nobody has to: its hash stands beside the token in the run's door, and a host that is shown another
one hangs up.
"""

import hashlib
import hmac
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from unisono.spec.errors import UsageError

_DAYS = "30"


def certificate() -> tuple[ssl.SSLContext, str]:
    """A new certificate with its key, for who is called, and the hash of it. Raises UsageError U-L12 where there is no
    openssl to make one."""
    if shutil.which("openssl") is None:
        raise _none("a certificate is made by openssl, which is not here")
    with TemporaryDirectory(prefix="unisono-tls-") as folder:  # its owner's alone
        key, cert = Path(folder, "key.pem"), Path(folder, "cert.pem")
        process = subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-keyout", key, "-out", cert, "-days", _DAYS, "-subj", "/CN=unisono"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if process.returncode:
            last = (process.stderr.strip() or "no word").splitlines()[-1]
            raise _none(f"openssl makes no certificate: {last}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(cert, key)
        return context, _hash(ssl.PEM_cert_to_DER_cert(cert.read_text()))


def called(sock: socket.socket, known: str) -> ssl.SSLSocket:
    """TLS over a connection to who holds the certificate of this hash. Raises ConnectionError, OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the hash says more than a name
    wrapped = context.wrap_socket(sock)
    shown = wrapped.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(_hash(shown), known):
        wrapped.close()
        raise ConnectionError("who answers there shows another certificate than the run's")
    return wrapped


def _none(what: str) -> UsageError:
    fix = "another openssl, or launch.tls = false in a network that you trust"
    return UsageError(what, where="launch.tls", fix=fix, code="L12")


def _hash(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()
