"""Plots of the sweep as inline SVG: they take their colours from the page, light or dark.

Lines differ in colour, dash and marker, and each is labelled at its end.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Matplotlib draws in stand-ins, which become the page's CSS variables.
_CSS_COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--line)",
    "#040404": "var(--tilewise)",
    "#050505": "var(--own-tiles)",
    "#060606": "var(--sdpa)",
    "#070707": "var(--eager)",
}
_INK, _MUTED, _LINE, _TILEWISE, _OWN_TILES, _SDPA, _EAGER = _CSS_COLOURS


@dataclass(frozen=True)
class Style:
    colour: str
    dash: str
    marker: str
    width: float


STYLES = {
    "Tilewise": Style(_TILEWISE, "-", "o", 2.4),
    "Tilewise, own tiles": Style(_OWN_TILES, (0, (4, 1.5)), "s", 1.6),  # type: ignore[arg-type]
    "SDPA": Style(_SDPA, "--", "^", 1.6),
    "SDPA, bool mask": Style(_SDPA, "--", "^", 1.6),
    "eager": Style(_EAGER, ":", "D", 1.6),
    "scores alone": Style(_MUTED, "-", "", 0.9),
}


@dataclass(frozen=True)
class Line:
    """One contestant: lengths and what was measured there."""

    contestant: str
    lengths: Sequence[int]
    values: Sequence[float]


def draw(lines: Sequence[Line], unit: Callable[[float], str], *, name: str, alt: str) -> str:
    """A log-log plot against the length, as an `<svg>` element.

    unit: writes a value of the y axis. name: distinguishes the ids of the plots on one page.
    """
    import matplotlib

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 9,
        "text.color": _INK,
        "axes.edgecolor": _LINE,
        "axes.labelcolor": _MUTED,
        "xtick.color": _MUTED,
        "ytick.color": _MUTED,
    }
    with matplotlib.rc_context(settings):
        figure = _plot(lines, unit)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), name, alt)


# The page's light colours, for plots that stand alone.
_LIGHT = {
    "ink": "#16202a",
    "muted": "#566472",
    "line": "#d8dfe6",
    "tilewise": "#0b63c5",
    "own-tiles": "#0a7f86",
    "sdpa": "#b4540a",
    "eager": "#6d5a9e",
}


def standalone(svg: str) -> str:
    """A plot as a file of its own, for slides: with colours in place of the page's variables."""
    for name, colour in _LIGHT.items():
        svg = svg.replace(f"var(--{name})", colour)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{svg}'


def _plot(lines: Sequence[Line], unit: Callable[[float], str]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(3.7, 2.8))
    axes = figure.add_axes((0.165, 0.155, 0.50, 0.80))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for line in lines:
        style = STYLES[line.contestant]
        axes.plot(
            line.lengths,
            line.values,
            color=style.colour,
            linestyle=style.dash,
            marker=style.marker,
            linewidth=style.width,
            markersize=4.5,
            zorder=3 if line.contestant == "Tilewise" else 2,
        )
    ticks = sorted({length for line in lines for length in line.lengths})
    axes.set_xticks(ticks, [_short(length) for length in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    # Within two decades, more than the powers of ten.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: unit(value)))
    axes.grid(color=_LINE, linewidth=0.6)
    axes.tick_params(length=0)
    axes.set_xlabel("length (queries = keys)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _label_ends(axes, lines)
    return figure


def _label_ends(axes: Any, lines: Sequence[Line]) -> None:
    """Each line's name beside its end, pushed apart where ends lie close together."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [(to_axes.transform((x.lengths[-1], x.values[-1])), x) for x in lines if x.values]
    ends.sort(key=lambda end: end[0][1])
    heights = _spread([y for (_, y), _ in ends])
    for ((x, y), line), height in zip(ends, heights, strict=True):
        axes.annotate(
            line.contestant,
            (x, y),
            xytext=(1.04, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=STYLES[line.contestant].colour,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": _LINE, "linewidth": 0.8, "shrinkB": 4},
        )


def _spread(heights: Sequence[float], gap: float = 0.08, top: float = 1.02) -> list[float]:
    """Ascending heights, moved as little as keeps them a gap apart and below the top."""
    spread: list[float] = []
    for height in heights:
        spread.append(max(height, spread[-1] + gap) if spread else height)
    for index in reversed(range(len(spread))):
        spread[index] = min(spread[index], top)
        top = spread[index] - gap
    return spread


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _inline(svg: str, name: str, alt: str) -> str:
    """Only the element itself, its ids made unique, its colours the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", svg)
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for stand_in, colour in _CSS_COLOURS.items():
        svg = svg.replace(stand_in, colour)
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
