"""Which backend runs a call over a cache, and why not another."""

from __future__ import annotations

import torch

from ..core.backends import (
    BackendChoice,
    check_backend_name,
    describe_device,
    hopper_problem,
    triton_problem,
)
from ..dense.choice import LEAST_SCALE
from .cache import FLOAT8
from .call import CacheCall

BACKENDS = ("reference", "tiled", "triton", "hopper")
LARGEST_DIM = 1024
# What an int32 index inside the kernels can hold, with room for the sums of a few.
MOST_ROWS = 1 << 28
# Columns of the latents and of the rotated keys that the hopper backend reads, and the slots that
# it copies at once.
LATENT, ROTATED, HOPPER_TILE = 512, 64, 32
# Of keys and values that it splits; of those that it does not, the widest, and what pages have to
# be multiples of: the rows that lie together in shared memory.
HOPPER_DIMS, WIDEST_ON_HOPPER, ATOM = (64, 128), 256, 8
# Queries of a sequence that make a prefill, a tile of them, and how many tiles fill a large GPU.
LEAST_QUERIES, QUERY_TILE, ENOUGH_PROGRAMS = 64, 128, 120


def choose(op: str, backend: str, call: CacheCall) -> str:
    """The name of the backend that runs a call.

    Raises: ValueError for a name that there is not, NotImplementedError where the named one cannot.
    """
    check_backend_name(op, backend, BACKENDS)
    if backend == "auto":
        if call.q.device.type in ("cpu", "meta"):
            return "tiled"
        if is_faster_on_hopper(call) and not why_not_hopper(call):
            return "hopper"
        return "tiled" if why_not_triton(call) else "triton"
    if backend == "triton" and (problem := why_not_triton(call)):
        raise NotImplementedError(f"{op}: backend 'triton' {problem}; use backend='tiled'.")
    if backend == "hopper" and (problem := why_not_hopper(call)):
        raise NotImplementedError(f"{op}: backend 'hopper' {problem}; use backend='triton'.")
    return backend


def why_not_triton(call: CacheCall) -> str:
    """Why the triton backend cannot run a call, as a verb phrase; empty where it can."""
    q, cache = call.q, call.cache
    if q.device.type == "meta":
        return ""
    if q.dtype == torch.float64:
        return "computes float16, bfloat16, float32, not float64"
    # Three products for one of fp32 leave no registers for more.
    largest = 256 if q.dtype == torch.float32 else LARGEST_DIM
    D, E = cache.k.shape[3], cache.v.shape[3]
    if max(D, E) > largest:
        return f"takes head dims up to {largest} for {q.dtype}, got {D} and {E}"
    if cache.capacity >= MOST_ROWS or q.shape[-3] >= MOST_ROWS:
        return f"counts rows up to {MOST_ROWS}, got {cache.capacity} and {q.shape[-3]}"
    if cache.k.stride(-1) != 1 or cache.v.stride(-1) != 1:
        return "reads caches whose head dims are contiguous"
    problem = triton_problem(q.device)
    if problem:
        return problem
    from .triton_call import SplitMask

    if SplitMask.of(call.mask) is None:
        from .dense_call import why_not_dense

        problem = why_not_dense(call)
        if problem:
            return f"takes only windows, key ranges and trees as masks, for any other {problem}"
    return _float8_problem(call)


def why_not_hopper(call: CacheCall) -> str:
    """Why the hopper backend cannot run a call, as `why_not_triton`."""
    q, cache, terms = call.q, call.cache, call.terms
    # What most calls fail by is asked first.
    if not is_latent(call) and max(cache.k.shape[3], cache.v.shape[3]) > WIDEST_ON_HOPPER:
        widest = f"head dims up to {WIDEST_ON_HOPPER}"
        return f"takes {widest}, and latent caches of {LATENT} and {ROTATED} columns"
    problem = hopper_problem(q.device)
    if problem:
        return problem
    if q.dtype not in (torch.float16, torch.bfloat16) or cache.k.dtype != q.dtype:
        return f"computes float16 and bfloat16, got {q.dtype} over {cache.k.dtype}"
    tile = HOPPER_TILE if is_latent(call) else ATOM
    if cache.is_paged and cache.k.shape[1] % tile:
        return f"reads pages of multiples of {tile} slots, got {cache.k.shape[1]}"
    if not (_is_copied_by_tma(cache.k) and _is_copied_by_tma(cache.v)):
        return "reads caches whose rows begin at multiples of 16 bytes"
    if terms.bias is not None:
        return "adds no bias to scores"
    problem = (_term_problem(call) if is_latent(call) else "") or why_not_triton(call)
    if problem:
        return problem
    from .triton_call import SplitMask

    mask = SplitMask.of(call.mask)
    is_band = mask is not None and mask.tree is None
    return "" if is_band else "takes only windows and key ranges as masks"


def _term_problem(call: CacheCall) -> str:
    """What of a score only the kernel for prefills adds."""
    terms = call.terms
    if terms.softcap is not None or terms.alibi_slopes is not None:
        return "adds no softcap or ALiBi to scores"
    if terms.scale <= LEAST_SCALE:
        return f"takes scales above {LEAST_SCALE}, got {terms.scale}"
    return ""


def _split_problem(call: CacheCall) -> str:
    """What the kernel that splits the keys of a cache that is not latent does not do."""
    D, E = call.cache.k.shape[3], call.cache.v.shape[3]
    if D != E or D not in HOPPER_DIMS:
        dims = " and ".join(map(str, HOPPER_DIMS))
        return f"takes head dims {dims}, and latent caches of {LATENT} and {ROTATED} columns"
    tile = 2 * HOPPER_TILE
    if call.cache.is_paged and call.cache.k.shape[1] % tile:
        return f"reads pages of multiples of {tile} slots, got {call.cache.k.shape[1]}"
    return _term_problem(call)


def is_prefill(call: CacheCall) -> bool:
    """Whether a call of the hopper backend over no latent cache is one for the kernel that does not
    split keys: of many queries, or of what the one that splits them does not do."""
    return bool(_split_problem(call)) or has_many_queries(call)


def has_many_queries(call: CacheCall) -> bool:
    """Whether queries alone may fill a GPU, and nobody asked how keys are split."""
    is_free = call.splits.count is None and not call.splits.is_fixed
    return is_free and call.most_queries >= LEAST_QUERIES


def is_latent(call: CacheCall) -> bool:
    """Whether a cache is one of latents as the hopper backend reads them."""
    k, v = call.cache.k, call.cache.v
    is_shaped = (k.shape[3], v.shape[3], k.shape[2]) == (LATENT + ROTATED, LATENT, 1)
    return is_shaped and call.cache.is_latent


def is_faster_on_hopper(call: CacheCall) -> bool:
    """Whether a call that both take is rather for hopper than for triton. Of latents: with 16 rows
    of 16 sequences hopper was 3 % slower, with 16 of 128 it was 11 % faster, with 128 rows 2.6
    times (H200, Triton 3.6, 2026-11-30). Of prefills 512 queries over 32k keys in pages of 64 were
    2.3 times faster (32 heads on 8, D 128, 2026-12-01); others are taken to be
    alike. The kernel that splits keys of other caches was not timed on it."""
    if is_latent(call):
        return call.cache.B >= 64 or call.most_queries * call.q.shape[-2] >= 64
    return has_many_queries(call) and fills_a_gpu(call)


def fills_a_gpu(call: CacheCall) -> bool:
    """Whether tiles of queries are as many as a large GPU runs programs."""
    B = 1 if call.is_packed else call.q.shape[0]
    M, H = call.q.shape[-3], call.q.shape[-2]
    return B * H * -(-M // QUERY_TILE) >= ENOUGH_PROGRAMS


def _is_copied_by_tma(x: torch.Tensor) -> bool:
    strides = [s for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1]
    is_even = all(s > 0 and s * x.element_size() % 16 == 0 for s in strides)
    return is_even and x.stride(3) == 1 and x.data_ptr() % 16 == 0 and x.numel() > 0


def _float8_problem(call: CacheCall) -> str:
    """Which GPUs know a float8 cache's dtype."""
    device, dtype = call.q.device, call.cache.k.dtype
    if device.type != "cuda" or dtype not in FLOAT8:
        return ""
    if torch.version.hip:
        return "reads no float8 cache on AMD GPUs"
    if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) < (8, 9):
        return "reads float8_e4m3fn caches from sm_89 on"
    return ""


def explain(op: str, backend: str, call: CacheCall) -> BackendChoice:
    """The choice with its reasons."""
    name, where = choose(op, backend, call), describe_device(call.q.device)
    if backend != "auto":
        return BackendChoice(name, f"named by the caller, on {where}")
    rejected = {"reference": "the oracle runs only when it is named"}
    if name == "hopper":
        rejected["tiled"] = "plain torch tiles are slower on a GPU"
        rejected["triton"] = "slower on Hopper"
        return BackendChoice(name, f"Hopper's kernel for caches runs here, on {where}", rejected)
    slower = "slower for few rows of few sequences" if is_latent(call) else "runs when it is named"
    rejected["hopper"] = why_not_hopper(call) or slower
    if name == "triton":
        from .dense_call import takes

        rejected["tiled"] = "plain torch tiles are slower on a GPU"
        kernel = "dense attention's kernel" if takes(call) else "Triton's split-KV kernel"
        return BackendChoice(name, f"{kernel} runs here, on {where}", rejected)
    problem = why_not_triton(call)
    rejected["triton"] = problem or "on the CPU it only interprets, which is slow"
    return BackendChoice(name, f"plain torch tiles run on any device, here {where}", rejected)
