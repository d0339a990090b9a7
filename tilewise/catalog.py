"""Every op with its oracle, eager form, cases, backends and paper, by dotted names.

Read by tests, `tilewise verify`, `tilewise bench` and the docs; never used to dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Op:
    """One op. Dotted names are `module:function` below `tilewise`.

    public: the function users call. run, exact, eager: its three forms on a `Case`.
    floors: the fp32 rounding of what cancels in its gradients. cases: `(op, dtype, device)` to a
    list of `Case`. takes: `(case, backend)`, whether the backend does what a case asks for.
    backends: those that `run` is verified on. has_gradients: False for ops of inference.
    """

    name: str
    public: str
    run: str
    exact: str
    eager: str
    floors: str
    cases: str
    takes: str
    backends: tuple[str, ...]
    paper: str
    has_gradients: bool = True

    def load(self, role: str) -> Any:
        """The function behind one of the dotted names."""
        module, _, function = getattr(self, role).partition(":")
        return getattr(import_module(f"tilewise.{module}"), function)


_FLASH_2 = "FlashAttention-2, arXiv 2307.08691"


def _dense(name: str) -> Op:
    return Op(
        name=name,
        public=f"dense.api:{name}",
        run="dense.budget:run",
        exact="dense.budget:exact",
        eager="dense.budget:eager",
        floors="dense.budget:floors",
        cases="dense.cases:cases",
        takes="dense.budget:takes",
        backends=("tiled", "triton", "hopper"),
        paper=_FLASH_2,
    )


def _linear(name: str, paper: str) -> Op:
    return Op(
        name=f"linear.{name}",
        public=f"linear.api:{name}",
        run="linear.budget:run",
        exact="linear.budget:exact",
        eager="linear.budget:eager",
        floors="linear.budget:floors",
        cases="linear.cases:cases",
        takes="linear.budget:takes",
        backends=("tiled", "recurrent", "triton"),
        paper=paper,
    )


def _cached(name: str) -> Op:
    return Op(
        name=name,
        public=f"decode.api:{name}",
        run="decode.budget:run",
        exact="decode.budget:exact",
        eager="decode.budget:eager",
        floors="decode.budget:floors",
        cases="decode.cases:cases",
        takes="decode.budget:takes",
        backends=("tiled", "triton", "hopper"),
        paper="PagedAttention, arXiv 2309.06180",
        has_gradients=False,
    )


OPS: tuple[Op, ...] = (
    _dense("attention"),
    _dense("attention_partial"),
    _dense("attention_varlen"),
    _dense("attention_varlen_partial"),
    Op(
        name="merge",
        public="core.partials:merge",
        run="dense.merge_budget:run",
        exact="dense.merge_budget:exact",
        eager="dense.merge_budget:eager",
        floors="dense.merge_budget:floors",
        cases="dense.merge_budget:cases",
        takes="dense.merge_budget:takes",
        backends=("torch",),
        paper="FlashAttention, arXiv 2205.14135, algorithm 1",
    ),
    _linear("linear_attention", "Transformers are RNNs, arXiv 2006.16236"),
    _linear("retention", "Retentive Network, arXiv 2307.08621"),
    _linear("simple_gla", "Mamba 2, arXiv 2405.21060"),
    _linear("gla", "Gated linear attention, arXiv 2312.06635"),
    _linear("delta_rule", "DeltaNet, arXiv 2406.06484"),
    _linear("gated_delta_rule", "Gated DeltaNet, arXiv 2412.06464"),
    _linear("kda", "Kimi Linear, arXiv 2510.26692"),
    _cached("attention_with_cache"),
    _cached("attention_with_cache_partial"),
)
