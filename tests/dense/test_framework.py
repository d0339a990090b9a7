"""Dense attention inside PyTorch: opcheck, compile, autocast, checkpointing, double backward."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tilewise as tw
from tests.helpers import backends, runs_kernels
from tests.helpers import check_call as check_budget
from tilewise.core.backends import is_interpreted
from tilewise.dense import api, torch_flash
from tilewise.dense.checks import check_call
from tilewise.dense.tiled import full_precision


def qkv(M: int = 9, N: int = 11, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((2, M, 4, 8), (2, N, 2, 8), (2, N, 2, 6))
    return [torch.randn(*s, dtype=dtype, requires_grad=True) for s in shapes]


def op_arguments(
    q: Tensor, k: Tensor, v: Tensor, mask: tw.Mask, placement: dict[str, Any] | None = None
) -> tuple:
    terms = dict.fromkeys(("scale", "alibi_slopes", "bias"))
    terms |= {"softcap": 4.0, "sinks": torch.randn(4), "dropout_p": 0.0}
    arguments = check_call("attention", q, k, v, mask, terms, placement or {})
    return arguments._replace(backend=backends("tiled")[0])


MASKS = {
    "full": tw.full(),
    "prefix": tw.causal() | tw.prefix([2, 3]),
    "offset": tw.causal(offset=torch.tensor([1, 4])),
    "predicate": tw.from_function(lambda b, h, m, n: (m + n + b) % 3 != 0),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("full", torch.float32, marks=pytest.mark.interpreter),
        pytest.param("full", torch.bfloat16, marks=pytest.mark.interpreter),
        *((name, torch.float32) for name in ("prefix", "offset", "predicate")),
    ],
)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    ops = torch.ops.tilewise
    q, k, v = (x.detach() for x in qkv(dtype=dtype))
    mask = MASKS[name]
    rest = op_arguments(q, k, v, mask)
    torch.library.opcheck(ops.attention_fwd.default, (q, k, v, *rest, torch.float32))
    torch.library.opcheck(ops.attention_fwd_split.default, (q, k, v, *rest))
    out, lse = ops.attention_fwd(q, k, v, *rest, torch.float32)
    *_, remainder = ops.attention_fwd_split(q, k, v, *rest)
    for dlse, lost in ((None, None), (torch.randn_like(lse), remainder)):
        upstream = (torch.randn_like(out), dlse, out, lost, lse)
        arguments = (*upstream, q, k, v, *rest, [False, False, True])
        torch.library.opcheck(ops.attention_bwd.default, arguments)
    buffers = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    upstream = (torch.randn_like(out), lse, torch.randn_like(lse))
    torch.library.opcheck(ops.attention_bwd_into.default, (*buffers, *upstream, q, k, v, *rest))


def test_compile_takes_new_lengths_without_a_new_graph() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def block(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, sinks: Tensor) -> Tensor:
        mask = tw.causal() & tw.key_padding(lengths)
        return tw.attention(q, k, v, mask=mask, sinks=sinks, softcap=5.0)

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    sinks = torch.randn(4, requires_grad=True)
    for M, N in ((9, 11), (20, 30), (7, 50), (130, 600)):
        inputs = [*qkv(M, N), torch.tensor([N, 3]), sinks]
        leaves = [*inputs[:3], sinks]
        results = []
        for function in (block, compiled):
            out = function(*inputs)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_every_public_form(backend: str) -> None:
    torch._dynamo.reset()
    cu = torch.tensor([0, 4, 9])

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = tw.attention(q, k, v, mask=tw.window(3, 0), dropout_p=0.1)
        parts = [
            tw.attention_partial(q, k[:, a:b], v[:, a:b], mask=tw.causal(), q_start=2, k_start=a)
            for a, b in ((0, 4), (4, 9))
        ]
        merged = tw.merge(parts)
        packed = tw.attention_varlen(
            q[0], k[0], v[0], cu_seqlens_q=cu, mask=tw.causal(), max_seqlen_q=5
        )
        return out.sum() + merged.out.square().sum() + merged.lse.sum() + packed.sum()

    inputs = qkv(9, 9)
    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend=backend)):
        torch.manual_seed(3)
        loss = function(*inputs)
        results.append(torch.autograd.grad(loss, inputs))
    if backend == "aot_eager":
        # Inductor draws its own random bits, so only the eager decomposition must be bitwise.
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert all(bool(torch.isfinite(x).all()) for x in results[1])


def test_compile_takes_one_tensor_as_key_and_value() -> None:
    q, k, _ = qkv()
    compiled = torch.compile(lambda q, k: tw.attention(q, k, k), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k), tw.attention(q, k, k))


class Exported(torch.nn.Module):
    """Parameters want gradients, as in a model that was trained."""

    def __init__(self, mask: tw.Mask) -> None:
        super().__init__()
        self.layer, self.mask = torch.nn.Linear(32, 96), mask

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.layer(x).unflatten(-1, (3, 4, 8)).unbind(2)
        return tw.attention(q, k, v, mask=self.mask & tw.key_padding(lengths)).flatten(-2)


def exported(mask: tw.Mask) -> tuple[Exported, torch.export.ExportedProgram]:
    """A length is free."""
    model = Exported(mask).eval()
    inputs = (torch.randn(2, 9, 32), torch.tensor([9, 4]))
    length = torch.export.Dim("length", min=2, max=500)
    return model, torch.export.export(model, inputs, dynamic_shapes=({1: length}, None))


@pytest.mark.parametrize("name", ["full", "prefix"])
def test_export_with_parameters_and_other_lengths(name: str) -> None:
    model, program = exported(MASKS[name])
    for N in (9, 2, 33):
        x, lengths = torch.randn(2, N, 32), torch.tensor([N, N // 2])
        assert torch.equal(program.module()(x, lengths), model(x, lengths))


# Said by torch 2.11 of itself.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_export_is_saved_and_loaded(tmp_path: Path) -> None:
    model, program = exported(tw.causal())
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2")
    x, lengths = torch.randn(2, 20, 32), torch.tensor([20, 3])
    assert torch.equal(again.module()(x, lengths), model(x, lengths))


@pytest.mark.slow
# Said by torch 2.13 of itself.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_compiled_ahead_of_time(tmp_path: Path) -> None:
    """AOTInductor: the op is called from the compiled library, by its schema."""
    for mask in (tw.causal(), tw.full()):
        model, program = exported(mask)
        path = str(tmp_path / f"{type(mask).__name__}.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=path)
        compiled = torch._inductor.aoti_load_package(path)
        for N in (9, 40):
            x, lengths = torch.randn(2, N, 32), torch.tensor([N, 3])
            with torch.no_grad():
                assert torch.equal(compiled(x, lengths), model(x, lengths))


class Seen(TorchDispatchMode):
    """The ops of ours that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "tilewise":
            self.names.append(op._schema.name.removeprefix("tilewise::attention_"))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_may_keep_attention_alone(dtype: torch.dtype) -> None:
    """Selective checkpoints name the ops whose results are kept: then none of them runs again."""
    leaves = qkv(dtype=dtype)
    ops = torch.ops.tilewise
    named = [ops.attention_fwd.default, ops.attention_fwd_split.default]

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q * 2.0, k, v, mask=tw.causal()).sin()

    plain = torch.autograd.grad(block(*leaves).sum(), leaves)
    for kept in ([], named):
        contexts = partial(create_selective_checkpoint_contexts, kept)
        with Seen() as seen:
            out = checkpoint(block, *leaves, use_reentrant=False, context_fn=contexts)
            found = torch.autograd.grad(out.sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        assert [x.startswith("fwd") for x in seen.names] == [True] * (2 - bool(kept)) + [False]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [False, True])
def test_out_and_what_rounding_took_off_it(packed: bool, dtype: torch.dtype) -> None:
    """Together they are out as it was summed, to 16 bits and more; out is what an op that keeps
    nothing returns."""
    ops = torch.ops.tilewise
    q, k, v = (x.detach() for x in qkv(dtype=dtype))
    placement = {}
    if packed:
        q, k, v = (x[0] for x in (q, k, v))
        for side, x in (("q", q), ("k", k)):
            placement[f"cu_seqlens_{side}"] = torch.tensor([0, 2, x.shape[0]], dtype=torch.int32)
    rest = op_arguments(q, k, v, tw.causal(), placement)
    wide, lse = ops.attention_fwd(q, k, v, *rest, torch.float32)
    plain, _ = ops.attention_fwd(q, k, v, *rest, dtype)
    out, lse_too, remainder = ops.attention_fwd_split(q, k, v, *rest)
    assert torch.equal(out, plain) and torch.equal(lse, lse_too)
    assert out.shape == remainder.shape == (*q.shape[:-1], v.shape[-1])
    lost = wide - out.float()
    if runs_kernels() and is_interpreted():
        # Triton's interpreter cuts fp32 to bf16.
        lost = (lost.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(remainder, lost.bfloat16()) and bool((remainder != 0).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_backward_keeps_the_out_that_was_returned(dtype: torch.dtype) -> None:
    """Not a copy of it in fp32: what it takes beside inputs, out and lse is 2 bytes an element."""
    q, k, v = qkv(dtype=dtype)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = tw.attention(q, k, v, mask=tw.causal())
    known = {x.untyped_storage().data_ptr() for x in (q, k, v, out)}
    lse, *rest = (x for x in kept if x.untyped_storage().data_ptr() not in known)
    if lse.dim() == 4:
        (lse,), rest = rest, [lse]
    assert lse.dim() == 3
    assert [x.dtype for x in rest] == [torch.bfloat16] * (dtype.itemsize == 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_all_three_alike(dtype: torch.dtype) -> None:
    q, k, v = qkv()
    mixed = [q, k, v.detach().to(dtype).requires_grad_()]
    with torch.autocast("cpu", dtype=dtype):
        out = tw.attention(*mixed, mask=tw.causal())
    assert out.dtype == dtype
    expected = tw.attention(*(x.to(dtype) for x in mixed), mask=tw.causal())
    assert torch.equal(out, expected)
    gradients = torch.autograd.grad(out.float().sum(), mixed)
    assert [g.dtype for g in gradients] == [x.dtype for x in mixed]
    with torch.autocast("cpu", dtype=dtype):
        assert tw.attention(*(x.double() for x in (q, k, v))).dtype == torch.float64


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_recomputes_the_same_dropout(use_reentrant: bool) -> None:
    q, k, v = qkv(40, 60)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q, k, v, dropout_p=0.4)

    torch.manual_seed(1)
    plain = torch.autograd.grad(block(q, k, v).square().sum(), [q, k, v])
    torch.manual_seed(1)
    out = checkpoint(block, q, k, v, use_reentrant=use_reentrant)
    if use_reentrant:
        out.square().sum().backward()
        again = [q.grad, k.grad, v.grad]
    else:
        again = torch.autograd.grad(out.square().sum(), [q, k, v])
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


def test_second_derivatives_raise_on_tiled_and_are_right_on_the_reference() -> None:
    q, k, v = (x.detach().double().requires_grad_() for x in qkv(4, 5))
    out = tw.attention(q, k, v, mask=tw.causal())
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives.*backend='reference'"):
        torch.autograd.grad(gradient.sum(), q)
    assert torch.autograd.gradgradcheck(
        lambda *x: tw.attention(*x, mask=tw.causal(), backend="reference"), (q, k, v)
    )


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_gradcheck(mask: tw.Mask) -> None:
    inputs = [x.detach().double().requires_grad_() for x in qkv(3, 5)]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, 4, 3, 5, dtype=torch.float64, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, *terms: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(("sinks", "alibi_slopes", "bias"), terms, strict=True))
        return tuple(tw.attention_partial(q, k, v, mask=mask, softcap=3.0, **named))

    assert torch.autograd.gradcheck(call, (*inputs, sinks, slopes, bias))


def test_only_the_asked_gradients_are_computed() -> None:
    q, k, v = qkv()
    bias = torch.randn(1, 1, 9, 11)
    out, lse = tw.attention_partial(q, k, v, bias=bias)
    assert torch.autograd.grad(lse.sum(), [q, k], retain_graph=True)[0].shape == q.shape
    out.sum().backward()
    assert bias.grad is None
    assert q.grad is not None


def test_no_grad_keeps_nothing() -> None:
    q, k, v = qkv()
    with torch.no_grad():
        assert not tw.attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert tw.attention(q, k, v).shape == (2, 9, 4, 6)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_matmul_precision_of_the_user_neither_matters_nor_changes(precision: str) -> None:
    inputs = [torch.randn(1, 200, 4, 64) for _ in range(3)]
    expected = tw.attention(*inputs, softcap=3.0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert torch.equal(tw.attention(*inputs, softcap=3.0), expected)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


class Recorder(TorchDispatchMode):
    """Notes the arguments of Tilewise's ops and runs none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "tilewise":
            return func(*args, **(kwargs or {}))
        self.calls.append(args)
        return None


@pytest.mark.parametrize(
    ("backend", "chosen"), [("auto", "triton"), ("auto", "tiled"), ("triton", "triton")]
)
def test_a_piece_of_the_backward_runs_where_it_was_chosen_to(
    backend: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(api, "choose", lambda op, name, *qkv: asked.append(name) or chosen)
    q, k, v = (x.detach() for x in qkv())
    lse, dout = torch.zeros(2, 4, 9), torch.zeros(2, 9, 4, 6)
    buffers = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    with Recorder() as recorder:
        tw.attention_partial_backward(dout, q, k, v, lse, lse, **buffers, backend=backend)
    assert asked == [backend]
    (arguments,) = recorder.calls
    assert arguments[-1] == chosen


def test_explain_backend_says_what_runs() -> None:
    x = torch.randn(1, 20, 4, 8)
    handed = tw.explain_backend(x, x, x, mask=tw.causal())
    assert handed.name == "tiled"
    assert "fused CPU op" in handed.reason
    assert set(handed.rejected) == {"reference", "triton", "hopper"}
    assert "fused" not in tw.explain_backend(x, x, x, softcap=2.0).reason
    assert tw.explain_backend(x, x, x, backend="reference").name == "reference"


def test_the_hand_off_is_decided_once_and_keeps_fp32() -> None:
    inputs = [torch.randn(1, 200, 4, 64, requires_grad=True) for _ in range(3)]
    with torch_flash.disabled():
        own = tw.attention(*inputs, mask=tw.causal())
    handed = tw.attention(*inputs, mask=tw.causal())

    def ops_of(out: Tensor) -> set[str]:
        with torch.profiler.profile(acc_events=True) as profile:
            torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
        return {event.key for event in profile.key_averages() if "for_cpu" in event.key}

    assert not ops_of(own)
    assert ops_of(handed)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(tw.attention(*inputs, mask=tw.causal()), handed)
    finally:
        torch.set_float32_matmul_precision(before)


def test_second_derivatives_of_a_learned_bias_raise() -> None:
    q, k, v = (x.detach() for x in qkv())
    bias = torch.randn(9, 11, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        tw.attention(q, k, v, bias=bias).sum(), bias, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient.square().sum().backward()


def test_explain_backend_casts_as_the_call_does() -> None:
    x = torch.randn(1, 20, 4, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        assert "fused" not in tw.explain_backend(x, x.bfloat16(), x).reason
    with pytest.raises(TypeError, match="causal"):
        tw.explain_backend(x, x, x, causal=True)


# torch.func.jvp imports scripted decompositions of its own.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_forward_mode_raises_on_tiled_and_works_on_the_reference() -> None:
    x, tangent = torch.randn(1, 8, 2, 4), torch.randn(1, 8, 2, 4)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: tw.attention(q, x, x), (x,), (tangent,))
    _, moved = torch.func.jvp(
        lambda q: tw.attention(q, x, x, backend="reference"), (x,), (tangent,)
    )
    assert bool(moved.abs().max() > 0)


def test_a_mask_met_in_inference_mode_serves_training() -> None:
    q, k, v = qkv()
    predicate = tw.from_function(lambda b, h, m, n: (m + n) % 3 != 0)
    with torch.inference_mode():
        padding = tw.key_padding([5, 7])
        tw.attention(q.detach(), k.detach(), v.detach(), mask=predicate)
    tw.attention(q, k, v, mask=predicate & padding).sum().backward()
    assert q.grad is not None


def test_invert_traces() -> None:
    q, k, v = (x.detach() for x in qkv())
    compiled = torch.compile(
        lambda q, k, v: tw.attention(q, k, v, mask=tw.window(2, 0).invert()),
        fullgraph=True,
        backend="eager",
    )
    assert torch.equal(compiled(q, k, v), tw.attention(q, k, v, mask=~tw.window(2, 0)))


@pytest.mark.parametrize("setting", ["tf32", "ieee"])
def test_the_newer_precision_setting_neither_matters_nor_changes(setting: str) -> None:
    inputs = [torch.randn(1, 20, 4, 8) for _ in range(3)]
    expected = tw.attention(*inputs, softcap=3.0)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = setting
    try:
        assert torch.equal(tw.attention(*inputs, softcap=3.0), expected)
        assert matmul.fp32_precision == setting
    finally:
        matmul.fp32_precision = before


def test_precision_is_full_until_the_last_thread_is_done() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        first, second = full_precision(), full_precision()
        first.__enter__()
        second.__enter__()
        # As threads do, the first one in leaves before the second.
        first.__exit__(None, None, None)
        assert matmul.fp32_precision == "ieee"
        second.__exit__(None, None, None)
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_meta_tensors_have_shapes() -> None:
    q = torch.empty(2, 8, 4, 16, device="meta")
    assert tw.attention(q, q, q, mask=tw.causal()).shape == q.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_keys_and_values_that_have_a_mean(dtype: torch.dtype) -> None:
    """delta of an O in 16 bits is off for all keys of a row alike, which adds up in dQ."""
    q, k, v = (torch.randn(1, 200, 2, 32) for _ in range(3))
    tensors = {"q": q.to(dtype), "k": (k + 3.0).to(dtype), "v": (v + 3.0).to(dtype)}
    check_budget("attention", tensors, backend="tiled")
    check_budget("attention", tensors, backend="tiled", mask=tw.causal())
    check_budget("attention_partial", tensors, backend="tiled", mask=tw.window(50, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("learns", [False, True])
def test_results_may_be_changed_in_place(dtype: torch.dtype, learns: bool) -> None:
    q, k, v = (torch.randn(1, 9, 2, 16, dtype=dtype).requires_grad_(learns) for _ in range(3))
    factor = torch.ones((), dtype=dtype).requires_grad_()
    for mask in (tw.causal(), tw.window(3, 0)):
        out, lse = tw.attention_partial(q, k, v, mask=mask)
        want = out.detach().sum()
        out.mul_(factor)
        lse.add_(1)
        assert torch.equal(torch.autograd.grad(out.sum(), factor)[0], want)


def test_a_result_that_was_changed_has_no_backward() -> None:
    """It is kept for that, whichever dtype it has."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(1, 5, 2, 8, dtype=dtype).requires_grad_() for _ in "qkv")
        out = tw.attention(q, k, v)
        out += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("keys", [64, 136])
def test_an_output_that_overflows_poisons_no_other_gradient(keys: int) -> None:
    """Dropout makes some outputs too large for fp16. What does not ask for them is as finite as
    ever: inf and what rounding took off it, -inf, meet a dO of 0."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, keys, 2, 16).half().requires_grad_() for _ in "qk")
    v = torch.full((1, keys, 2, 16), 60000.0).half().requires_grad_()
    out = tw.attention(q, k, v, dropout_p=0.5, backend="tiled")
    assert bool(out.isinf().any()) and bool(out.isfinite().any())
    dout = torch.where(out.isinf(), 0.0, torch.full_like(out, 1e-3))
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(out, (q, k, v), dout))
