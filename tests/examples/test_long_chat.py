"""The example of a long text: a paged cache writes what eager writes, in less memory."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


def load() -> Any:
    path = Path(__file__).parents[2] / "examples" / "long_chat.py"
    spec = importlib.util.spec_from_file_location("long_chat", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["long_chat"] = module
    spec.loader.exec_module(module)
    return module


example = load()


def test_both_ways_write_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    model = example.train(2)
    paged, eager = example.compare(model, 700, 12, 16).values()
    assert len(paged.text) == 12 and paged.text == eager.text
    # Four heads' scores of 700 x 700 in fp32 are 7.8 MB.
    assert paged.peak_bytes < eager.peak_bytes
    assert paged.cache_bytes >= eager.cache_bytes
    assert "trained 2 steps" in capsys.readouterr().out
