"""The guide keeps up with the program: tables, drawings and codes are the program's own, and links lead somewhere."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unisono import config
from unisono.spec.errors import UsageError

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("docs_blocks", ROOT / "docs" / "blocks.py")
if _spec is None or _spec.loader is None:
    raise FileNotFoundError("docs/blocks.py")
blocks = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = blocks
_spec.loader.exec_module(blocks)

PAGES = [page for page in blocks.PAGES if page.exists()]
LINKED = [*PAGES, *sorted((ROOT / "docs" / "adr").glob("*.md"))]
GUIDE = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_blocks_are_what_the_program_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert blocks.written(text) == text, "python docs/blocks.py"


def test_every_block_is_shown_somewhere() -> None:
    shown = {found[2] for page in PAGES for found in blocks.BLOCK.finditer(page.read_text(encoding="utf-8"))}
    assert shown == set(blocks.BLOCKS)


def test_every_error_code_is_explained() -> None:
    listed = re.findall(
        r"^\| U-([A-Z]\d\d) ", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(listed) == len(set(listed))
    raised = blocks.codes()
    assert not set(raised) - set(listed), {code: raised[code] for code in set(raised) - set(listed)}
    assert not set(listed) - set(raised), "listed, and nowhere in the source"


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        place = (page.parent / target).resolve() if target else page
        assert place.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(place), f"{target}#{anchor}"


DIALECT = re.compile(r"\b(put away|puts away|(?:is|are) told|dealt|lookout|nursery|shelf|targets/s)\b")


@pytest.mark.parametrize("page", GUIDE, ids=named)
def test_pages_speak_the_language_of_the_field(page: Path) -> None:
    """Shard, offload, logged, watchdog, fork server: the words that CONTRIBUTING asks for."""
    assert not DIALECT.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", GUIDE, ids=named)
def test_pages_begin_with_a_sentence(page: Path) -> None:
    """What the page is for comes before its syntax: no fence, table or list first."""
    first = page.read_text(encoding="utf-8").split("\n", 2)[2].lstrip()
    assert re.match(r"[A-Z`*\[]", first) and not first.startswith("```"), first[:60]


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in GUIDE:
        assert page.name == "index.md" or f"({page.name})" in index, page.name


@pytest.mark.parametrize("what", blocks.REFUSED)
def test_what_is_said_not_to_be_there_is_refused(what: str) -> None:
    loaded = config.load(ROOT / "examples" / "proof.toml")
    with pytest.raises(UsageError):
        config.resolve(loaded.recipe, loaded.plan.parse(blocks.REFUSED[what]), None, loaded.origins)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_is_built_and_asks_nobody(tmp_path: Path) -> None:
    """Every link leads somewhere, and a reader without a network misses nothing."""
    pytest.importorskip("mkdocs", reason="pip install '.[docs]'")
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True,
    )  # fmt: skip
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//")
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(GUIDE)
    assert not [page.name for page in pages if loaded.search(page.read_text(encoding="utf-8"))]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda p: p.name)
def test_notebooks_run(path: Path, tmp_path: Path) -> None:
    """Their cells of code, one after the other, in a process of its own."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    script = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


def test_pictures_are_small() -> None:
    for picture in (ROOT / "docs" / "images").glob("*"):
        assert picture.stat().st_size < 300_000, picture.name


@pytest.mark.parametrize("name", blocks.PICTURES)
def test_pictures_are_what_the_program_draws(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == blocks.PICTURES[name](), (
        "python docs/blocks.py"
    )
