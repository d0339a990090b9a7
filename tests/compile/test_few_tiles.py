"""Where few tiles of a band are visited in one loop, told from the launches and their code."""

import re

import pytest
import torch

import tilewise as tw
from tests.compile.offline import compiled_stage, recorded
from tilewise.dense import triton_call
from tilewise.kernels.structs import Build


def launches(D, mask, N=2048):
    q, k, v = (torch.zeros(1, N, 2, D, dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    with recorded("sm_90") as records:
        out = tw.attention(q, k, v, mask=mask, backend="triton")
        out.backward(torch.zeros_like(out))
    return {x.name: x for x in records}


def build_of(launch):
    return next(x for x in launch.arguments if isinstance(x, Build))


@pytest.mark.parametrize("mask", [tw.causal(), tw.window(1024, 0)])
@pytest.mark.parametrize(("D", "count"), [(32, 0), (64, 0), (80, 24), (128, 24)])
def test_only_the_forward_of_wider_heads_has_one_loop(D, count, mask):
    found = launches(D, mask)
    assert build_of(found.pop("attention_fwd")).few_tiles == count
    builds = [build_of(x) for x in found.values() if "delta" not in x.name]
    assert builds and all(build.few_tiles == 0 for build in builds)


def test_no_code_is_left_of_it_where_it_is_not(monkeypatch):
    """At head dim 64 the machine's code is that of a forward without it, and at 128 it is not."""

    def code(D):
        text = compiled_stage(launches(D, tw.causal())["attention_fwd"], "sm_90", "ptx")
        return re.sub(r"//.*|\.loc.*", "", text)

    usual = {D: code(D) for D in (64, 128)}
    monkeypatch.setattr(triton_call, "few_tiles", lambda *_: 0)
    assert code(64) == usual[64] and code(128) != usual[128]
