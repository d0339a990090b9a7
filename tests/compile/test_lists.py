"""What lists of tiles take: counted from the launches that would write them."""

from collections import Counter

import pytest
import torch

import tilewise as tw
from tests.compile.offline import recorded
from tilewise.kernels.structs import MaskData

M, N, H = 1000, 1500, 4

MASKS = {
    "alike for all heads": (tw.causal() | tw.prefix(torch.tensor([100, 7])), 1),
    "of each head": (tw.intervals(*torch.zeros(2, 2, H, M, 3, dtype=torch.int32)), H),
}


@pytest.mark.parametrize("name", MASKS)
def test_lists_have_four_bytes_for_a_pair_of_tiles(name: str) -> None:
    """For heads that the mask tells apart, and once for a tile size of a forward or backward."""
    mask, heads = MASKS[name]
    q = torch.zeros(2, M, H, 64, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.zeros(2, N, H, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    with recorded("sm_90") as records:
        out = tw.attention(q, k, v, mask=mask, backend="triton")
        forward = len(records)
        out.backward(torch.zeros_like(out))
    made = Counter()
    for i, record in enumerate(records):
        if not record.name.startswith("list_"):
            continue
        data = next(x for x in record.arguments if isinstance(x, MaskData))
        block_m, block_n = record.arguments[4:6]
        tiles = (-(-M // block_m), -(-N // block_n))
        own, other = tiles if record.name == "list_key_tiles" else tiles[::-1]
        assert data.lists.element_size() == 4
        assert data.lists.shape == (heads, 2 * own, other + 1)
        assert data.counts.shape == (heads, 2 * own, 2)
        made[(i >= forward, record.name, block_m, block_n)] += 1
    assert [key[1] for key in made] == ["list_key_tiles", "list_query_tiles", "list_key_tiles"]
    assert set(made.values()) == {1}
