"""What the site needs beside the pages of this folder. MkDocs calls the functions `on_...`.

The navigation is the list of links in index.md. CONTRIBUTING, CHANGELOG and the examples become pages. The marks behind
the language of a fence (`bash run`), which are for tests, go.
"""

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
EXAMPLES = "examples.md"
NOTEBOOKS = "notebook-"
_SECTION = re.compile(r"^## (.+)$")
_ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)#]+)\)")
_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)")
_MARKED = re.compile(r"^( *```(?:bash|python|toml))[ ]+[^\n`]+$", re.MULTILINE)
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}


def on_config(config: Any) -> Any:
    """Take the navigation from index.md."""
    sections: list[dict[str, Any]] = []
    for line in (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines():
        if section := _SECTION.match(line):
            sections.append({section[1]: []})
        elif sections and (entry := _ENTRY.match(line)):
            next(iter(sections[-1].values())).append({entry[1]: _inside("index.md", entry[2])})
    config.nav = [{"Home": "index.md"}, *(section for section in sections if next(iter(section.values())))]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose text lies outside of this folder."""
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, EXAMPLES, content=_examples()))
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        files.append(File.generated(config, f"{NOTEBOOKS}{path.stem}.md", content=_notebook(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links out of this folder to the pages made of those files, and take the marks of fences away."""
    at = page.file.src_uri
    linked = _LINK.sub(lambda link: link[1] + _inside(at, link[2]), markdown)
    return _MARKED.sub(r"\1", linked)


def _inside(page: str, target: str) -> str:
    """A link of a page (`../CONTRIBUTING.md`), as a link inside the site (`contributing.md`)."""
    if page in OUTSIDE.values() or page == EXAMPLES:
        parts = ["..", target] if not (ROOT / "docs" / target).exists() else [target]
    else:
        parts = [target]
    path = PurePosixPath(_resolved(PurePosixPath("docs", page).parent.joinpath(*parts)))
    up = "../" * (len(PurePosixPath(page).parts) - 1)
    if str(path) in OUTSIDE:
        return up + OUTSIDE[str(path)]
    if path.suffix == ".ipynb":
        return f"{up}{NOTEBOOKS}{path.stem}.md"
    if path.parts[:1] == ("examples",):
        return up + EXAMPLES
    return target


def _resolved(path: PurePosixPath) -> str:
    """The path without its `..`."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def _examples() -> str:
    """The text of all scripts and recipes under examples/, each under its name."""
    lines = [
        (ROOT / "examples" / "README.md").read_text(encoding="utf-8").replace("](../docs/", "](").rstrip()
    ]
    for path in sorted((ROOT / "examples").rglob("*")):
        if language := _LANGUAGES.get(path.suffix):
            text = path.read_text(encoding="utf-8").rstrip()
            lines += ["", f"## {path.relative_to(ROOT)}", "", f"````{language}", text, "````"]
    return "\n".join(lines) + "\n"


def _notebook(path: Path) -> str:
    """A notebook as Markdown: text as it is, code and what it printed in fences."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        if printed := "".join("".join(output.get("text", [])) for output in cell.get("outputs", [])):
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
