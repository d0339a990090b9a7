"""MkDocs hooks: equations become MathML, which browsers draw and screen readers read alone."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

# Display equations first; an equation begins and ends without a space.
_DISPLAY = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
_INLINE = re.compile(r"(?<![\\$\w])\$(?![\s$])([^$\n]+(?:\n[^$\n]+)?)(?<!\s)\$(?![\w$])")
_CODE = re.compile(r"(^(```|~~~).*?^\2[^\n]*$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Every equation outside code."""
    parts = _CODE.split(markdown)
    # Of each match the split gives the text, the code and the fence's sign.
    for i in range(0, len(parts), 3):
        parts[i] = render_equations(parts[i])
    return "".join(part for i, part in enumerate(parts) if i % 3 != 2)


def render_equations(text: str) -> str:
    text = _DISPLAY.sub(lambda found: _math(found[1], "block"), text)
    return _INLINE.sub(lambda found: _math(found[1], "inline"), text)


def _math(tex: str, display: str) -> str:
    made = convert(" ".join(tex.split()), display=display)
    # In a span, since Markdown takes a line that begins with the element itself for a block.
    return f"\n\n{made}\n\n" if display == "block" else f"<span>{made}</span>"
