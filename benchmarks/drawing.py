"""The few shapes that plots are made of, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["dot", "line", "picture", "text"]


def picture(width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
    return "\n".join(
        [
            f'{head} font-size="13" fill="#111827">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def line(x1: float, y1: float, x2: float, y2: float, look: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {look}/>'


def text(x: float, y: float, words: str, look: str = "") -> str:
    return f'<text x="{x}" y="{y}" {look}>{words}</text>'


def dot(x: float, y: float, colour: str, radius: float = 4.0, opacity: float = 1.0) -> str:
    return f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour}" fill-opacity="{opacity}"/>'
