"""The example of latent attention: both forms within the budget of one function."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


def load() -> Any:
    path = Path(__file__).parents[2] / "examples" / "mla.py"
    spec = importlib.util.spec_from_file_location("mla", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["mla"] = module
    spec.loader.exec_module(module)
    return module


example = load()


def test_both_forms_are_one_function() -> None:
    sizes = example.Sizes(hidden=64, heads=3, rank=32, nope=24, rope=16, value=20)
    found = example.compare(sizes, 41, 8)
    assert 0 < found["absorbed"] <= 1
    assert found["bytes"] == 4 * (32 + 16)


def test_it_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["--heads", "2", "--tokens", "20"])
    said = capsys.readouterr().out
    assert "2 heads, 20 tokens in pages of 64" in said
    assert "2304 bytes a token in fp32" in said
