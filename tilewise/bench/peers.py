"""The contestants: Tilewise and what a user of PyTorch would call instead, behind one adapter.

Those that only a GPU runs are in `gpu/peers.py`.

All get the same tensors, `[B, M, H, D]` as projections give them; one that takes `[B, H, M, D]`
gets them transposed, as models hand them over. SDPA also runs on copies in its own layout, made
before the clock starts, in a row of its own. What depends on the mask alone is made before it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.backends import BackendChoice
from ..dense import torch_flash
from ..dense.api import attention, explain_backend
from .cases import BACKWARD, BOTH, FORWARD, HOST, Case

# Takes q, k, v and, by keyword, the terms of the case (`Case.terms`).
Attend = Callable[..., Tensor]
Call = Callable[[], tuple[Tensor, ...]]

# The op to which a piece is handed on the CPU; seeing it run decides the label.
TORCH_FLASH_OP = "aten::_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True)
class Peer:
    """One contestant.

    build: makes the function that attends for a case. heads_first: it takes `[B, H, M, D]`, else
    `[B, M, H, D]`. is_copied: it takes copies in its layout instead of views. serves: whether the
    case is a question for it. scores_copies: how many `[B, H, M, N]` tensors it holds at once in
    the forward pass. keeps_grad: its forward is called with gradients on even where none are
    asked for, so that what it compiles serves both. version: of the package that it comes from.
    backend: the one that it asks for, of ours.
    """

    name: str
    build: Callable[[Case, torch.device], Attend]
    heads_first: bool = True
    is_copied: bool = False
    serves: Callable[[Case, torch.device], bool] = lambda case, device: True
    scores_copies: int = 0
    is_ours: bool = False
    keeps_grad: bool = False
    version: str = ""
    backend: str = "auto"

    def scores_bytes(self, case: Case) -> int:
        """What the score matrices take at their peak; backward holds about as many again."""
        copies = self.scores_copies * (2 if case.has_gradients else 1)
        return copies * case.scores_bytes


def bind(
    peer: Peer, case: Case, device: torch.device, drawn: Sequence[Tensor] | None = None
) -> Call:
    """A call without arguments, ready to be timed.

    It returns out, or out and the gradients (of q, k, v and the learned terms), or for the
    backward direction the gradients alone, of a forward that ran here; all in the peer's layout.
    drawn: what `case.draw` gave, to be shared; drawn here where it is not given.
    """
    attend = peer.build(case, device)
    terms = case.terms(device)
    *inputs, dout = case.draw(device) if drawn is None else drawn
    if peer.heads_first:
        inputs, dout = [x.transpose(1, 2) for x in inputs], dout.transpose(1, 2)
    if peer.is_copied:
        inputs, dout = [x.contiguous() for x in inputs], dout.contiguous()
    if case.direction in (FORWARD, HOST) and not peer.keeps_grad:

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (attend(*inputs, **terms),)

        return forward
    inputs = [x.detach().requires_grad_() for x in inputs]
    leaves = [*inputs, *(terms[name].requires_grad_() for name in case.learned)]
    if case.direction == BACKWARD:
        stored = attend(*inputs, **terms)
        return lambda: torch.autograd.grad(stored, leaves, dout, retain_graph=True)
    if case.direction != BOTH:
        return lambda: (attend(*inputs, **terms),)

    def forward_and_backward() -> tuple[Tensor, ...]:
        out = attend(*inputs, **terms)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    return forward_and_backward


def explain_choice(case: Case, device: torch.device, backend: str = "auto") -> BackendChoice:
    """Which backend a call of `tilewise.attention` for this case runs on."""
    short = case.verified_form()
    q, k, v, _ = short.draw(device)
    mask, terms = short.build_mask(device), short.terms(device)
    return explain_backend(q, k, v, mask=mask, backend=backend, **terms)


# Peers that people may look for in the table, and why they are not in it.
MISSING = {
    "FlexAttention": "is timed on a GPU only; on a CPU torch.compile needs a C++ compiler",
    "FlashAttention 3 and 4": "run on CUDA GPUs only",
}


def _build_tilewise(case: Case, device: torch.device) -> Attend:
    mask = case.build_mask(device)
    return lambda q, k, v, **terms: attention(q, k, v, mask=mask, **terms)


def _build_pure_tiled(case: Case, device: torch.device) -> Attend:
    mask = case.build_mask(device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch_flash.disabled():
            return attention(q, k, v, mask=mask, backend="tiled")

    return attend


def _build_sdpa(case: Case, device: torch.device) -> Attend:
    is_causal = case.mask == "causal"
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _build_masked_sdpa(case: Case, device: torch.device) -> Attend:
    visible = _visible(case, device)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def _build_eager(case: Case, device: torch.device) -> Attend:
    hidden = None if case.mask == "full" else ~_visible(case, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.softmax(scores, dim=-1) @ v

    return attend


def _visible(case: Case, device: torch.device) -> Tensor:
    """Bool `[M, N]`, from its definition rather than from a Tilewise mask."""
    m = torch.arange(case.length, device=device)[:, None]
    n = torch.arange(case.length, device=device)
    visible = n <= m
    return visible & (n >= m - case.window) if case.mask == "window" else visible


def _is_handed_on(case: Case, device: torch.device) -> bool:
    return device.type == "cpu" and case.mask in ("full", "causal")


TILEWISE = Peer("Tilewise", _build_tilewise, heads_first=False, is_ours=True)
PURE_TILED = Peer(
    "Tilewise, own tiles",
    _build_pure_tiled,
    heads_first=False,
    serves=_is_handed_on,
    is_ours=True,
)
SDPA = Peer("SDPA", _build_sdpa, serves=lambda case, device: case.mask != "window")
COPIED_SDPA = Peer(
    "SDPA, heads-first copies",
    _build_sdpa,
    is_copied=True,
    serves=lambda case, device: case.mask != "window",
)
MASKED_SDPA = Peer(
    "SDPA, bool mask", _build_masked_sdpa, serves=lambda case, device: case.mask == "window"
)
EAGER = Peer("eager", _build_eager, scores_copies=3)

PEERS = (TILEWISE, PURE_TILED, SDPA, COPIED_SDPA, MASKED_SDPA, EAGER)
BASELINES = (SDPA.name, MASKED_SDPA.name)
