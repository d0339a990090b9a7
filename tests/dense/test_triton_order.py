"""In which order the triton kernels' programs own tiles: how evenly a GPU is busy to the end.

Programs start in the order of their numbers, each where the first one ended. Tiles of the other
axis are what a program takes time for.
"""

from __future__ import annotations

import heapq
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tests.compile.offline import recorded
from tilewise.bench.gpu.grids import gpu_grid
from tilewise.core.mask import UNBOUNDED
from tilewise.core.positions import Positions
from tilewise.dense.config import backward_config, forward_config
from tilewise.dense.piece import Piece, Terms
from tilewise.dense.triton_call import TritonCall
from tilewise.dense.triton_placement import DOCUMENTS, PACKED
from tilewise.kernels.launch import Config

PROCESSORS, TOKENS = 132, 16384
LENGTHS = next(iter(gpu_grid("documents").cases)).documents
# Of the forward, of dK and dV, and of dQ: how many programs one processor runs at a time.
RESIDENT = {64: (5, 2, 3), 128: (4, 3, 1)}
KINDS = ("forward", "keys", "rows")


def tiles_of_document(length: int, by_rows: bool, config: Config) -> list[int]:
    """How many tiles of the other axis each own tile of a causal document visits."""
    if by_rows:
        ends = range(config.block_m, length + config.block_m, config.block_m)
        return [-(-min(end, length) // config.block_n) for end in ends]
    blocks = -(-length // config.block_m)
    return [blocks - n0 // config.block_m for n0 in range(0, length, config.block_n)]


def times(call: TritonCall, by_rows: bool, config: Config, lengths: list[int]) -> list[int]:
    """Of each program, in the order in which they start."""
    plan = call.plan_rows(config) if by_rows else call.plan_keys(config)
    tiles = [x for length in lengths for x in tiles_of_document(length, by_rows, config)]
    place: Any = plan.call.place
    n_tiles, together = ((x - 3) >> 2 for x in (place.n_tiles, place.together))
    tiles += [0] * (n_tiles - len(tiles))
    n_heads = plan.n_programs // n_tiles
    found = []
    # As `placement.locate` has it, where the interpreter holds it to that.
    for first in range(0, n_heads, together):
        size = min(together, n_heads - first)
        order = reversed(tiles) if by_rows else tiles
        found += [x for x in order for _ in range(size)]
    assert len(found) == plan.n_programs
    return found


def unevenness(found: list[int], slots: int) -> float:
    """The time of the last program's end over what it would be if all were busy until then."""
    free = [0] * slots
    for x in found:
        heapq.heapreplace(free, free[0] + x)
    return max(free) * slots / sum(found)


def call_of(mask: tw.Mask, D: int, *, is_packed: bool = False, B: int = 1) -> TritonCall:
    H, M = 2048 // D, TOKENS // B
    q = torch.empty(B, M, H, D, dtype=torch.bfloat16, device="meta")
    cu = torch.tensor([0, *LENGTHS]).cumsum(0) if is_packed else None
    n = len(LENGTHS) if is_packed else B
    at = Positions(n, H, M, M, cu_seqlens_q=cu, cu_seqlens_k=cu)
    return TritonCall(Piece(q, q, q, mask, at, Terms(1.0)))


def worst(call: TritonCall, kind: str, D: int, lengths: list[int]) -> float:
    backward = backward_config(call.key)
    config = {
        "forward": forward_config(call.key),
        "keys": backward.keys[0].config,
        "rows": backward.rows,
    }[kind]
    slots = PROCESSORS * RESIDENT[D][KINDS.index(kind)]
    return unevenness(times(call, kind != "keys", config, lengths), slots)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1], LENGTHS[::2] + LENGTHS[1::2]])
@pytest.mark.parametrize("is_packed", [False, True])
def test_uneven_documents_end_together(
    D: int, kind: str, lengths: tuple[int, ...], is_packed: bool
) -> None:
    mask = tw.causal()
    if not is_packed:
        mask &= tw.documents(torch.tensor([0, *lengths]).cumsum(0))
    with recorded("sm_90"):
        call = call_of(mask, D, is_packed=is_packed)
        assert call.place_kind == (PACKED if is_packed else DOCUMENTS)
        assert worst(call, kind, D, list(lengths)) < 1.05


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("B", [1, 4])
def test_causal_calls_end_together(D: int, kind: str, B: int) -> None:
    with recorded("sm_90"):
        assert worst(call_of(tw.causal(), D, B=B), kind, D, [TOKENS // B]) < 1.03


def test_heads_take_turns_as_far_as_the_cache_goes() -> None:
    with recorded("sm_90"):
        causal = call_of(tw.causal(), 128)
        assert causal.band is not None and causal.band.left == UNBOUNDED
        # 8 MiB of K and V a head, as of Q and dO.
        assert causal.count_together(by_rows=True) == causal.count_together(by_rows=False) == 4
        assert call_of(tw.causal(), 128, B=16).count_together(by_rows=True) == 64
        # All tiles are alike.
        assert call_of(tw.full(), 128).count_together(by_rows=True) == 1
