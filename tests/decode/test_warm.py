"""What a warm call is known by."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise.decode import warm

F8 = torch.float8_e4m3fn


def cache_at(offset: int, dtype: torch.dtype) -> tw.KVCache:
    """Keys and values that begin `offset` elements behind a multiple of 16 bytes."""
    lengths, size = torch.tensor([5]), 8 * 2 * 64
    k, v = (
        torch.zeros(size + 64, dtype=dtype)[offset : offset + size].view(1, 8, 2, 64)
        for _ in range(2)
    )
    scales = torch.ones(2) if dtype == F8 else None
    return tw.KVCache(k, v, lengths, None, None, None, scales, scales)


@pytest.mark.parametrize("dtype", [F8, torch.bfloat16])
def test_where_a_cache_begins_is_part_of_its_form(dtype: torch.dtype) -> None:
    """A float8 cache at an even address is read by pairs of columns, one at an odd address is not:
    the kernel of one faults on the other."""
    step = 16 // torch.empty((), dtype=dtype).element_size()
    forms = [warm._cache_form(cache_at(offset, dtype)) for offset in range(2 * step)]
    assert len(set(forms)) == step
    assert forms[:step] == forms[step:]


def test_an_odd_address_is_another_kernel() -> None:
    """What the form has to tell apart: whether columns are read by pairs."""
    pytest.importorskip("triton")
    from tilewise.decode.call import Splits, make_call
    from tilewise.decode.triton_call import SplitCall
    from tilewise.kernels import launch

    terms = dict.fromkeys(("scale", "softcap", "alibi_slopes", "bias", "sinks"))
    paired = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_gpu_architecture", lambda device: "sm_90")
        for offset in (1, 2, 8):
            cache = cache_at(offset, F8)
            q = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
            call = make_call("test", q, cache, tw.full(), terms, None, None, Splits())
            paired[warm._cache_form(cache)] = SplitCall(call).is_paired
    assert list(paired.values()) == [False, True, True]
