"""A run's file: whole at every moment, since another run may go on with it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_whole(path: Path, document: Mapping[str, Any]) -> None:
    """As JSON, by way of another file: who is ended here leaves the file as it was."""
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    path = path.resolve()
    if path.exists() and not path.is_file():
        # A pipe or a terminal.
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
