"""The walk that `tilewise explain` plays is that of Triton's kernels, owner by owner."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.probes import DEVICE, find_places
from tilewise.dense.triton_call import TritonCall
from tilewise.kernels.launch import Config, launch
from tilewise.kernels.masks import key_span, partial_tile, row_span, whole_tile
from tilewise.kernels.placement import FIRST_K_TILE, FIRST_Q_TILE, locate
from tilewise.report.explain import mask_text, walk
from tilewise.report.explain.request import Request

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="explain plans on the CPU")
BLOCK_M, BLOCK_N, WIDTH = 32, 16, 16
MASKS = (
    "full()", "causal()", "window(40, 3)", "documents([0, 50, 50, 131]) & causal()",
    "key_padding(70)", "causal() | prefix(20)", "~window(30, 30)", "chunked(40)",
)  # fmt: skip


@triton.jit
def _order_kernel(order, call, BY_ROWS: tl.constexpr, WIDTH: tl.constexpr, BUILD: tl.constexpr):
    """The tiles of each program, as it comes to them."""
    pid = tl.program_id(0)
    if BY_ROWS:
        seq, h, tile, list_tile = locate(call.place, pid, BUILD.place, FIRST_Q_TILE, True)
        span = key_span(call.mask, seq, h, tile, list_tile, BUILD)
    else:
        seq, h, tile, list_tile = locate(call.place, pid, BUILD.place, FIRST_K_TILE, False)
        span = row_span(call.mask, seq, h, tile, list_tile, BUILD)
    row = order + pid * WIDTH
    for i in range(0, span.n_whole):
        tl.store(row + i, whole_tile(call.mask, span, i, BUILD.mask))
    for i in range(0, span.n_partial):
        tl.store(row + span.n_whole + i, partial_tile(call.mask, span, i, BUILD.mask))


def kernel_order(call: TritonCall, by_rows: bool) -> list[tuple[int, list[int]]]:
    """Of each program that owns something: its first row or key, and those of its tiles."""
    config = Config(BLOCK_M, BLOCK_N, 4, 1)
    plan = call.plan_rows(config) if by_rows else call.plan_keys(config)
    order = torch.full((plan.n_programs, WIDTH), -1, dtype=torch.int32)
    arguments = (order, plan.call, by_rows, WIDTH, call.build(config))
    launch(_order_kernel, (plan.n_programs,), config, arguments, DEVICE)
    own, other = (BLOCK_M, BLOCK_N) if by_rows else (BLOCK_N, BLOCK_M)
    found = []
    for place, tiles in zip(
        find_places(call, by_rows, BLOCK_M, BLOCK_N), order.tolist(), strict=True
    ):
        seq = place.seq
        firsts = (seq.q_first, seq.k_first) if by_rows else (seq.k_first, seq.q_first)
        stored = seq.q_stored if by_rows else seq.k_stored
        if place.tile * own < stored:
            visited = [firsts[1] + other * tile for tile in tiles if tile >= 0]
            found.append((firsts[0] + own * place.tile, visited))
    return found


@pytest.mark.interpreter
@pytest.mark.parametrize("by_rows", [True, False], ids=["queries", "keys"])
@pytest.mark.parametrize("text", MASKS)
def test_order_is_the_kernels(text: str, by_rows: bool) -> None:
    sizes: dict[str, Any] = {"B": 1, "M": 131, "N": 131, "H": 1, "G": 1, "D": 16, "E": 16}
    request = Request(mask=mask_text.read(text), mask_text=text, dtype=torch.float32, **sizes)
    owner = "rows" if by_rows else "keys"
    played = walk._build(request, "", "", owner, BLOCK_M, BLOCK_N, walk._whole_first)
    assert not played.is_merged
    own, other = played.edges.rows, played.edges.keys
    if not by_rows:
        own, other = other, own
    expected = [(own[x], [other[y] for y in cells]) for x, cells in played.visits]
    assert kernel_order(TritonCall(request.piece), by_rows) == expected
