"""Code as people have it, converted by one line each: what it computes stays within the budget.

Each snippet is run as it was (`eager`), in fp64 (`exact`), and with its one line changed.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.integrations.hf_models  # noqa: F401  (registers "tilewise" and the exact form)
from tilewise.core.tolerance import assert_within_budget

ROOT = Path(__file__).parents[2]

FINE_TUNE = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for step in range(4):
    ids = torch.randint(3, 97, (2, 12))
    mask = torch.tensor([[1] * 12, [0] * 4 + [1] * 8])
    labels = ids.masked_fill(mask == 0, -100)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
result = torch.stack(losses)
"""

GPT = """
import torch
import torch.nn.functional as F
from torch import nn

class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

torch.manual_seed(0)
model = CausalSelfAttention(32, 4)
result = model(torch.randn(2, 12, 32)).detach()
"""

VARLEN = """
import torch
from flash_attn import flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input

torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 10, 4, 16, dtype=torch.bfloat16).unbind()
mask = torch.tensor([[True] * 10, [True] * 6 + [False] * 4])
tokens, indices, cu_seqlens, longest, _ = unpad_input(q, mask)
keys, values = (unpad_input(x, mask)[0] for x in (k, v))
out = flash_attn_varlen_func(
    tokens, keys, values, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
    max_seqlen_q=longest, max_seqlen_k=longest, dropout_p=0.0, causal=True,
)
result = pad_input(out, indices, 2, 10)
"""


def run(snippet: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """`result` of the snippet; its parameters and inputs are the same numbers in every dtype."""
    names: dict[str, Any] = {}
    if dtype == torch.float64:
        snippet = snippet.replace("\noptimizer", "\nmodel = model.double()\noptimizer")
        call = "model(torch.randn(2, 12, 32))"
        snippet = snippet.replace(call, "model.double()(torch.randn(2, 12, 32).double())")
    exec(snippet, names)
    return names["result"]


def one_line(snippet: str, old: str, new: str) -> str:
    """The snippet with a line of it changed, or with one put before it."""
    assert old in snippet
    changed = snippet.replace(old, new)
    lines = [set(text.strip().splitlines()) for text in (snippet, changed)]
    assert len(lines[1] - lines[0]) == 1
    return changed


def test_fine_tuning_a_transformers_model() -> None:
    """After `register()` (once, at the start of the program)."""
    eager = 'attn_implementation="eager"'
    converted = one_line(FINE_TUNE, eager, 'attn_implementation="tilewise"')
    plain = FINE_TUNE.replace(eager, 'attn_implementation="plain"')
    assert_within_budget(run(converted), run(plain, torch.float64), run(FINE_TUNE))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y = F.scaled_dot_product_attention(",
         "y = torch_sdpa.scaled_dot_product_attention("),
        ("\nimport torch.nn.functional as F",
         "\nimport tilewise.integrations.torch_sdpa as F"),
    ],
    ids=["the call", "the import"],
)  # fmt: skip
def test_model_that_calls_sdpa(old: str, new: str) -> None:
    from tilewise.integrations import torch_sdpa

    converted = one_line(GPT, old, new)
    names: dict[str, Any] = {"torch_sdpa": torch_sdpa}
    exec(converted, names)
    assert_within_budget(names["result"], run(GPT, torch.float64), run(GPT))


def test_varlen_call_of_flash_attn(tmp_path: Path) -> None:
    """One line before it; in a process of its own, since it answers an import."""
    install = "import tilewise.flash_attn; tilewise.flash_attn.install()\n"
    path = tmp_path / "result.pt"
    save = f"import torch; torch.save(result, {str(path)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", install + VARLEN + save], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("tilewise: `import flash_attn` now gives Tilewise")
    got = torch.load(path)
    torch.manual_seed(0)
    device = "cpu"
    qkv = torch.randn(3, 2, 10, 4, 16, dtype=torch.bfloat16, device=device)
    exact, eager = (padded_causal(qkv.to(dtype)) for dtype in (torch.float64, torch.bfloat16))
    assert_within_budget(got, exact, eager)


def padded_causal(qkv: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind())
    scores = (q @ k.mT) * 0.25
    seen = torch.ones(10, 10, dtype=torch.bool, device=q.device).tril()
    wide = torch.promote_types(q.dtype, torch.float32)
    p = scores.to(wide).masked_fill(~seen, -torch.inf).softmax(-1).to(q.dtype)
    out = (p @ v).transpose(1, 2)
    out[1, 6:] = 0.0
    return out
