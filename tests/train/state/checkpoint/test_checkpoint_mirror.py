"""A second place for checkpoints: filled behind the run's back, and gone on from when the first is lost."""

import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from tests.train.small import recipe
from tests.train.test_session import losses, play
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import Box, latest, read_full, save, verify_folder
from unisono.train.state.checkpoint.find import by_age, point_best, step_of
from unisono_contrib.comm.depot import FolderDepot, RemoteDepot, bare, depot_at
from unisono_contrib.train.state.checkpoint.mirror import Mirroring, fetch, place_at

pytestmark = pytest.mark.timeout(120)
KINDS = ["folder", "file", "memory"]


def url_of(kind: str, folder: Path) -> str:
    return {"folder": str(folder), "file": f"file://{folder}", "memory": f"memory://{uuid4().hex}"}[kind]


def saved(run: Path, step: int) -> Path:
    tensor = torch.full((1000,), float(step))
    return save(run, step, [Box("w", (1000,), (0,), tensor)], {"step": step})


def mirrored(run: Path, url: str, steps: tuple[int, ...], **kept: int) -> Mirroring:
    mirror = Mirroring(place_at(url, run), **kept)
    for step in steps:
        mirror.offer(saved(run, step))
        mirror.close()
    return mirror


def falling(steps: Any) -> list[int]:
    return sorted(steps, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_checkpoints_are_gone_goes_on_from_its_mirror_with_the_same_bits(
    tmp_path: Path, kind: str
) -> None:
    url = url_of(kind, tmp_path / "mirror")
    told = recipe(tmp_path, save_every=2, steps=5, mirror=url)
    play(told, "dp=2", 2, tmp_path / "whole")
    run = tmp_path / "runs"
    play(told, "dp=2", 2, run, stop=2)
    shutil.rmtree(run / "checkpoints")
    heard: list[str] = []
    ended = play(told, "dp=2", 2, run, resume=True, heard=heard)
    assert [end["resumed_from"] for end in ended] == ["step-000003"] * 2
    assert any("step-000003 was taken from its copy in" in text for text in heard), heard
    assert losses(run) == losses(tmp_path / "whole")
    last = [read_full(folder / "checkpoints/step-000005") for folder in (run, tmp_path / "whole")]
    assert last[0].keys() == last[1].keys()
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_whole_and_stay_as_checkpoints_do(tmp_path: Path, kind: str) -> None:
    url = url_of(kind, tmp_path / "mirror")
    mirror = mirrored(tmp_path / "x/run", url, (1, 2, 3, 4, 5), keep=2, keep_every=2)
    assert not mirror.notes
    place = place_at(url, tmp_path / "x/run")
    assert sorted(place.steps()) == [2, 3, 4, 5] and place.folder == "x/run"
    for step in (2, 3, 4, 5):
        other = tmp_path / f"other{step}" / "run"
        folder, notes = fetch(place, other, lambda steps, step=step: [step])
        assert folder == other / f"checkpoints/step-{step:06d}" and verify_folder(folder) == []
        assert read_full(folder)["w"].tolist() == [step] * 1000 and len(notes) == 1
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    # The same step saved anew takes the place of the old copy, and what the old one had besides goes.
    place.depot.put((tmp_path / "x/run/latest").open("rb"), "x/run/step-000005/stray", lambda count: None)
    mirrored(tmp_path / "x/run", url, (5,))
    assert place.depot.names("x/run/step-000005") == ["manifest.json", "rank-00000.safetensors"]


def test_the_copy_of_the_best_checkpoint_stays(tmp_path: Path) -> None:
    run, place = tmp_path / "x/run", place_at(str(tmp_path / "mirror"), tmp_path / "x/run")
    mirror = Mirroring(place, keep=1)
    for step in (1, 2, 3, 4):
        mirror.offer(saved(run, step))
        mirror.close()
        if step < 3:
            point_best(run, step)
    assert sorted(place.steps()) == [2, 4] and not mirror.notes


def test_the_best_checkpoint_is_copied_though_another_came_before_its_turn(tmp_path: Path) -> None:
    run, place = tmp_path / "x/run", place_at(str(tmp_path / "mirror"), tmp_path / "x/run")
    saved(run, 1)
    point_best(run, 1)
    mirror = Mirroring(place, keep=1)
    mirror.offer(saved(run, 2))
    mirror.close()
    assert sorted(place.steps()) == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_copy_is_named_and_the_next_older_taken(tmp_path: Path, kind: str) -> None:
    url, run = url_of(kind, tmp_path / "mirror"), tmp_path / "x/run"
    mirrored(run, url, (1, 2, 3, 4))
    place = place_at(url, run)
    depot = place.depot
    depot.drop(f"{place.folder}/step-000004/manifest.json")
    (tmp_path / "flip").write_bytes(
        (run / "checkpoints/step-000003/rank-00000.safetensors").read_bytes()[:-1] + b"!"
    )
    depot.put(
        (tmp_path / "flip").open("rb"), f"{place.folder}/step-000003/rank-00000.safetensors", lambda n: None
    )
    (tmp_path / "long").write_bytes(bytes(1 << 20))
    depot.put(
        (tmp_path / "long").open("rb"), f"{place.folder}/step-000002/rank-00000.safetensors", lambda n: None
    )
    shutil.rmtree(run / "checkpoints")
    folder, notes = fetch(place, run, falling)
    assert folder is not None and folder.name == "step-000001" and read_full(folder)["w"][0] == 1
    assert "never finished" in notes[0] and "checksum" in notes[1] and "more than the" in notes[2]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000001"]


def test_the_newest_of_both_places_is_taken(tmp_path: Path) -> None:
    from tests.train.state.test_resume import RECIPE
    from tests.train.state.test_resume import saved as saved_run
    from unisono.train.state.resume import choose

    url, run = str(tmp_path / "mirror"), tmp_path / "x/run"
    told = RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"mirror": url})})
    mirror = Mirroring(place_at(url, run))
    for step in (1, 2, 3):
        mirror.offer(saved_run(run, step))
        mirror.close()
    assert choose(run, told, "") == (run / "checkpoints/step-000003", [])
    (run / "checkpoints/step-000003/manifest.json").write_text("{}")
    folder, notes = choose(run, told, "")  # the damaged one is replaced by its copy
    assert folder.name == "step-000003" and verify_folder(folder) == [] and latest(run) == folder
    assert "step-000003 is damaged" in notes[0] and "taken from its copy" in notes[1]
    assert choose(run, told, "")[1] == []
    shutil.rmtree(run / "checkpoints/step-000003")  # what `latest` names is gone, an older one is whole
    assert choose(run, told, "")[0].name == "step-000003"
    shutil.rmtree(run / "checkpoints/step-000003")
    shutil.rmtree(tmp_path / "mirror/x/run/step-000003")
    folder, notes = choose(run, told, "")
    assert folder.name == "step-000002" and notes == []
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(tmp_path / "mirror")
    with pytest.raises(UsageError) as caught:
        choose(run, told, "")
    assert caught.value.code == "K06"


def test_a_run_that_was_resumed_from_an_earlier_step_does_not_fetch_the_future_that_it_left(
    tmp_path: Path,
) -> None:
    from unisono.train.state.resume import _before

    run = tmp_path / "x/run"
    for step in (1, 2):
        saved(run, step)
    assert _before(run, None, "", [1, 2, 3, 4]) == [2, 1, 4, 3]
    assert _before(run, run / "checkpoints/step-000001", "", [1, 2, 3, 4]) == [2]
    assert _before(run, run / "checkpoints/step-000002", "", [1, 3]) == []
    assert _before(run, None, "step-000003", [1, 2, 3]) == [3]
    assert [step_of(folder) for folder in by_age(run)] == [2, 1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_copy_that_fails_is_a_note_and_the_next_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    true, calls = FolderDepot.put, [0]

    def put(self: FolderDepot, *given: Any) -> None:
        calls[0] += 1
        if calls[0] in (1, 2):
            raise OSError(number, os.strerror(number))
        true(self, *given)

    monkeypatch.setattr(FolderDepot, "put", put)
    heard: list[str] = []
    told = recipe(tmp_path, save_every=2, steps=7, mirror=str(tmp_path / "mirror"))
    ended = play(told, "dp=2", 2, tmp_path / "run", heard=heard)
    assert [end["steps"] for end in ended] == [7, 7]
    notes = [text for text in heard if "could not be copied" in text]
    assert notes and all(os.strerror(number) in text and "training goes on" in text for text in notes)
    copies = place_at(str(tmp_path / "mirror"), tmp_path / "run").steps()
    assert 7 in copies and verify_folder(tmp_path / "mirror" / copies[7]) == []


def test_a_mirror_that_cannot_be_used_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        depot_at("nowhere://x/y", "train.mirror")
    assert caught.value.code == "C02" and "nowhere://x/y" in caught.value.what
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UsageError) as caught:
        depot_at("s3://user:secret@bucket/x", "train.mirror")
    assert caught.value.code == "E01" and "unisono[remote]" in str(caught.value.fix)
    assert "secret" not in caught.value.render()
    assert all(isinstance(depot_at(url, "x"), FolderDepot) for url in ("/a", "file:///a%20b"))


def test_no_password_is_told() -> None:
    assert bare("sftp://me:word@host/a@b") == "sftp://host/a@b" and bare("/a@b/c") == "/a@b/c"
    assert not issubclass(RemoteDepot, FolderDepot)
