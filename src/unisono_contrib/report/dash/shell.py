"""The page around its panels: served in parts, or written as one file that needs no server."""

import json
from html import escape
from pathlib import Path
from typing import Any

from unisono.report.picture import PALETTE

POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none';"
    " img-src 'self' data:"
)
"""What a browser lets the served page do: ask this server, and nobody else."""
_ALONE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
STYLES, SCRIPTS = ("dash.css",), ("draw.js", "heat.js", "forms.js", "dash.js")
_HERE = Path(__file__).parent


def part(name: str) -> tuple[str, str] | None:
    """(text, kind) of a part of the page by its name; None where there is none of that name."""
    if name == "palette.css":
        return palette(), "text/css"
    if name in STYLES:
        return _text(name), "text/css"
    return (_text(name), "text/javascript") if name in SCRIPTS else None


def palette() -> str:
    """The colours of all our pictures as variables, light and dark; `data-theme` of the root says which."""
    light, dark = ("".join(f"--{name}:{both[i]};" for name, both in PALETTE.items()) for i in (0, 1))
    return (
        f":root{{color-scheme:light;{light}}}:root[data-theme=dark]{{color-scheme:dark;{dark}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}"
    )


def served(title: str, facts: dict[str, Any], panels: str) -> str:
    """The page of a server; panels: those that there are by now, as JSON, so that they are drawn at once."""
    links = "".join(f'<link rel="stylesheet" href="/static/{name}">' for name in ("palette.css", *STYLES))
    scripts = "".join(f'<script defer src="/static/{name}"></script>' for name in SCRIPTS)
    return _page(title, links + scripts, facts, panels)


def alone(title: str, facts: dict[str, Any], panels: str) -> str:
    """The same page as one file, which asks nobody for anything."""
    style = palette() + "".join(map(_text, STYLES))
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_ALONE}">'
    scripts = "".join(f"<script>{_text(name)}</script>" for name in SCRIPTS)
    return _page(title, f"{policy}<style>{style}</style>", facts, panels, scripts)


def _page(title: str, head: str, facts: dict[str, Any], panels: str, scripts: str = "") -> str:
    verb = "compare" if facts.get("alone") else "dash"
    body = _text("dash.html").replace("{title}", escape(title)).replace("{verb}", verb)
    data = "".join(
        f'<script type="application/json" id="{name}-data">{text.replace("<", chr(92) + "u003c")}</script>'
        for name, text in (("facts", json.dumps(facts)), ("panels", panels))
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}: unisono {verb}</title><link rel="icon" href="data:,">{head}</head>'
        f"<body>{body}{data}{scripts}</body></html>\n"
    )


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
