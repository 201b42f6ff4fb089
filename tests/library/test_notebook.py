"""A notebook's function on several processes: what it returns, shows and raises, and that nobody stays behind."""

import importlib.util
import linecache
import os
import signal
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import unisono
from unisono.spec.errors import HangError, UsageError, UserCodeError
from unisono_contrib.launch.forked_here import threads_of_libraries
from unisono_contrib.library import notebook

pytestmark = pytest.mark.timeout(60)


def cell(text: str, **names: object) -> dict:
    """The names that a cell defines. Its lines are where a notebook has them: in no file, but known to `linecache`."""
    text, name = textwrap.dedent(text), "<cell 1>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space = {"__name__": "__main__", "unisono": unisono, "torch": torch, **names}
    exec(compile(text, name, "exec"), space)
    return space


def children() -> list[str]:
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()


@pytest.fixture(autouse=True)
def nobody_stays():
    before = children()
    yield
    assert children() == before


TRAIN = """
def train(lr, steps=2):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x = torch.arange(24.0).view(8, 3).double() / 10
    data = [(x[i : i + 4], x[i : i + 4].sum(1, keepdim=True)) for i in (0, 4)]
    job = unisono.init()
    model, optimizer, batches = job.prepare(model, optimizer, data)
    for x, y in batches:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("of", job.world)
    return {"world": job.world, "weights": {k: v.detach().clone() for k, v in model.state_dict().items()}}
"""


def test_a_cells_function_trains_as_one_device(capfd: pytest.CaptureFixture[str]) -> None:
    names = cell(TRAIN)
    first, second = unisono.notebook_launch(names["train"], 0.1, ranks=2)
    assert sorted(line for line in capfd.readouterr().out.splitlines() if "of" in line) == [
        "rank 0 | of 2", "rank 1 | of 2",
    ]  # fmt: skip
    alone = names["train"](0.1)
    assert (first["world"], second["world"], alone["world"]) == (2, 2, 1)
    for name, weight in alone["weights"].items():
        assert torch.allclose(first["weights"][name], weight, rtol=1e-12)
        assert torch.equal(first["weights"][name], second["weights"][name])


def test_ranks_know_what_the_notebook_has_and_leave_it_as_it_is() -> None:
    names = cell("""
        seen = [1, 2]
        x = torch.ones(400, 400) @ torch.ones(400, 400)  # torch's own threads have started

        def grow(more, *, factor):
            import os
            seen.append(more)
            y = x.clone().requires_grad_()
            (y @ y).sum().backward()
            return os.environ["RANK"], factor * sum(seen), y.grad[0, 0].item()
    """)
    results = unisono.notebook_launch(names["grow"], 3, ranks=3, factor=2)
    assert results == [(str(rank), 12, 320000.0) for rank in range(3)]
    assert names["seen"] == [1, 2] and "RANK" not in os.environ


def test_an_error_is_raised_once_with_rank_and_the_cells_lines() -> None:
    names = cell("""
        def fail(rank):
            import time
            job = unisono.init()
            if job.rank == rank:
                raise ZeroDivisionError("of my own")
            time.sleep(1000)
    """)
    with pytest.raises(UserCodeError) as raised:
        unisono.notebook_launch(names["fail"], 1, ranks=2)
    notes = "\n".join(raised.value.__notes__)
    assert raised.value.rank == 1 and raised.value.code == "R01"
    assert "ZeroDivisionError: of my own" in str(raised.value)
    assert notes.count("Traceback (most recent call last)") == 1
    assert 'raise ZeroDivisionError("of my own")' in notes and 'File "<cell 1>", line 6, in fail' in notes


def test_a_rank_that_keeps_the_others_waiting_ends_all() -> None:
    names = cell("""
        def hang():
            import time
            job = unisono.init()
            if job.rank == 1:
                time.sleep(1000)
            torch.distributed.barrier()
    """)
    with pytest.raises(HangError) as raised:
        unisono.notebook_launch(names["hang"], ranks=2, timeout=1.0)
    assert raised.value.rank == 1


@pytest.mark.parametrize(
    ("number", "raises"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_an_interrupt_ends_the_ranks(number: int, raises: type[BaseException]) -> None:
    names = cell("""
        def interrupted(parent, number):
            import os, time
            job = unisono.init()
            torch.distributed.barrier()
            if job.rank == 0:
                os.kill(parent, number)
            while True:
                time.sleep(1000)
    """)
    with pytest.raises(raises):
        unisono.notebook_launch(names["interrupted"], os.getpid(), int(number), ranks=2)


def test_a_result_that_is_no_data_is_refused() -> None:
    class Mine: ...

    for result in (Mine(), SimpleNamespace(x=1)):
        with pytest.raises(UsageError, match="rank 0 returned cannot be sent") as raised:
            unisono.notebook_launch(lambda result=result: result, ranks=1)
        assert raised.value.code == "J22"


def test_a_process_that_cannot_be_forked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cannot start 0 ranks"):
        unisono.notebook_launch(int, ranks=0)
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="GPU is in use"):
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        unisono.notebook_launch(int)
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="a rank already"):
        for name in ("RANK", "LOCAL_RANK"):
            patch.setenv(name, "0")
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, "1")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "1")
        unisono.notebook_launch(int)
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="2 threads in this process"):
        patch.setattr(notebook, "threads_of_libraries", lambda: ["python", "python"])
        unisono.notebook_launch(int, threads=2)


def test_threads_of_libraries_are_those_that_python_does_not_know() -> None:
    def count() -> list[int]:
        torch.set_num_threads(3)
        before, over = len(threads_of_libraries()), threading.Event()
        threading.Thread(target=over.wait, daemon=True).start()
        beside = len(threads_of_libraries())
        torch.ones(1_000_000).exp()
        return [beside - before, len(threads_of_libraries()) - before]

    assert unisono.notebook_launch(count, ranks=1) == [[0, 2]]


CELLS = (
    "import unisono",
    "def train(factor):\n    job = unisono.init()\n    print('here')\n    return factor * (job.rank + job.world)",
    "unisono.notebook_launch(train, 10, ranks=2)",
    "def fail():\n    job = unisono.init()\n    if job.rank == 1:\n        raise ZeroDivisionError('of my own')",
    "try:\n    unisono.notebook_launch(fail, ranks=2)\nexcept unisono.UnisonoError as error:\n"
    "    print(error.rank, error.__notes__[0])",
)


@pytest.mark.slow
@pytest.mark.skipif(
    not (importlib.util.find_spec("ipykernel") and importlib.util.find_spec("nbclient")),
    reason="needs ipykernel and nbclient: no cell of a real notebook was run",
)
def test_a_real_notebook() -> None:
    import nbclient
    import nbformat

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    nbclient.NotebookClient(book, timeout=50, kernel_name="python3").execute()
    shown = "".join(out.text for out in book.cells[2].outputs if out.output_type == "stream")
    (value,) = (
        out.data["text/plain"] for out in book.cells[2].outputs if out.output_type == "execute_result"
    )
    assert sorted(shown.split("\n")[:2]) == ["rank 0 | here", "rank 1 | here"] and value == "[20, 30]"
    error_lines = "".join(out.text for out in book.cells[4].outputs)
    assert error_lines.startswith("1 Traceback") and "raise ZeroDivisionError('of my own')" in error_lines
