"""The command line: `unisono VERB [FILE] [--section.key value]`.

Data goes to stdout, progress and errors to stderr; `--json` puts exactly one object on stdout. This file is the one
place where exceptions become error blocks, `error.json` and exit codes. It imports the standard library and the words
of our errors alone, so that help and mistakes answer at once; each verb imports what it needs when it runs.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from unisono.spec.errors import Infeasible, Interrupted, UnisonoError, UsageError
from unisono.verbs._call import Call, Verb, one_object
from unisono.verbs._running import VERBS as RUNNING
from unisono.verbs.config import VERB as CONFIG

VERBS: Mapping[str, Verb] = {verb.name: verb for verb in (*RUNNING, CONFIG)}

EXAMPLES = """\
unisono train --demo                       train a small GPT on 4 processes, in about a minute
unisono train my.toml --plan "dp=2 pp=2"   train a recipe under a plan
unisono verify --demo --plan tp=2          prove a plan against one device
unisono report runs/demo/ID                draw where the time and the bytes went
unisono doctor                             look over this machine"""

CODES = """\
exit codes: 0 ok, 1 user code raised, 2 usage or configuration, 3 verify mismatch,
4 doctor found a fault, 5 out of memory, 6 hang, 75 saved: start me again, 130 Ctrl-C"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; nothing is raised."""
    call = Call(list(sys.argv[1:] if argv is None else argv), os.environ)
    try:
        code = _dispatch(call)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return _broken_pipe()
    except SystemExit as leaving:  # argparse leaves this way after --help
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:  # the last line of defence: whatever comes, the user sees one block
        try:
            return _failed(error, call)
        except BrokenPipeError:
            return _broken_pipe()


def _dispatch(call: Call) -> int:
    words = list(call.words)
    at = next((n for n, word in enumerate(words) if not word.startswith("-")), None)
    if at is None:
        return _no_verb(words)
    name = words.pop(at)
    if name not in VERBS:
        close = get_close_matches(name, VERBS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"unknown verb {name}{hint}", where="unisono", fix="unisono --help", code="C04")
    verb = VERBS[name]
    if "-h" in words or "--help" in words:
        verb.parser().print_help()
        return 0
    if not call.json:
        return _code(verb, verb.run(call, words))
    with contextlib.redirect_stdout(sys.stderr):  # whoever prints on the way must not spoil the one object
        result = verb.run(call, words)
    if result:
        print(one_object(result))
    return _code(verb, result)


def _code(verb: Verb, result: Mapping[str, Any] | None) -> int:
    failed = result is not None and (result.get("pass") is False or result.get("ok") is False)
    return verb.failed if failed else 0


def _no_verb(words: list[str]) -> int:
    if "--version" in words:
        from unisono import __version__

        print(f"unisono {__version__}")
    elif "-h" in words or "--help" in words:
        width = max(map(len, VERBS))
        rows = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
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


def _failed(error: BaseException, call: Call) -> int:
    """Draws the error as the last thing on stderr, and leaves it in the run folder and, with --json, on stdout."""
    known = as_known(error)
    if known.default_code == "X00":
        traceback.print_exception(error)
    with contextlib.suppress(OSError):
        _leave(known, call)
    if call.json and call.environ.get("RANK", "0") == "0":  # under torchrun all ranks share one stdout
        print(one_object(known.as_dict()), flush=True)
    print(known.render(), file=sys.stderr, flush=True)
    return known.exit


def as_known(error: BaseException) -> UnisonoError:
    """The error of ours that stands for any exception."""
    match error:
        case UnisonoError():
            return error
        case KeyboardInterrupt():
            return Interrupted("stopped by Ctrl-C")
        case MemoryError():
            return Infeasible("out of memory", fix="a smaller micro_batch, recompute=full or more shards")
        case ModuleNotFoundError() if error.name and not error.name.startswith("unisono"):
            fix = f"make setup, or pip install {error.name}"
            return UsageError(
                f"the module {error.name} is not installed", where="this Python", fix=fix, code="E01"
            )
        case OSError() if error.filename is not None and not isinstance(error, BlockingIOError):
            what = f"{error.strerror or type(error).__name__}: {error.filename}"
            return UsageError(
                what, where=str(error.filename), fix="check the path, its rights and the disk", code="E02"
            )
        case _:
            what = f"{type(error).__name__}: {error}"
            return UnisonoError(what, likely="a fault of unisono itself; the traceback above says where")


def _leave(error: UnisonoError, call: Call) -> None:
    """Writes `error.json` into the run folder, where there is one and its owner has not done so."""
    folder = getattr(error, "run_dir", None) or call.options.get("run_dir")
    if not folder or not Path(folder).is_dir():
        return
    target = Path(folder, "error.json")
    aside = target.with_name(f".error.json.{os.getpid()}")
    try:
        with open(aside, "w", encoding="utf-8") as out:
            json.dump(error.as_dict(), out, indent=2)
            out.write("\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(aside, target)
    finally:  # a full disk leaves the error on the screen alone, and no half of it here
        aside.unlink(missing_ok=True)


def _broken_pipe() -> int:
    """The reader has left (`| head`): no words about it, and nothing more to flush at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
