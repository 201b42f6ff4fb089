"""What a run folder must not tell: words of a command, and variables, that are secret by their names."""

import re
from collections.abc import Sequence

_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")
_FLAG = re.compile(r"(?<![A-Z])(TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL)S?(?![A-Z])")
_PASSWORD = re.compile(r"(?<!\w)(\w+://[^/\s:@]+:)[^/\s@]+@")


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command's words with `***` for what its flag's name says is secret: `--hf-token=***`, `--key ***`; and for the
    password in an address."""
    shown, hide = [], False
    for word in words:
        flag, equals, value = word.partition("=")
        secret = _FLAG.search(flag.upper()) is not None
        if hide or (secret and equals and value):
            shown.append("***" if hide else f"{flag}=***")
        else:
            shown.append(_PASSWORD.sub(r"\1***@", word))
        hide = secret and not equals and flag.startswith("-")
    return shown


def is_secret(name: str) -> bool:
    """Whether a variable of this name may hold a secret; rather one too many, since it is only left out."""
    return any(word in name.upper() for word in _SECRET)
