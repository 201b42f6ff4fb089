"""Where each tracker writes in a test, how that place fails, and what the tracker's own reader says of it afterwards."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.trackers.wandb_cloud import history_of
from unisono_contrib.trackers.follower import FollowerProcess

Losses = list[tuple[int, float]]
SMALL = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Disk:
    """A file system of 16 MiB of its own, which can be full, and frozen: then whoever writes there waits, and no signal
    ends the wait, as on a server of files that is gone."""

    def __init__(self, folder: Path) -> None:
        self.root, self._filler, self._frozen = folder / "disk", folder / "disk" / "filler", False
        image = folder / "disk.img"
        image.touch()
        os.truncate(image, 16 << 20)
        self.root.mkdir()
        self._run("mkfs.ext4", "-q", "-b", "1024", "-m", "0", "-O", "^has_journal", str(image))
        self._run("mount", "-o", "loop,noatime", str(image), str(self.root))

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=30)

    def fill(self, but: int = 0) -> None:
        """Leave no room, by pieces of one block at the end; or `but` KiB of it."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 10):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))
            os.fsync(file.fileno())  # blocks that were set aside for late writes are free after it
            file.truncate(max(0, file.tell() - (but << 10)))

    def freeze(self) -> None:
        self._run("fsfreeze", "-f", str(self.root))
        self._frozen = True

    def mend(self) -> None:
        if self._frozen:
            self._run("fsfreeze", "-u", str(self.root))
        self._frozen = False
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        self.mend()
        self._run("umount", "-l", str(self.root))


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """A disk; where this machine lets nobody mount one, the test is skipped, and says so."""
    try:
        made = Disk(folder)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"disks that are full or hang need root, mkfs.ext4 and a loop device: {error}")
    try:
        yield made
    finally:
        made.close()


def kill_writers(follower: FollowerProcess) -> None:
    """Kill the processes that a tracker's library has started; where it has none, the follower itself."""
    group = follower.process.pid
    others = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _group(pid) == group]
    for pid in [pid for pid in others if pid != group] or [group]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _group(pid: int) -> int:
    with suppress(OSError):
        return os.getpgid(pid)
    return 0


class FileTarget:
    """A tracker that writes files, on a disk of its own."""

    def __init__(self, name: str, disk: Disk) -> None:
        self.name, self.disk, self.folder = name, disk, disk.root / name
        options = {"tensorboard": f":dir={self.folder}", "mlflow": f":uri={self.folder}"}
        self.text = name + options.get(name, "")
        self.environ: Mapping[str, str] = {}
        if name == "trackio":
            self.environ = {"TRACKIO_DIR": str(self.folder)}
        if name == "mlflow":
            self.environ = {"MLFLOW_ALLOW_FILE_STORE": "true"}

    def begin(self, run_dir: Path) -> None:
        """Before the run: W&B's files, which lie in the run folder, are put on the disk."""
        self.folder.mkdir(exist_ok=True)
        if self.name == "wandb":
            (run_dir / "trackers").mkdir(parents=True)
            (run_dir / "trackers" / "wandb").symlink_to(self.folder)

    def fail(self, fault: str, follower: FollowerProcess | None) -> None:
        """follower: None before the run has one; it is killed as soon as there is one."""
        match fault:
            case "full":
                self.disk.fill()
            case "scarce":
                self.disk.fill(but=4)
            case "hung":
                self.disk.freeze()
            case "killed" if follower is not None:
                kill_writers(follower)

    def mend(self) -> None:
        self.disk.mend()

    def read(self, key: str) -> Losses:
        """(step, loss) of all points, by the tracker's own reader."""
        match self.name:
            case "tensorboard":
                return read_tensorboard(self.folder / key)
            case "wandb":
                runs = sorted(self.folder.glob("*/wandb/offline-run-*"), key=lambda p: int(p.parts[-3]))
                return [(line["_step"], line["loss"]) for line in history_of(runs) if "loss" in line]
            case "trackio":
                return read_trackio(key)
            case _:
                return read_mlflow(str(self.folder), key)


class ServerTarget:
    """MLflow's server over a database on a disk of its own."""

    name = "mlflow-server"
    environ: Mapping[str, str] = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "2", "no_proxy": "127.0.0.1"}

    def __init__(self, port: int, disk: Disk, log: Path) -> None:
        self.port, self.disk, self._log = port, disk, log
        self.url = f"http://127.0.0.1:{port}"
        self.text = f"mlflow:uri={self.url}"
        self._refuser: HTTPServer | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        store = ["--backend-store-uri", f"sqlite:///{self.disk.root}/mlflow.db"]
        where = ["--default-artifact-root", str(self.disk.root), "--port", str(self.port), "--workers", "1"]
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "mlflow", "server", *store, *where]
            environ = {**os.environ, **SMALL, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environ, start_new_session=True
            )
        direct, pause = urllib.request.build_opener(urllib.request.ProxyHandler({})), threading.Event()
        while self._process.poll() is None:
            with suppress(OSError), direct.open(f"{self.url}/health", timeout=5.0) as answer:
                if answer.status == 200:
                    return
            pause.wait(0.1)
        raise AssertionError(self._log.read_text())

    def begin(self, run_dir: Path) -> None:
        return None

    def fail(self, fault: str, follower: FollowerProcess | None) -> None:
        match fault:
            case "full":
                self.disk.fill()
            case "scarce":
                self.disk.fill(but=4)
            case "hung" if self._process is not None:
                os.killpg(self._process.pid, signal.SIGSTOP)
            case "killed" | "500":
                self.stop()
                if fault == "500":
                    self._refuser = self._listen()
                    threading.Thread(target=self._refuser.serve_forever, args=(0.01,), daemon=True).start()

    def mend(self) -> None:
        self.disk.mend()
        if self._refuser is not None:
            self._refuser.shutdown()
            self._refuser.server_close()
            self._refuser = None
        if self._process is None:
            self._start()
        else:
            os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30.0)
            self._process = None
            self._listen().server_close()  # its workers die after it, and hold the port till then

    def _listen(self) -> HTTPServer:
        """Who refuses, at the server's port as soon as it is free."""
        until, pause = time.monotonic() + 10.0, threading.Event()
        while True:
            try:
                return HTTPServer(("127.0.0.1", self.port), _Refusal)
            except OSError:
                if time.monotonic() > until:
                    raise
            pause.wait(0.02)

    def read(self, key: str) -> Losses:
        return read_mlflow(self.url, key)


class _Refusal(BaseHTTPRequestHandler):
    """Answers whatever it is asked with 500."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_error(500)

    do_GET = do_PATCH = do_POST

    def log_message(self, *_: object) -> None:
        return None


def read_tensorboard(folder: Path) -> Losses:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def read_trackio(key: str) -> Losses:
    script = str(Path(sys.executable).with_name("trackio"))
    command = [script, "get", "metric", "--project", "demo", "--run", key, "--metric", "loss", "--json"]
    said = subprocess.run(command, check=True, capture_output=True, timeout=60)
    return [(row["step"], row["value"]) for row in json.loads(said.stdout)["values"]]


def read_mlflow(uri: str, key: str) -> Losses:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"tags.`unisono.key` = '{key}'")
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]
