"""The combinations of flash-attn 2's own tests, at their head dims and lengths."""

import os
from itertools import count, cycle
from typing import Any

import pytest
import torch

from tests.flash_attn.checks import check, make_call

HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = ((113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1023, 1024))
# Heads, as multi-head, multi-query and grouped.
HEADS = ((6, 6), (6, 1), (6, 2))
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window_size": (37, 19)},
    {"causal": True, "window_size": (64, -1), "deterministic": True},
    {"causal": True, "softcap": 50.0},
    {"causal": True, "alibi_slopes": "B H"},
    {"dropout_p": 0.17, "causal": True},
    {"dropout_p": 0.17, "window_size": (50, 50)},
    {"alibi_slopes": "H", "window_size": (-1, 12)},
)
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func")


def grid(device: str) -> list[Any]:
    """On a GPU every head dim with a third of the options, every option with a third of the head
    dims; all pairs with TILEWISE_WHOLE_GRID=1: each compiles kernels of its own. On the CPU each of
    them once, at short lengths.
    """
    lengths = LENGTHS if device == "cuda" else LENGTHS[:4]
    # Turned on now and then, so that no two of them always come together.
    heads = (HEADS[(k + k // 3) % 3] for k in count())
    functions = (FUNCTIONS[(k + k // 9) % 3] for k in count())
    parts = (cycle(lengths), heads, functions, cycle(("float16", "bfloat16")))
    if device == "cuda":
        is_whole = os.environ.get("TILEWISE_WHOLE_GRID") == "1"
        pairs = [
            (d, options)
            for i, d in enumerate(HEAD_DIMS)
            for j, options in enumerate(OPTIONS)
            if is_whole or (i + j) % 3 == 0
        ]
    else:
        pairs = list(zip(HEAD_DIMS, cycle(OPTIONS), strict=False))
    return list(zip(pairs, *parts, strict=False))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("cell", grid(metafunc.config.getoption("--device")), ids=str)


def test_cell(cell: Any) -> None:
    (d, options), lengths, heads, function, dtype = cell
    packed = ((lengths[0] - 30, 0, 30), (lengths[1] - 50, 20, 30))
    call = make_call(
        function, options, getattr(torch, dtype), shape=lengths, lengths=packed, heads=heads, d=d
    )
    check(call)
