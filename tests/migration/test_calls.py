"""The migration pages, row by row: their call and ours are taken from the page and run."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw
import tilewise.flash_attn as flash_attn
from tests.migration import xformers_masks
from tilewise.core.tolerance import assert_within_budget
from tilewise.flash_attn import flash_attn_3

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

DOCS = Path(__file__).parents[2] / "docs"
B, M, N, H, G, D = 2, 33, 47, 8, 2, 16
Names = dict[str, Any]


def rows(page: str) -> list[tuple[str, str]]:
    """Their call and ours, of each row of the page's table."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    section = text.split("## Call by call", 1)[1].split("\n## ", 1)[0]
    found = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0].startswith("`"):
            theirs, ours = (cell.strip("`").replace("\\|", "|") for cell in cells[:2])
            found.append((theirs, ours))
    assert len(found) == sum(line.startswith("| `") for line in section.splitlines()) > 7
    return found


def tensors() -> Names:
    made = {
        "q": torch.randn(B, M, H, D),
        "square": torch.randn(B, N, H, D),
        "k": torch.randn(B, N, H, D),
        "v": torch.randn(B, N, H, D),
        "k2": torch.randn(B, N, G, D),
        "v2": torch.randn(B, N, G, D),
        "qkv": torch.randn(B, M, 3, H, D),
        "row": torch.randn(1, N, H, D),
        "packed_q": torch.randn(M, H, D),
        "packed_k": torch.randn(N, G, D),
        "packed_v": torch.randn(N, G, D),
        "bias": torch.randn(B, H, M, N),
        "slopes": torch.rand(H),
        "seen": torch.rand(B, 1, M, N) > 0.3,
        "lengths": torch.tensor([47, 20]),
        "cu_q": torch.tensor([0, 13, 33]),
        "cu_k": torch.tensor([0, 17, 47]),
        "parts": (torch.randn(3, B, M, H, D), torch.randn(3, B, M, H)),
    }
    made["seen"][..., 0] = True
    made["added"] = made["bias"]
    return made


def cast(names: Names, dtype: torch.dtype) -> Names:
    def one(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(one, x))
        return x.to(dtype) if x.is_floating_point() else x

    return {name: one(x) for name, x in names.items()}


# ---------------------------------------------------------------- what stands for their names


def heads_first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """With the tensors of the test, which are heads last; SDPA in its plain form."""

    def call(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return function(*(x.transpose(1, 2) for x in (q, k, v)), **given).transpose(1, 2)

    return call


def sdpa_names(names: Names) -> Names:
    sdpa = heads_first(scaled_dot_product_attention)
    return {"sdpa": sdpa, "causal_lower_right": causal_lower_right}


def flex_names(names: Names) -> Names:
    device = str(torch.get_default_device())

    def block_mask(mod: Any, m: int = M) -> BlockMask:
        return create_block_mask(mod, None, None, m, N, device=device)

    def document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q < 20) == (k < 20)

    mods: Names = {
        "causal": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q - k).abs() <= 10,
        "prefix": lambda b, h, q, k: k < 5,
        "document": document,
        "softcap": lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0),
        "alibi": lambda score, b, h, q, k: score - names["slopes"][h] * (q - k).abs(),
        "relative": lambda score, b, h, q, k: score + names["bias"][b, h, q, k],
    }
    return mods | {
        "flex_attention": heads_first(flex_attention),
        "block_mask": block_mask,
        "square_mask": lambda mod: block_mask(mod, N),
        "made": block_mask(and_masks(mods["causal"], mods["window"])),
        "and_masks": and_masks,
        "or_masks": or_masks,
    }


def flash_names(names: Names) -> Names:
    return {name: getattr(flash_attn, name) for name in flash_attn.__all__} | {
        "flash_attn_3": flash_attn_3
    }


def xformers_names(names: Names) -> Names:
    attend = xformers_masks.memory_efficient_attention
    return {"xops": SimpleNamespace(memory_efficient_attention=attend), "bias": xformers_masks}


PAGES: dict[str, Callable[[Names], Names]] = {
    "sdpa": sdpa_names,
    "flex_attention": flex_names,
    "flash_attn": flash_names,
    "xformers": xformers_names,
}
ROWS = [(page, *row) for page in PAGES for row in rows(page)]


@pytest.mark.parametrize(("page", "theirs", "ours"), ROWS)
def test_row(page: str, theirs: str, ours: str) -> None:
    """Exact is their call in fp64, eager their call in fp32."""
    names = tensors()
    common = {"torch": torch, "tw": tw}

    def run(call: str, dtype: torch.dtype) -> Tensor:
        given = cast(names, dtype)
        # Of a page's names some mean a tensor in our column and a module in theirs.
        others = PAGES[page](given)
        if call == ours:
            others = {name: x for name, x in others.items() if name not in given}
        torch.manual_seed(1)
        return eval(call, common | given | others)

    exact, eager = run(theirs, torch.float64), run(theirs, torch.float32)
    got = run(ours, torch.float32)
    assert got.shape == exact.shape and exact.dtype == torch.float64
    assert_within_budget(got, exact, eager)
