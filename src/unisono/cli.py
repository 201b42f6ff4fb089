"""The command line: `unisono VERB [FILE] [--section.key value]`.

Data goes to stdout, progress and errors to stderr; `--json` puts exactly one object on stdout. This file is the one
place where exceptions become error blocks, `error.json` and exit codes. It imports the standard library and the words
of our errors alone, so that help and mistakes answer at once; each verb imports what it needs when it runs.
"""

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.observe.files import write_whole
from unisono.observe.metrics import plain
from unisono.observe.private import without_secrets
from unisono.spec.errors import UnisonoError, UsageError
from unisono.spec.frames import known
from unisono.spec.paths import FOREIGN, RENAMED, bytes_of, foreign
from unisono.spec.settings import Settings, answer, open_streams, silence, tell
from unisono.spec.words import meant
from unisono.verbs import VERBS, Verb

EXAMPLES = """\
unisono train --demo                       train a small GPT on 4 processes; ends with a report
unisono train my.toml --plan "dp=2 pp=2"   train a recipe under a plan
unisono verify --demo --plan tp=2          prove a plan against one device
unisono report runs/demo/ID                draw where the time and the bytes went
unisono doctor                             look over this machine"""

CODES = """\
exit codes: 0 ok, 1 user code raised, 2 usage or configuration, 3 verify mismatch,
4 doctor found a fault, 5 out of memory, 6 hang, 75 saved: start me again,
77 skipped: what it takes is not here, 130 Ctrl-C, 128+n killed by signal n"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; nothing is raised."""
    if argv is None:
        _speak_utf8()
    open_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    ours = _ours(words)
    settings = Settings(
        json="--json" in ours, quiet="--quiet" in ours, color=_color(ours), dry_run="--dry-run" in ours,
        command=shlex.join(["unisono", *without_secrets(words)]), is_program=argv is None,
    )  # fmt: skip
    try:
        return _dispatch(words, settings)
    except BrokenPipeError:
        return _broken_pipe()
    except SystemExit as leaving:  # argparse leaves this way after --help
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:  # the last line of defence: whatever comes, the user sees one block
        return _failed(error, settings)


def _speak_utf8() -> None:
    """Begin again in Python's UTF-8 mode where the locale's names of files are of another kind (`LC_ALL=C` without
    Python's own remedies): recipes and what a run writes are UTF-8. What this process starts does the same."""
    if sys.getfilesystemencoding() != "utf-8":
        environ = {**os.environ, "PYTHONUTF8": "1"}
        os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], environ)


def _ours(words: Sequence[str]) -> Sequence[str]:
    """Our words: those behind `--` are a command of the user's."""
    return words[: words.index("--")] if "--" in words else words


def _color(words: Sequence[str]) -> bool:
    """Whether progress may be coloured: a terminal, and nobody against it."""
    refused = "--no-color" in words or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not refused and sys.stderr.isatty()


def _dispatch(words: list[str], settings: Settings) -> int:
    for word in words:
        if foreign(word):
            raise UsageError(
                f"{bytes_of(word)!r} {FOREIGN}", where=f"unisono {words[0]}", fix=RENAMED, code="C02"
            )
    at = next((n for n, word in enumerate(words) if not word.startswith("-")), None)
    if at is None:
        return _no_verb(words)
    name, rest = words[at], words[:at] + words[at + 1 :]
    if name in ("help", "version") and name not in VERBS.names():  # as other programs have them
        return _dispatch([*rest, f"--{name}"], settings)
    asks_help = "-h" in _ours(rest) or "--help" in _ours(rest)
    verb = _verb(name)()
    if asks_help:
        print(verb.help(_ours(rest)), end="")
        return 0
    # With --json, what prints on the way must not spoil the one object.
    with contextlib.redirect_stdout(sys.stderr) if settings.json else contextlib.nullcontext():
        result = verb.run(verb.read(rest, settings, os.environ))
    if result and settings.json:
        answer(one_object(result))
    return verb.code(result)


def _verb(name: str) -> type[Verb]:
    if name not in VERBS.names() and ".py:" not in name:
        hint = meant(name, VERBS.names())
        raise UsageError(f"unknown verb {name}{hint}", where="unisono", fix="unisono --help", code="C04")
    return VERBS.find(name)


def summaries() -> dict[str, str]:
    """All verbs and what each does, in a line."""
    return {name: VERBS.find(name).summary() for name in VERBS.names()}


def _no_verb(words: list[str]) -> int:
    if {"--version", "-V"} & set(words):
        from unisono import __version__

        print(f"unisono {__version__}")
    elif "-h" in words or "--help" in words:
        known = summaries()
        rows = "\n".join(f"  {name:<{max(map(len, known))}}  {about}" for name, about in known.items())
        print(
            "usage: unisono VERB [FILE] [--section.key value] [--json] [--quiet] [--no-color] [--dry-run]\n"
        )
        print(
            f"Trains deep-learning models on many devices, computing what one device would compute.\n\n{rows}\n"
        )
        print(f"{EXAMPLES}\n\nmore on a verb: unisono VERB --help\n{CODES}")
    elif words:
        raise UsageError(
            f"{words[0]} stands without a verb", where="unisono", fix="unisono --help", code="C04"
        )
    else:
        print(EXAMPLES)
    return 0


def _failed(error: BaseException, settings: Settings) -> int:
    """Draws the error as the last thing on stderr, and leaves it in the run folder and, with --json, on stdout."""
    known_error = known(error)
    if known_error.shown:
        tell(known_error.shown)
    run_dir = getattr(error, "run_dir", None)  # of the run that it ended
    if run_dir is not None and Path(run_dir).is_dir():
        with contextlib.suppress(OSError):  # a full disk leaves the error on the screen alone
            write_whole(Path(run_dir, "error.json"), json.dumps(known_error.as_dict(), indent=2) + "\n")
    if settings.json and os.environ.get("RANK", "0") == "0":  # under torchrun all ranks share one stdout
        with contextlib.suppress(OSError, UnisonoError):  # this error is the one to tell
            answer(one_object(known_error.as_dict()))
    tell(known_error.render())
    return known_error.exit


def one_object(result: Mapping[str, Any]) -> str:
    """The line that `--json` prints; numbers that JSON has no word for become null."""
    return json.dumps(plain({"schema_version": 1, **result}), allow_nan=False)


def _broken_pipe() -> int:
    """The reader has left (`| head`): no words about it, and nothing more to flush at exit."""
    silence(sys.stdout)
    return 141
