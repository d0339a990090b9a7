"""The contestants on a GPU, with their versions, and why those that are absent are.

Each gets `[B, M, H, D]` tensors as projections give them; PyTorch's own get them transposed, as
views, and FlashAttention 3 and 4 take them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.mask_leaves import causal
from ...dense.api import attention, attention_varlen
from .. import peers as common
from ..cases import HOST_GRAD, Case
from ..environment import version_of
from ..peers import Attend, Peer

FLASH, CUDNN, EFFICIENT = "SDPA flash (FA2)", "SDPA cuDNN", "SDPA memory-efficient"
FLEX, EAGER, FA3, FA4 = "FlexAttention", "eager", "FA3", "FA4"
# Whatever SDPA itself takes for the call: what a user's line costs the host.
SDPA_AUTO = "SDPA"
# As options name them.
SHORT_NAMES = {
    "fa2": FLASH, "cudnn": CUDNN, "efficient": EFFICIENT, "flex": FLEX, "eager": EAGER, "fa3": FA3,
    "fa4": FA4,
}  # fmt: skip

Build = Callable[[Case, torch.device], Attend]


@dataclass(frozen=True)
class Roster:
    """Who takes part. ours: the first is judged. absent: peers that are not here, and why."""

    ours: tuple[Peer, ...]
    peers: tuple[Peer, ...]
    absent: dict[str, str]


def find_roster(backends: Sequence[str] = ("auto",), without: Sequence[str] = ()) -> Roster:
    """Ours on the backends that are named, padded and packed, and every peer that is here.

    without: names of peers that were not asked for.
    """
    ours = [make(name) for make in (_named_backend, _packed) for name in backends]
    found: list[Peer] = [*_torch_peers()]
    absent = dict.fromkeys(without, "not asked for")
    for name, module, package, make in (
        (FA3, "fa3_fwd_interface", "fa3-fwd", _make_fa3),
        (FA4, "flash_attn.cute", "flash-attn-4", _make_fa4),
    ):
        if name in without:
            continue
        try:
            loaded = import_module(module)
        except ModuleNotFoundError as error:
            absent[name] = f"package {package} is not installed ({error})"
        # A wheel for another torch or CUDA fails in its own ways.
        except Exception as error:
            absent[name] = f"{module} cannot be imported: {type(error).__name__}: {error}"
        else:
            found.append(make(loaded, f"{package} {version_of(package) or 'of unknown version'}"))
    return Roster(tuple(ours), tuple(peer for peer in found if peer.name not in without), absent)


def _named_backend(name: str) -> Peer:
    if name == "auto":
        return common.TILEWISE

    def build(case: Case, device: torch.device) -> Attend:
        mask = case.build_mask(device)
        return lambda q, k, v, **terms: attention(q, k, v, mask=mask, backend=name, **terms)

    return Peer(f"Tilewise, {name}", build, heads_first=False, is_ours=True, backend=name)


def _packed(name: str) -> Peer:
    """The same documents in a packed call, on a backend."""

    def build(case: Case, device: torch.device) -> Attend:
        edges, longest = case.cu_seqlens(device), max(case.documents)
        options: dict[str, Any] = {"cu_seqlens_q": edges, "max_seqlen_q": longest}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = (x.flatten(0, 1) for x in (q, k, v))
            return attention_varlen(*rows, mask=causal(), **options, backend=name).unflatten(
                0, q.shape[:2]
            )

        return attend

    return Peer(
        "Tilewise, packed" if name == "auto" else f"Tilewise, {name}, packed",
        build,
        heads_first=False,
        serves=lambda case, device: case.mask == "documents",
        is_ours=True,
        backend=name,
    )


def _is_dense(case: Case, device: torch.device) -> bool:
    return case.mask in ("full", "causal") and not case.feature


def _build_sdpa(kernel: str) -> Build:
    """SDPA held to one of its kernels, so that what is timed is what the name says."""

    def build(case: Case, device: torch.device) -> Attend:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, kernel)
        is_causal, has_groups = case.mask == "causal", case.kv_heads != case.H

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=is_causal, enable_gqa=has_groups
                )

        return attend

    return build


def _build_flex(case: Case, device: torch.device) -> Attend:
    return _compile_flex(case.mask, case.shape, case.length, device)


@lru_cache(maxsize=1)
def _compile_flex(mask: str, shape: str, length: int, device: torch.device) -> Attend:
    """FlexAttention for one shape; both of its directions come one after the other and share it."""
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # The backward is timed alone, again and again on one graph, so nothing may be donated.
    torch._functorch.config.donated_buffer = False
    # Dynamo gives up on a function after eight shapes; what was compiled before is not needed.
    torch._dynamo.reset()
    visible = None
    if mask == "causal":
        visible = create_block_mask(
            lambda b, h, m, n: m >= n, None, None, length, length, device=device
        )
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=visible)


def _is_worth_compiling(case: Case, device: torch.device) -> bool:
    # Seconds of compilation for a shape.
    return _is_dense(case, device) and not case.G and case.length > 1024


def _torch_peers() -> list[Peer]:
    version = f"torch {torch.__version__}"
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return [
        Peer(FLASH, _build_sdpa("FLASH_ATTENTION"), serves=_is_dense, version=version),
        Peer(
            CUDNN,
            _build_sdpa("CUDNN_ATTENTION"),
            serves=_is_dense,
            version=f"{version}, cuDNN {cudnn}",
        ),
        Peer(EFFICIENT, _build_sdpa("EFFICIENT_ATTENTION"), serves=_is_dense, version=version),
        Peer(FLEX, _build_flex, serves=_is_worth_compiling, keeps_grad=True, version=version),
        replace(common.EAGER, serves=_is_dense, version=version),
        replace(common.SDPA, name=SDPA_AUTO, serves=_is_dense, version=version),
    ]


def _is_flash(case: Case, device: torch.device) -> bool:
    return case.mask in ("full", "causal", "window", "documents") and not case.feature


def _is_forward_flash(case: Case, device: torch.device) -> bool:
    return _is_flash(case, device) and not case.has_gradients and case.direction != HOST_GRAD


def _is_fa4(case: Case, device: torch.device) -> bool:
    # Each other head dim costs it seconds of compilation.
    return _is_flash(case, device) and case.D in (64, 128, 256)


def _make_fa3(module: Any, version: str) -> Peer:
    build = _build_flash_attn(module)
    return Peer(FA3, build, heads_first=False, serves=_is_forward_flash, version=version)


def _make_fa4(module: Any, version: str) -> Peer:
    return Peer(FA4, _build_flash_attn(module), heads_first=False, serves=_is_fa4, version=version)


def _build_flash_attn(module: Any) -> Build:
    """From a module with FlashAttention's functions; 3 returns out, 4 a tuple that begins so."""

    def build(case: Case, device: torch.device) -> Attend:
        if case.mask == "documents":
            return _attend_packed(module, case, device)
        options: dict[str, Any] = {"causal": case.mask != "full"}
        if case.mask == "window":
            options["window_size"] = (case.window, 0)
        return lambda q, k, v: _first(module.flash_attn_func(q, k, v, **options))

    return build


def _attend_packed(module: Any, case: Case, device: torch.device) -> Attend:
    edges, longest = case.cu_seqlens(device), max(case.documents)
    options = {
        "cu_seqlens_q": edges,
        "cu_seqlens_k": edges,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "causal": True,
    }

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out = _first(module.flash_attn_varlen_func(*rows, **options))
        return out.unflatten(0, q.shape[:2])

    return attend


def _first(result: Any) -> Tensor:
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out
