"""The two pens that draw a picture: text of an SVG, and pixels of a PNG."""

import io
import unicodedata
from collections.abc import Sequence
from html import escape

from unisono.report.picture import PALETTE, Point

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
# The letters that the font inside Pillow lacks and our words have; accents are left out.
_PLAIN = str.maketrans({"µ": "u", "–": "-", "−": "-", "×": "x", "·": "|", "→": "->"})


class SvgPen:
    """Writes SVG. On a page colours are its variables, so that they follow the reader's light or dark, and x is in
    percent, so that bars fit any window and letters keep their size. In a file of its own both are plain."""

    def __init__(self, *, page: bool, unit: str = "") -> None:
        self.parts: list[str] = []
        self._page, self._unit = page, unit

    def box(
        self, x: float, y: float, wide: float, tall: float, colour: str, edge: bool = False, hover: str = ""
    ) -> None:
        line = f";stroke:{self._paint('paper')};stroke-width:.6" if edge else ""
        drawn = (
            f'<rect x="{x:.3f}{self._unit}" y="{y:g}" width="{wide:.3f}{self._unit}" height="{tall:g}"'
            f' style="fill:{self._paint(colour)}{line}"/>'
        )
        self.parts.append(f"<g><title>{escape(hover)}</title>{drawn}</g>" if hover else drawn)

    def line(self, points: Sequence[Point], colour: str, thick: float) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f"fill:none;stroke:{self._paint(colour)};stroke-width:{thick:g};stroke-linejoin:round"
        self.parts.append(f'<polyline points="{path}" vector-effect="non-scaling-stroke" style="{style}"/>')

    def text(
        self, x: float, y: float, said: str, size: float, colour: str, anchor: str = "start", bold: bool = False,
        wide_only: bool = False,
    ) -> None:  # fmt: skip
        more = ' class="wide-only"' * wide_only + ' font-weight="650"' * bold
        self.parts.append(
            f'<text{more} x="{x:.3f}{self._unit}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
            f' dominant-baseline="central" pointer-events="none" style="fill:{self._paint(colour)}">'
            f"{escape(said)}</text>"
        )

    def file(self, wide: int, tall: int) -> bytes:
        """All that was drawn, as a file of its own on white paper."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" font-family="{_FONT}">'
        )
        paper = f'<rect width="{wide}" height="{tall}" fill="{PALETTE["paper"][0]}"/>'
        return f"{head}{paper}{''.join(self.parts)}</svg>\n".encode()

    def _paint(self, colour: str) -> str:
        return f"var(--{colour})" if self._page and not colour.startswith("#") else _light(colour)


class PngPen:
    """Sets pixels. Shapes are drawn twice as large and made smaller, which smooths their edges; letters come last."""

    def __init__(self, wide: int, tall: int) -> None:
        # Imported here because a page and `unisono --help` need none of it.
        from PIL import Image, ImageDraw

        self._image = Image.new("RGB", (2 * wide, 2 * tall), PALETTE["paper"][0])
        self._draw = ImageDraw.Draw(self._image)
        self._texts: list[tuple[tuple[float, float], str, float, str, str, bool]] = []

    def box(
        self, x: float, y: float, wide: float, tall: float, colour: str, edge: bool = False, hover: str = ""
    ) -> None:
        left, top = round(2 * x), round(2 * y)
        right, bottom = max(left, round(2 * (x + wide)) - 1), max(top, round(2 * (y + tall)) - 1)
        if edge:
            right -= 1  # the edge towards the next bar
        self._draw.rectangle((left, top, right, bottom), fill=_light(colour))

    def line(self, points: Sequence[Point], colour: str, thick: float) -> None:
        doubled = [(2 * x, 2 * y) for x, y in points]
        self._draw.line(doubled, fill=_light(colour), width=max(1, round(2 * thick)), joint="curve")

    def text(
        self, x: float, y: float, said: str, size: float, colour: str, anchor: str = "start", bold: bool = False,
        wide_only: bool = False,
    ) -> None:  # fmt: skip
        place = {"start": "lm", "middle": "mm", "end": "rm"}[anchor]
        self._texts.append(((x, y), _plain(said), size, colour, place, bold))

    def file(self, wide: int, tall: int) -> bytes:
        """All that was drawn, as a PNG."""
        from PIL import ImageDraw, ImageFont

        image = self._image.reduce(2)
        draw = ImageDraw.Draw(image)
        fonts = {size: ImageFont.load_default(size=size) for size in {text[2] for text in self._texts}}
        for at, said, size, colour, place, bold in self._texts:
            heavy = 0.025 * size if bold else 0
            draw.text(at, said, _light(colour), fonts[size], anchor=place, stroke_width=heavy)
        buffer = io.BytesIO()
        image.save(buffer, "png", optimize=True)
        return buffer.getvalue()


def _light(colour: str) -> str:
    return colour if colour.startswith("#") else PALETTE[colour][0]


def _plain(said: str) -> str:
    """With letters that the font has; others become a question mark."""
    whole = unicodedata.normalize("NFKD", said.translate(_PLAIN))
    return "".join(c for c in whole if not unicodedata.combining(c)).encode("ascii", "replace").decode()
