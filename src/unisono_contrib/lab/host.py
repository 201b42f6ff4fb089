"""One host of the lab: `python -m unisono_contrib.lab.host`, which starts its ranks and tells how they end.

Two processes: the outer one belongs to the machine and waits; its child is process number 1 of the host, and starts the
ranks. When the lab goes, however it goes, the kernel ends the outer one, with it the inner one, and with that all that
was ever started on the host.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from unisono.launch import wire
from unisono.launch.parent import PR_SET_PDEATHSIG, set_parent_death_signal
from unisono_contrib.lab.spaces import leave_for, settle

NOT_FOUND = 127
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Host:
    """The inner process. commands: those that live, by process number."""

    control: socket.socket
    commands: dict[int, tuple[int, subprocess.Popen[bytes]]] = field(default_factory=dict)

    def serve(self) -> None:
        """Obey until the lab hangs up."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(ours, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if ours in ready:
                    ours.recv(4096)
                    self._bury()
                if self.control in ready and not self._obey():
                    return

    def _obey(self) -> bool:
        try:
            got = wire.read_message(self.control)
        except OSError:
            return False
        if got is None:
            return False
        message, files = got
        match message["op"]:
            case "start":
                self._start(message, files)
            case "signal":
                for pid in self.commands:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, message["number"])
        return True

    def _start(self, message: dict[str, Any], files: list[int]) -> None:
        """A command in a session of its own: what it starts hears a signal too, and Ctrl-C is the lab's. files: its
        input, output and errors, where they are another command's."""
        stdin, stdout, stderr = files or (subprocess.DEVNULL, None, None)
        try:
            process = subprocess.Popen(
                message["argv"], env=message["environ"], cwd=message["folder"], stdin=stdin, stdout=stdout,
                stderr=stderr, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            print(f"{message['argv'][0]}: {error.strerror}", file=sys.stderr, flush=True)
            self._say(op="exit", number=message["number"], status=NOT_FOUND)
            return
        finally:
            for file in files:
                os.close(file)
        self.commands[process.pid] = message["number"], process

    def _bury(self) -> None:
        """All that has ended: commands, and what others of this host left behind."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                number, process = self.commands.pop(pid, (None, None))
                if process is not None:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    self._say(op="exit", number=number, status=process.returncode)

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(OSError):
            wire.send_message(self.control, message)


def main() -> None:
    terms, libc = json.loads(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
    control = socket.socket(fileno=terms["control"])
    set_parent_death_signal(terms["parent"], libc)
    for number in _ENDING:  # the lab says what is to end
        signal.signal(number, signal.SIG_IGN)
    try:
        leave_for(terms["network"])
        os.close(terms["network"])
        inner = os.fork()
    except OSError as error:
        wire.send_message(control, {"op": "failed", "what": str(error)})
        os._exit(1)
    if inner:
        control.close()
        os.waitpid(inner, 0)
        os._exit(0)
    # What started this one has no number in here; should it be gone already, `control` says so.
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    try:
        settle(terms["name"], terms["hosts_file"])
        wire.send_message(control, {"op": "ready"})
        for number in _ENDING:  # or all that is started would ignore them
            signal.signal(number, signal.SIG_DFL)
        _Host(control).serve()
    except OSError as error:
        with contextlib.suppress(OSError):
            wire.send_message(control, {"op": "failed", "what": str(error)})
    os._exit(0)


if __name__ == "__main__":
    main()
