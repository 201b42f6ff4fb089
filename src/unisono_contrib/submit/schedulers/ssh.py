"""ssh: a script on the first of some hosts, which starts the others itself (`unisono train --hosts`). No torch."""

import os
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from unisono.launch.remote_hosts import is_here
from unisono.spec.errors import UsageError
from unisono.spec.hostlist import hosts_in
from unisono_contrib.submit import JobState, Submitter
from unisono_contrib.submit.job import JobFile, JobRequest
from unisono_contrib.submit.script import WAIT, command, exports, output_of, recipes, trap

FILE, REMOTE, LOG, PID, EXIT = "job.sh", "remote.sh", "job.log", "job.pid", "job.exit"
_PATIENCE = 60.0


class SshSubmitter(Submitter):
    """A script on the first host."""

    name: ClassVar[str] = "ssh"

    def files(self, job: JobRequest) -> Sequence[JobFile]:
        if not job.config.hosts:
            raise UsageError("nobody says which hosts", where="job.hosts", code="C06",
                             fix="--hosts 'node[01-04]', or hosts in [job]; this host may lead")  # fmt: skip
        script = JobFile(FILE, "\n".join(["#!/bin/bash", *_body(job)]) + "\n")
        prepared = [*job.config.setup, *exports(job.variables)]
        if not prepared:
            return [script]
        # Who comes by ssh has neither the modules nor the variables of the script.
        remote = ["#!/bin/bash", "host=$1", "shift", f"prepare={shlex.quote('; '.join(prepared))}",
                  f'exec {job.shell} "$host" "$prepare; $*"']  # fmt: skip
        return [script, JobFile(REMOTE, "\n".join(remote) + "\n")]

    def submit(self, job: JobRequest, folder: Path) -> str:
        for name in (PID, EXIT):
            (folder / name).unlink(missing_ok=True)
        leader = hosts_in(job.config.hosts)[0].partition(":")[0]
        shell = [] if is_here(leader) else [*shlex.split(job.shell), leader]
        script = f"cd {shlex.quote(os.getcwd())} && exec bash {shlex.quote(str(folder / FILE))}"
        with open(folder / LOG, "ab") as log:
            try:
                process = subprocess.Popen(
                    [*shell, script] if shell else ["bash", str(folder / FILE)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise UsageError(f"{shell[0] if shell else 'bash'}: {error.strerror}", where="launch.shell", code="L14",
                                 fix="a command that runs another one on a host, such as ssh") from error  # fmt: skip
        until = time.monotonic() + _PATIENCE
        while not (folder / PID).exists():
            if process.poll() is not None or time.monotonic() > until:
                raise UsageError(
                    f"{leader} did not start the job", where="job.hosts", code="L14",
                    fix=f"read {folder / LOG}; {leader} has to see this folder under the same path",
                )  # fmt: skip
            time.sleep(0.02)
        return shlex.join([*shell, (folder / PID).read_text().strip()])

    def state(self, job: str, folder: Path) -> JobState:
        if (folder / EXIT).exists():
            code = (folder / EXIT).read_text().strip()
            return {"0": JobState.DONE, "75": JobState.STOPPED, "130": JobState.STOPPED}.get(
                code, JobState.FAILED
            )
        *shell, number = shlex.split(job)
        check = f"kill -0 {int(number)}"
        try:
            output_of([*shell, check] if shell else ["/bin/sh", "-c", check])
        except UsageError:
            return JobState.UNKNOWN  # it was killed, or its host has gone
        return JobState.RUNNING


def _body(job: JobRequest) -> Iterator[str]:
    yield 'folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'
    yield f'echo $$ > "$folder/{PID}.new" && mv "$folder/{PID}.new" "$folder/{PID}"'
    yield from job.config.setup
    yield from exports(job.variables)
    yield from recipes(job, "ssh", "0")
    yield from trap("TERM", "USR1", "INT")
    words = [*job.train("$recipe", job.grace), "--hosts", ",".join(hosts_in(job.config.hosts))]
    shell = f' --launch.shell "bash $folder/{REMOTE}"' if job.config.setup or job.variables else ""
    yield f"{command(words, job.python)}{shell} &"
    yield WAIT
    yield f'echo "$code" > "$folder/{EXIT}"'
    yield 'exit "$code"'
