"""The attention function by itself: every argument that a model may hand to it."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import tilewise
from tests.integrations.hf_models import plain_attention
from tilewise.core.tolerance import assert_within_budget
from tilewise.integrations.transformers import HARMLESS, Implementation, Options, register
from tilewise.integrations.transformers_masks import build_mask

tile = AttentionInterface()["tilewise"]
assert isinstance(tile, Implementation)

B, H, G, M, N, D = 2, 4, 2, 9, 9, 16


def layer(is_causal: bool = False) -> Any:
    """What the functions read from a model's attention layer."""
    return SimpleNamespace(num_key_value_groups=H // G, is_causal=is_causal, training=False)


def qkv(m: int = M, n: int = N, e: int = D) -> list[Tensor]:
    return [torch.randn(B, heads, *size) for heads, size in ((H, (m, D)), (G, (n, D)), (G, (n, e)))]


def doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def check(
    tensors: list[Tensor],
    mask: Any,
    *,
    plain: Any = plain_attention,
    seen: Any = None,
    **given: Any,
) -> None:
    """Output and all gradients against the plain formula; `seen` is the plain form of `mask`."""
    seen = mask if seen is None else seen
    learned = {k: v for k, v in given.items() if isinstance(v, Tensor) and v.is_floating_point()}

    def run(function: Any, mask: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in [*tensors, *learned.values()]]
        options = given | dict(zip(learned, leaves[3:], strict=True))
        out, weights = function(layer(), *leaves[:3], mask, **options)
        assert weights is None
        out.square().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    got = run(tile, mask, torch.float32)
    exact = run(plain, doubled(seen), torch.float64)
    eager = run(plain, seen, torch.float32)
    names = ["out", "dq", "dk", "dv", *learned]
    for name, *results in zip(names, got, exact, eager, strict=True):
        floor = 0.0 if name in ("out", "dv") else cancelled(exact[0], tensors)
        assert_within_budget(*results, name=name, floor=floor)


def cancelled(out: Tensor, tensors: list[Tensor]) -> float:
    """The fp32 rounding of dP and delta, which dS = P (dP - delta) subtracts, times |q| and |k|.

    The loss is the sum of squares, so dout = 2 out. Keys that are seen alone have dS = 0.
    """
    q, k, v = (float(x.abs().max()) for x in tensors)
    difference = 2 * float(out.abs().sum(-1).max()) * v
    return 2 * torch.finfo(torch.float32).eps * difference * max(q, k) * D**-0.5


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("m", "n"), [(9, 9), (1, 9), (1, 1), (4, 9), (9, 9)])
def test_no_mask_is_aligned_as_in_sdpa(m: int, n: int, is_causal: bool) -> None:
    """Causal prefill of a longer cache stands at its first keys, one query at the last."""
    tensors = qkv(m, n)
    for by_argument in (True, False):
        options = {"is_causal": is_causal} if by_argument else {}
        module = layer(is_causal if not by_argument else not is_causal)

        def run(function: Any, dtype: torch.dtype, module: Any = module, options: Any = options):
            return function(module, *(x.to(dtype) for x in tensors), None, **options)[0]

        got, eager = run(tile, torch.float32), run(sdpa_attention_forward, torch.float32)
        assert_within_budget(got, run(sdpa_attention_forward, torch.float64), eager)


@pytest.mark.parametrize(
    "shape", [(B, H, M, N), (B, 1, M, N), (1, H, 1, N), (B, 1, 1, N), (1, 1, M, 1)]
)
def test_bool_mask(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.3
    mask[0, 0, 0] = False
    check(qkv(), mask)


@pytest.mark.parametrize("shape", [(B, H, M, N), (B, 1, M, N), (1, 1, 1, N)])
def test_floating_mask_is_added(shape: tuple[int, ...]) -> None:
    def added(*args: Any, **kwargs: Any) -> Any:
        return plain_attention(*args[:4], None, position_bias=args[4], **kwargs)

    check(qkv(), torch.randn(shape), plain=added)
    hidden = torch.where(torch.rand(shape) > 0.3, 0.0, torch.finfo(torch.float32).min)
    hidden[..., 0] = 0.0
    check(qkv(), hidden, plain=added)


def test_mask_of_tilewise() -> None:
    seen = torch.ones(B, N)
    seen[0, 6:] = 0
    made = build_mask(B, M, N, attention_mask=seen)
    check(qkv(), made, seen=made.dense())
    check(qkv(), made.mask, seen=made.dense())


def test_one_query_with_a_bool_mask() -> None:
    check(qkv(m=1), torch.rand(B, 1, 1, N) > 0.3)
    check(qkv(m=1), torch.rand(B, H, 1, N) > 0.3)


# ---------------------------------------------------------------- other arguments


def causal_mask(m: int = M, n: int = N, window: int | None = None) -> Tensor:
    behind = torch.arange(m)[:, None] + (n - m) - torch.arange(n)
    return (behind >= 0) & (behind < (window or n))


@pytest.mark.parametrize(
    "given",
    [
        {"scaling": 0.3},
        {"softcap": 2.0},
        {"s_aux": torch.linspace(-1, 1, H)},
        {"s_aux": torch.linspace(-1, 1, H).reshape(1, H, 1, 1), "softcap": 5.0, "scaling": 1.0},
        {"position_bias": torch.linspace(-3, 3, H * M * N).reshape(1, H, M, N)},
    ],
)
def test_terms_with_gradients(given: dict[str, Any]) -> None:
    check(qkv(), causal_mask().expand(B, 1, M, N), **given)


def test_position_bias_is_added_to_a_floating_mask() -> None:
    bias, mask = torch.randn(1, H, M, N), torch.randn(B, 1, M, N)
    tensors = qkv()
    out = tile(layer(), *tensors, mask, position_bias=bias)[0]
    assert torch.equal(out, tile(layer(), *tensors, mask + bias)[0])


def test_position_bias_without_a_mask_keeps_causality() -> None:
    bias = torch.randn(1, H, M, N)
    check(qkv(), None, seen=causal_mask(), position_bias=bias, is_causal=True)


@pytest.mark.parametrize("window", [1, 3, 100])
def test_sliding_window_where_no_mask_says_it(window: int) -> None:
    for m in (1, N):
        seen = causal_mask(m, N, window)
        check(qkv(m), None, seen=seen, sliding_window=window, is_causal=True)
    both = causal_mask(N, N, window) | causal_mask(N, N, window).T
    check(qkv(), None, seen=both, sliding_window=window, is_causal=False)


def test_sliding_window_beside_a_mask_is_in_the_mask() -> None:
    check(qkv(), causal_mask(window=5).expand(B, 1, M, N), sliding_window=2, is_causal=True)


def test_cross_attention_and_other_value_size() -> None:
    check(qkv(m=5, n=11, e=8), None, seen=torch.ones(5, 11, dtype=torch.bool), is_causal=False)
    check(qkv(m=5, n=11, e=8), torch.rand(B, 1, 1, 11) > 0.3)


def test_learned_queries_have_no_batch() -> None:
    q, k, v = qkv()
    out = tile(layer(), q[:1], k, v, None)[0]
    assert torch.equal(out, tile(layer(), q[:1].expand(B, -1, -1, -1), k, v, None)[0])


def test_dropout_draws_the_ops_own_bits() -> None:
    tensors = qkv()
    torch.manual_seed(7)
    out = tile(layer(True), *tensors, None, dropout=0.4)[0]
    torch.manual_seed(7)
    heads_last = [x.transpose(1, 2) for x in tensors]
    assert torch.equal(out, tilewise.attention(*heads_last, mask=tilewise.causal(), dropout_p=0.4))
    assert not torch.equal(out, tile(layer(True), *tensors, None)[0])


@pytest.mark.parametrize("given", [{}, {"deterministic": None}, {"deterministic": True}])
def test_determinism_and_backend_reach_the_op(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        seen.update(kwargs)
        return tilewise.attention(*args, **kwargs)

    monkeypatch.setattr("tilewise.integrations.transformers.attention", noted)
    Implementation("x", "tiled", HARMLESS)(layer(), *qkv(), None, **given)
    assert seen["deterministic"] is bool(given.get("deterministic"))
    assert seen["backend"] == "tiled"


# ---------------------------------------------------------------- packed documents


def packed_qkv(total: int) -> list[Tensor]:
    return [torch.randn(1, heads, total, D) for heads in (H, G, G)]


def document_mask(lengths_q: list[int], lengths_k: list[int], window: int | None = None) -> Tensor:
    parts = [causal_mask(m, n, window) for m, n in zip(lengths_q, lengths_k, strict=True)]
    return torch.block_diag(*parts).bool()


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("lengths", [[5, 1, 7], [13], [4, 0, 9]])
def test_packed_documents(lengths: list[int]) -> None:
    cu = ends(lengths)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 9, "max_length_k": 9}
    seen = document_mask(lengths, lengths)
    check(packed_qkv(13), None, seen=seen, is_causal=True, **given)
    check(packed_qkv(13), None, seen=seen | seen.T, is_causal=False, **given)
    narrow = document_mask(lengths, lengths, window=2)
    check(packed_qkv(13), None, seen=narrow, is_causal=True, sliding_window=2, **given)
    # Beside a mask that does not know the documents.
    check(packed_qkv(13), build_mask(1, 13, 13), seen=seen, **given)


def test_packed_documents_with_longer_keys() -> None:
    lengths_q, lengths_k = [2, 3], [4, 8]
    q, (k, v) = packed_qkv(5)[0], packed_qkv(12)[1:]
    given = {"cu_seq_lens_q": ends(lengths_q), "cu_seq_lens_k": ends(lengths_k)}
    check([q, k, v], None, seen=document_mask(lengths_q, lengths_k), is_causal=True, **given)
    both = torch.block_diag(torch.ones(2, 4), torch.ones(3, 8)).bool()
    check([q, k, v], torch.ones(1, 1, 5, 12, dtype=torch.bool), seen=both, **given)


def test_rows_past_the_last_document_give_zero() -> None:
    cu = ends([4, 5])
    for mask in (None, build_mask(1, 13, 13)):
        out = tile(layer(True), *packed_qkv(13), mask, cu_seq_lens_q=cu, cu_seq_lens_k=cu)[0]
        assert torch.equal(out[:, 9:], torch.zeros(1, 4, H, D))
        assert bool((out[:, :9] != 0).any())


@pytest.mark.parametrize("cu", [[0, 4, 14], [1, 4, 13], [0, 8, 4, 13]])
@pytest.mark.parametrize("mask", [None, build_mask(1, 13, 13)])
def test_wrong_document_ends_raise(cu: list[int], mask: Any) -> None:
    given = {"cu_seq_lens_q": torch.tensor(cu), "cu_seq_lens_k": torch.tensor(cu)}
    with pytest.raises(ValueError, match="cu_seq"):
        tile(layer(True), *packed_qkv(13), mask, **given)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_harmless_argument_changes_nothing(name: str) -> None:
    tensors = qkv()
    out = tile(layer(True), *tensors, None)[0]
    assert torch.equal(out, tile(layer(True), *tensors, None, **{name: torch.arange(M)})[0])


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("output_attentions", True, 'attn_implementation="eager"'),
        ("block_table", torch.zeros(1, 1), "paged cache"),
        ("cache", object(), "paged cache"),
        ("indices", torch.zeros(1, 1), 'attn_implementation="sdpa"'),
        ("sinks", torch.zeros(B, H, M, 1), "ignore=\\['sinks'\\]"),
        ("head_mask", torch.ones(H), "ignore=\\['head_mask'\\]"),
        ("temperature", 0.5, "it is not known whether it changes the result"),
    ],
)
def test_argument_that_cannot_be_honoured_raises(name: str, value: Any, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name} cannot be honoured.*{reason}"):
        tile(layer(), *qkv(), None, **{name: value})


@pytest.mark.parametrize("value", [None, False])
def test_argument_that_asks_for_nothing_is_accepted(value: Any) -> None:
    tensors = qkv()
    out = tile(layer(), *tensors, None, output_attentions=value, head_mask=value)[0]
    assert torch.equal(out, tile(layer(), *tensors, None)[0])


@pytest.mark.parametrize(
    ("mask", "given", "message"),
    [
        (torch.ones(B, N), {}, r"attention_mask must be a tensor that broadcasts.*got \[2, 9\]"),
        (torch.ones(B, 1, M, N + 1), {}, r"attention_mask must.*\[2, 1, 9, 10\]"),
        ("causal", {}, "attention_mask must.*got str"),
        (torch.ones(B, 1, M, N).long(), {}, "attention_mask must be bool.*int64"),
        (build_mask(B, M, N + 2), {}, "made for 9 queries and 11 keys, got 9 and 9; a 2-D"),
        (build_mask(B, 1, N), {}, "attention_mask was made for 1 queries"),
        (None, {"s_aux": torch.ones(H + 1)}, "s_aux must hold one logit for each of the 4"),
        (None, {"s_aux": [1.0] * H}, "s_aux must be a tensor, got list"),
        (
            None,
            {"cu_seq_lens_q": [0, 9], "cu_seq_lens_k": [0, 9]},
            "cu_seq_lens_q must be a tensor, got list",
        ),
        (None, {"sliding_window": 0}, "sliding_window must be positive"),
        (None, {"cu_seq_lens_q": ends([9])}, "must come together"),
        (None, {"dropout": 1.5}, "dropout"),
        (None, {"softcap": -1.0}, "softcap"),
        (
            build_mask(B, M, N),
            {"cu_seq_lens_q": ends([9]), "cu_seq_lens_k": ends([9])},
            "needs a batch of 1, got 2",
        ),
    ],
)
def test_argument_that_does_not_fit_raises(mask: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tile(layer(), *qkv(), mask, **given)


@pytest.mark.parametrize("dtypes", [(0, 0, 1), (1, 0, 0), (0, 1, 0)])
def test_mixed_dtypes(dtypes: tuple[int, ...]) -> None:
    """As when a norm brings q and k to fp32: autocast makes them one, nothing else does."""
    kinds = (torch.float32, torch.bfloat16)
    mixed = [x.to(kinds[kind]) for x, kind in zip(qkv(), dtypes, strict=True)]
    with pytest.raises(ValueError, match="query, key and value must share one dtype outside"):
        tile(layer(), *mixed, None)
    device = mixed[0].device.type
    with torch.autocast(device, dtype=torch.bfloat16):
        out = tile(layer(), *mixed, None)[0]
        with pytest.raises(ValueError, match=r"got torch.float64, torch.float32"):
            tile(layer(), mixed[0].double(), mixed[1].float(), mixed[2].double(), None)
    assert torch.equal(out, tile(layer(), *(x.bfloat16() for x in mixed), None)[0])


@pytest.mark.parametrize("shape", [(9,), (B, M, N), (B + 1, N), (B, 1, 1, M, N)])
def test_padding_mask_of_another_shape_raises(shape: tuple[int, ...]) -> None:
    message = r"attention_mask must be \[B, positions\] with B = 2.*got"
    with pytest.raises(ValueError, match=message):
        build_mask(B, M, N, attention_mask=torch.ones(shape))


def test_bias_beside_packed_documents_raises() -> None:
    cu = ends([9])
    with pytest.raises(NotImplementedError, match="position_bias"):
        tile(layer(), *packed_qkv(9), torch.zeros(1, 1, 9, 9), cu_seq_lens_q=cu, cu_seq_lens_k=cu)


# ---------------------------------------------------------------- registration


def test_both_interfaces_are_registered_and_again_changes_nothing() -> None:
    """Without a mask function Transformers would silently drop padding."""
    before = (AttentionInterface()["tilewise"], AttentionMaskInterface()["tilewise"])
    keys = (len(AttentionInterface()), len(AttentionMaskInterface()))
    register()
    assert (AttentionInterface()["tilewise"], AttentionMaskInterface()["tilewise"]) == before
    assert (len(AttentionInterface()), len(AttentionMaskInterface())) == keys
    assert AttentionMaskInterface()["tilewise"] is build_mask


def test_register_under_another_name() -> None:
    register("tilewise_oracle", backend="reference", ignore=["temperature"])
    try:
        oracle = AttentionInterface()["tilewise_oracle"]
        assert AttentionMaskInterface()["tilewise_oracle"] is build_mask
        q, k, v = (x.double() for x in qkv())
        got = oracle(layer(True), q, k, v, None, temperature=0.5)[0]
        expected = tilewise.attention(
            *(x.transpose(1, 2) for x in (q, k, v)), mask=tilewise.causal(), backend="reference"
        )
        assert torch.equal(got, expected)
    finally:
        AttentionInterface._global_mapping.pop("tilewise_oracle")
        AttentionMaskInterface._global_mapping.pop("tilewise_oracle")


@pytest.mark.parametrize(
    "name", ["", "a b", "org/kernel", "paged|x", "my_flash", "sdpa", "eager", 3]
)
def test_name_that_transformers_would_misread_raises(name: str) -> None:
    with pytest.raises(ValueError, match="register: name must be an identifier"):
        register(name)
    assert name in ("sdpa",) or name not in AttentionInterface()


def test_what_register_cannot_take_raises() -> None:
    with pytest.raises(ValueError, match="ignore must be a list of argument names, got 'seq_idx'"):
        register("tilewise_wrong", ignore="seq_idx")
    with pytest.raises(ValueError, match="context_parallel must be a ContextParallel, got str"):
        register("tilewise_wrong", context_parallel="mesh")  # type: ignore[arg-type]
    assert "tilewise_wrong" not in AttentionInterface()


def test_transformers_of_another_mask_interface_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def sdpa_mask(batch_size: int, cache_position: Tensor, kv_length: int) -> None: ...

    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", sdpa_mask)
    with pytest.raises(ImportError, match=r"Transformers must be 5\.4 or later"):
        register()


def test_options_have_transformers_names() -> None:
    """SDPA's own parameters are all known here."""
    parameters = set(inspect.signature(sdpa_attention_forward).parameters)
    fixed = {"module", "query", "key", "value", "attention_mask", "kwargs"}
    assert parameters - fixed <= set(Options.__dataclass_fields__) | HARMLESS | {"cache"}


def test_page_names_every_argument() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    understood = set(Options.__dataclass_fields__) | set(HARMLESS)
    assert {name for name in understood if f"`{name}`" not in page} == set()
