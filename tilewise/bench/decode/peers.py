"""Who attends over the same caches, with versions, and why those that are absent are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.mask_leaves import causal
from ...decode.api import attention_with_cache
from ...decode.cache import FLOAT8, KVCache
from ..environment import version_of
from .cases import DecodeCase

Attend = Callable[[Tensor, KVCache], Tensor]

OURS = "Tilewise"


@dataclass(frozen=True)
class DecodePeer:
    """build: from a case to its call. serves: whether it computes such a case."""

    name: str
    build: Callable[[DecodeCase], Attend]
    serves: Callable[[DecodeCase], bool]
    version: str = ""

    @property
    def is_ours(self) -> bool:
        return self.name == OURS


def find_peers(device: torch.device) -> tuple[list[DecodePeer], dict[str, str]]:
    """Ours first, then the peers that are here, and the others with the reason."""
    version = f"torch {torch.__version__}"
    found = [DecodePeer(OURS, _build_ours, lambda case: True)]
    absent: dict[str, str] = {}
    if device.type == "cuda":
        found.append(DecodePeer("SDPA flash (FA2)", _build_flash, _is_sdpa, version))
        try:
            module = import_module("fa3_fwd_interface")
        except ModuleNotFoundError as error:
            absent["FA3"] = f"package fa3-fwd is not installed ({error})"
        # A wheel for another torch or CUDA fails in its own ways.
        except Exception as error:
            absent["FA3"] = f"it cannot be imported: {type(error).__name__}: {error}"
        else:
            name = f"fa3-fwd {version_of('fa3-fwd') or 'of unknown version'}"
            found.append(DecodePeer("FA3", _build_fa3(module), _is_fa3, name))
    else:
        found.append(DecodePeer("SDPA", _build_sdpa, _is_sdpa, version))
        found.append(DecodePeer("eager", _build_eager, _is_sdpa, version))
        absent["FA3"] = "it runs on GPUs alone"
    for name, package in (("FlashInfer", "flashinfer-python"), ("FlashMLA", "flash-mla")):
        found_version = version_of(package)
        absent[name] = (
            f"package {package} is not installed"
            if found_version is None
            else f"there is no adapter for it here ({package} {found_version} is installed)"
        )
    return found, absent


def _build_ours(case: DecodeCase) -> Attend:
    scale = scale_of(case)
    mask = causal()
    return lambda q, cache: attention_with_cache(q, cache, mask=mask, scale=scale)


def scale_of(case: DecodeCase) -> float:
    """Of a latent cache, that of the keys that it stands for."""
    return float((192 if case.is_latent else case.D) ** -0.5)


def _is_sdpa(case: DecodeCase) -> bool:
    """It knows no pages, no lengths and no float8, and its causal mask is top-left."""
    is_plain = case.page is None and case.M == 1 and not case.is_latent
    return is_plain and case.storage not in FLOAT8


def _build_sdpa(case: DecodeCase) -> Attend:
    has_groups = case.H != case.G

    def attend(q: Tensor, cache: KVCache) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, cache.k, cache.v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=has_groups).transpose(1, 2)

    return attend


def _build_flash(case: DecodeCase) -> Attend:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inner = _build_sdpa(case)

    def attend(q: Tensor, cache: KVCache) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return inner(q, cache)

    return attend


def _build_eager(case: DecodeCase) -> Attend:
    group, scale = case.H // case.G, scale_of(case)

    def attend(q: Tensor, cache: KVCache) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, cache.k, cache.v))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        p = (q @ k.mT * scale).softmax(-1)
        return (p @ v).transpose(1, 2)

    return attend


def _is_fa3(case: DecodeCase) -> bool:
    return case.storage not in FLOAT8 and not case.is_latent


def _build_fa3(module: Any) -> Callable[[DecodeCase], Attend]:
    def build(case: DecodeCase) -> Attend:
        def attend(q: Tensor, cache: KVCache) -> Tensor:
            out = module.flash_attn_with_kvcache(
                q, cache.k, cache.v, cache_seqlens=cache.lengths, page_table=cache.block_table,
                causal=True,
            )  # fmt: skip
            return out[0] if isinstance(out, tuple) else out

        return attend

    return build
