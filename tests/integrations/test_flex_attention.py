"""What FlexAttention users have: mask_mods and BlockMasks, and what their own call computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)

import tilewise as tw
from tests.helpers import check_call, on_backend
from tilewise.core.tolerance import assert_within_budget

attention = on_backend(tw.attention)
Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Uncompiled, which is how a mask is tried, PyTorch says so each time.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

B, H, M, N, D = 2, 4, 100, 150, 16
DOCUMENTS = torch.arange(N) // 40
LENGTHS = torch.tensor([150, 61])
BIAS = torch.rand(4, 7) > 0.3


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() <= 20


def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS.to(q.device)[q] == DOCUMENTS.to(q.device)[k]


def padded(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < LENGTHS.to(q.device)[b]


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return BIAS.to(q.device)[h, (q + k) % 7]


def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < 5


def nothing_asked(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=q.device)


MODS: dict[str, Mod] = {
    "causal": causal,
    "window": window,
    "documents": and_masks(same_document, causal),
    "padded": padded,
    "by head": by_head,
    "prefix": or_masks(causal, prefix),
    "all": nothing_asked,
}


def block_mask(mod: Mod, m: int = M, n: int = N, size: Any = 128) -> BlockMask:
    device = str(torch.get_default_device())
    axes = (B if mod is padded else None, H if mod is by_head else None)
    return create_block_mask(mod, *axes, m, n, device=device, BLOCK_SIZE=size)


def dense(mod: Mod, m: int = M, n: int = N) -> Tensor:
    index = torch.meshgrid(*(torch.arange(x) for x in (B, H, m, n)), indexing="ij")
    return mod(*index).expand(B, H, m, n)


@pytest.mark.parametrize("size", [128, 16, (32, 64)], ids=str)
@pytest.mark.parametrize("name", MODS)
def test_masks_say_the_same(name: str, size: Any) -> None:
    expected = dense(MODS[name])
    device = expected.device
    for mask in (
        tw.from_block_mask(block_mask(MODS[name], size=size)),
        tw.from_function(MODS[name]),
    ):
        assert torch.equal(mask.dense(B, H, M, N, device=device), expected)


@pytest.mark.parametrize("name", MODS)
def test_attention_is_flex_attentions(name: str) -> None:
    """Flex in the inputs' dtype is the eager form. A row that sees nothing is 0 in both."""
    made = block_mask(MODS[name])
    qkv = [torch.randn(B, length, heads, D) for length, heads in ((M, H), (N, 2), (N, 2))]
    eager = flex_attention(*(x.transpose(1, 2) for x in qkv), block_mask=made, enable_gqa=True)
    wide = [x.double() for x in qkv]
    exact = tw.attention(*wide, mask=tw.from_function(MODS[name]), backend="reference")
    got = attention(*qkv, mask=tw.from_block_mask(made))
    assert_within_budget(got, exact, eager.transpose(1, 2))


def test_table_that_is_indexed_index_by_index() -> None:
    """Right where a mask_mod is asked with scalars; a predicate of tensors says what to do."""
    table = torch.rand(B, M) > 0.5

    def chained(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return table[b][q] & (q >= k)

    device = str(torch.get_default_device())
    made = create_block_mask(chained, B, None, M, N, device=device)
    expected = table[:, None, :, None] & dense(causal)
    assert torch.equal(tw.from_block_mask(made).dense(B, H, M, N, device=device), expected)
    with pytest.raises(ValueError, match=r"index a table with all its indices at once"):
        tw.from_function(lambda b, h, m, n: table[b][m * 0]).dense(1, H, M, N, device=device)


def test_gradients_and_a_shorter_call() -> None:
    """A BlockMask made for more queries and keys than there are (case C049)."""
    mask = tw.from_block_mask(block_mask(and_masks(window, causal), 256, 256))
    tensors = {"q": torch.randn(2, 70, 4, D), "k": torch.randn(2, 90, 2, D)}
    tensors["v"] = torch.randn(2, 90, 2, D)
    check_call("attention", tensors, mask=mask)
    check_call("attention_partial", tensors, mask=mask & tw.key_padding(50))


def test_blocks_left_out_are_hidden() -> None:
    """Even those that mask_mod would show; and one in the full list is seen whole."""
    counts, lists = torch.tensor([[[1, 1]]]), torch.tensor([[[[1, 7], [0, 7]]]])
    full_counts, full_lists = torch.tensor([[[0, 1]]]), torch.tensor([[[[7, 7], [1, 7]]]])
    made = BlockMask.from_kv_blocks(
        counts.int(), lists.int().clamp(max=1), full_counts.int(), full_lists.int().clamp(max=1),
        BLOCK_SIZE=8, mask_mod=causal, seq_lengths=(16, 16),
    )  # fmt: skip
    seen = tw.from_block_mask(made).dense(1, 1, 16, 16, device=counts.device)[0, 0]
    assert not seen[:8].any()
    assert torch.equal(seen[8:, :8], torch.ones(8, 8, dtype=torch.bool))
    assert seen[8:, 8:].all()


def test_what_does_not_fit_raises() -> None:
    with pytest.raises(ValueError, match=r"must be a BlockMask.*got function"):
        tw.from_block_mask(causal)  # type: ignore[arg-type]
    mask = tw.from_block_mask(block_mask(causal, 128, 128))
    q = torch.randn(1, 130, 2, 8)
    with pytest.raises(ValueError, match="made for 128 queries and 128 keys, got at least"):
        attention(q, q, q, mask=mask)
    device = str(torch.get_default_device())
    mask = tw.from_block_mask(create_block_mask(causal, 3, 2, 128, 128, device=device))
    q = torch.randn(4, 128, 2, 8)
    with pytest.raises(ValueError, match=r"made for 3 batch rows and 2 heads.*got 4 and 2"):
        attention(q, q, q, mask=mask)
