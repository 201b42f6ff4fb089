"""Shell scripts that carry their recipes: what was submitted is what runs, whatever becomes of the file. No torch."""

import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence

from unisono.spec.errors import UsageError
from unisono_contrib.submit.job import JobRequest

_END = "END_OF_RECIPE"


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines that set variables."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def command(module: Sequence[str], python: str = "") -> str:
    """`python -m MODULE ...`, or without an interpreter what follows -m, as a shell reads it; `$recipe` stays the
    shell's."""
    words = [*((python, "-m") if python else ()), *module]
    return " ".join('"$recipe"' if word == "$recipe" else shlex.quote(word) for word in words)


def recipes(job: JobRequest, label: str, index: str) -> list[str]:
    """Lines that write the recipe of this start to `$recipe`, under the folder of runs. label: what tells jobs apart,
    as the shell expands it. index: where the shell has the number of a run in an array."""
    lines = [f"mkdir -p {shlex.quote(f'{job.out}/jobs')}",
             f'recipe={shlex.quote(f"{job.out}/jobs/{job.name}")}-{label}.toml']  # fmt: skip
    if len(job.recipes) == 1:
        return [*lines, *_heredoc(job.recipes[0])]
    lines.append(f'case "{index}" in')
    for number, text in enumerate(job.recipes):
        lines += [f"{number})", *_heredoc(text), ";;"]
    return [*lines, "esac"]


def _heredoc(text: str) -> Iterable[str]:
    end = _END
    while end in text.splitlines():
        end += "_"
    return (f"cat > \"$recipe\" <<'{end}'", *text.rstrip("\n").splitlines(), end)


WAIT = """\
step=$!
while :; do
    wait "$step"
    code=$?
    # A signal ends `wait` before the step has ended.
    kill -0 "$step" 2>/dev/null || break
done
if [ "$code" -gt 128 ]; then wait "$step"; code=$?; fi"""
"""Waits for the command that was started last, while signals are heard; its exit code is `$code`."""


def trap(*signals: str) -> list[str]:
    """Lines by which the ranks, once they are there, get each of these signals as one that they know."""
    names = " ".join(dict.fromkeys(signals))
    return ["step=", f'trap \'[ -z "$step" ] || kill -USR1 "$step"\' {names}']


def output_of(words: Sequence[str], text: str | None = None, where: str = "unisono launch") -> str:
    """What a scheduler's command says. Raises UsageError L14 where it is missing or fails."""
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60.0, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else "no answer within a minute"
        raise UsageError(
            f"{words[0]}: {why}", where=where, code="L14",
            fix=f"--dry-run prints the files, for a machine that has {words[0]}",
        ) from error  # fmt: skip
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise UsageError(f"{words[0]} refused: {said[-1]}", where=where, code="L14",
                         fix="--dry-run prints what was submitted")  # fmt: skip
    return done.stdout.strip()
