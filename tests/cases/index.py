"""The index of reported cases: which are tested here, which elsewhere, which cannot be yet.

A case is a failure that people reported of some attention library. Its number is for reference
only; what is right follows from the definition of attention. `python -m tests.cases.index` renders
the table of docs/cases.md.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cases.md"
HUGGING_FACE = "tests/integrations/test_cases_hf.py"


class Case(NamedTuple):
    """status: "tested" (here), "elsewhere" or "not applicable" (yet).

    reason: what the test shows, where else it stands, or why there is none.
    """

    status: str
    reason: str


# Every id of the list, by theme.
THEMES = {
    "Packed documents and empty inputs": "001 002 004 006 007 008 011 013 014 015 016",
    "Causal alignment": "020 023 024 025 028 029 030",
    "Edges of sliding windows": "031 032 033 035 040 041 042",
    "Masked rows, padding, -inf and NaN": "043 044 045 046 047 048 049 052 054 058 060",
    "Extreme values": "063 064 065 066 067 068 070",
    "Log-sum-exp": "073 077 078 079 081 082",
    "Sizes": "083 084 087 088 090 091 092 093 095 098 100 101 102",
    "Strides": "106 107 109 110 111 112 113 115",
    "KV cache, pages, split keys": "117 118 120 122 124 125 126 127 131 132 134 136 138 139",
    "Head dims and ratios": "141 144 145 146 148 149 150 151 153 156",
    "Bias, sinks, ALiBi, predicates": "160 161 162 163 165 166 167 168",
    "Dropout, recomputation, determinism": "172 173 177 178 179 181 182",
    "Linear attention": ("184 185 188 189 191 193 195 196 197 198 200 201 203 206 209 210 211"),
    "Sparse attention": "212 214 217 218",
    "Context parallelism": "219 221 223 224 226 228 229",
    "FP8": "230 232",
    "Compile, export, vmap, autocast, devices": "236 237 238 239 240 242 243 246 248",
    "Hugging Face Transformers": "249 251 252 254 256 257 258",
}

_TESTED = {
    "001": "one key a document, many queries: exact zeros, no NaN, in forward and backward",
    "002": "one query a document with an empty document between; any max_seqlen_q",
    "004": "D 256 with empty query segments (lengths / 8): gradients of unread keys are 0",
    "006": "leading documents without queries return; bounds past the storage are refused",
    "007": "keys without queries get gradient 0; the others are as if alone",
    "008": "no keys: out 0, lse -inf or the sink, empty gradients; dense and packed",
    "011": "batch of 0 and no documents: empty results and gradients, both backends",
    "013": "NaN and Inf past the last document: zero gradients there, right ones elsewhere",
    "014": "whole tiles of slack are written, with buffers that start as NaN",
    "015": "uncovered rows are 0 and their content changes nothing, bit for bit",
    "016": "max_seqlen too small is refused; equal or far too large changes nothing",
    "020": "M 1, 2, 5 against longer keys, M below the group size: bottom-right",
    "023": "one query sees the whole cache; SDPA's convention is the stated offset 0",
    "024": "the conventions agree for M = N only, so every test has M != N too",
    "025": "any two lengths, on both sides of a tile",
    "028": "causal and full give different gradients, each its own",
    "029": "ten calls at a ragged length equal the first (length 508 for 4092)",
    "030": "lengths around 16, 64, 128 and 192, equal and grouped heads",
    "031": "causal said in four ways is one mask (lengths 129 and 520)",
    "032": "bounds up to 2^63 - 1 are full attention; a bound of N is not, where M > N",
    "033": "0 is a bound: window(0, 0) returns V, and 0 differs from None",
    "035": "rows whose window misses every key: 0 and -inf, the others right",
    "040": "decode with used lengths is the row of the windowed whole, at every step",
    "041": "right window over 20,000 keys, D 59: 16, 15, ..., 1 keys, the rest NaN",
    "042": "only the empty rows are 0, for any group, in the middle of a tile",
    "043": "rows that are all False: 0 with gradient 0, NaN there stays there",
    "044": "a masked key may hold NaN, Inf or 1e10",
    "045": "finfo.min in columns hides them; in a whole row it leaves the mean of V",
    "046": "one head fully masked, in every form of the op",
    "047": "parameter gradients with an empty row left out of the loss",
    "048": "the first key tiles are -inf for some rows, by bias and by mask",
    "049": "masks written for longer sequences; exp(lse) in the loss",
    "052": "an empty attention is (0, -inf) in three ways, and merges away",
    "054": "bias 43 wide, as it is and inside rows of 48 with NaN between",
    "058": "decode over cache slack of NaN and Inf, lengths 0, 1 and full",
    "060": "a request of NaN in the batch; the shared pages of a cache come later",
    "063": "logits of -21,700 on every key, no sentinel is mistaken for them",
    "064": "negative logits behind hidden tiles; a shift of 1 to 1e5 leaves out alone",
    "065": "softcap at 88 to 200 times the cap: +-cap, gradient 0",
    "066": "lse below -88.7 with an all-true mask at S % 128 == 64",
    "068": "scale 0 is the mean of what is visible, scale < 0 negates the queries",
    "070": "token 65,536 by the formula of the one before (windowed attention)",
    "073": "a loss of lse alone: gradients of q and k, none of v",
    "077": "one natural-log lse from dense and packed, MLA dims included",
    "078": "lse is torch.logsumexp of the scores",
    "079": "merging empty states, associativity, gradients",
    "081": "empty sequences hold -inf in their own slots only",
    "082": "sink alone, and sinks far above and below the scores",
    "083": "batch of 10,000 and 15,000, forward and backward",
    "084": "batch of 8300 at the reported H 16, D 128",
    "087": "batch of 768 expanded from one row; 32 of the 2048 tokens",
    "088": "65,535, 65,536 and 80,000 sequences, packed (1-2 tokens) and split (16)",
    "090": "batch x heads of 65,538 (dense attention)",
    "091": "packed decode with sequences x heads of 72,000 (dense attention)",
    "093": "checkpointing at 131,073 tokens changes no bit (windowed attention)",
    "095": "batch of 65,535 and 65,536: every row has its gradient",
    "098": "K and V views at 2^31 elements into a cache; page 65,536 at element 2^31",
    "100": "fused QKV views whose last token lies past 2^31 elements",
    "101": "1269 documents with their own positional bias or slopes (a tenth)",
    "102": "a dense bias of more than 2^31 elements in sparse storage, and stride 0",
    "106": "last dim not contiguous: dense, packed, kv-packed, upstream gradient",
    "107": "every mix of layouts; fake strides are the real ones",
    "109": "strides of singleton dims are ignored",
    "110": "strided features where a fused CPU op could run",
    "111": "one output layout from every backend",
    "112": "split keys merged, from BSHD and from BHSD views",
    "113": "K and V interleaved in one cache and in one buffer of pages, read and written",
    "115": "upstream gradient that is a split view (dense attention)",
    "117": "slots 2^30 elements apart are read and written right",
    "118": "lengths beyond the storage or the table are refused, exactly full is fine",
    "120": "1, 2, 5 new tokens with rotary over a cache equal the whole",
    "122": "1, 2, 4, 8 splits of a packed batch, gradients too",
    "124": "a growing cache, in one pass and in splits: never NaN",
    "125": "pages of 1, 7, 16, 128 and 256: the same bits as without pages",
    "126": "kv lengths 1 to 17 for 8 queries, 14 heads over 2",
    "127": "used lengths 0, 1 and full, a last page of any fill; a negative one is refused",
    "131": "length 0 among others, MLA dims included",
    "132": "all lengths 0 and nothing stored; a table without columns",
    "134": "1023 unused slots are written as 0 over NaN buffers",
    "136": "drafts of 1 and 4 tokens over pages of 1 and 16: the same bits",
    "138": "D 576 / E 512 and 192 / 128, below and above one key tile",
    "139": "D 192 / E 128 over pages of 1 to 200, below and above a tile",
    "141": "D 40 to 176 equals the zero-padded computation",
    "144": "D 136 to 176 with E 128 and 72, gradients",
    "145": "packed D 100 with a decay bias and its gradient (lengths / 10)",
    "146": "NaN right after every row at D 60 and 100 (dense attention)",
    "148": "decode at D 80, 96, 160",
    "149": "12 heads over 1 and ratios 3, 5, 6, 7 in decode",
    "150": "grouped queries of 1 to 127 rows at D 128",
    "151": "the upper half of the features counts",
    "153": "grouped heads equal repeated ones over several tiles",
    "156": "E 128 for D 64 with groups, eager and compiled",
    "160": "gradient of the sink, by autograd and by hand",
    "161": "out and lse in the loss with a sink; no keys at all",
    "162": "sink gradient of ragged documents at four pairs of dims",
    "163": "a predicate of (b, h, m, n) in forward and backward; finite differences",
    "165": "slopes [H] and [B, H] with softcap, window, dropout, packed, frozen q, k, v",
    "166": "ALiBi in packed training and in decode with used lengths",
    "167": "the distance, pinned by the lse",
    "168": "slopes belong to the caller: two halves of the heads are the whole",
    "172": "gradient through the forward's own mask; finite differences",
    "173": "checkpointing with dropout is neutral, bit for bit",
    "177": "30 repeats, bitwise",
    "178": "30 repeats where many rows add to one place",
    "179": "20 MLA decodes in 1 and 16 splits, bitwise",
    "182": "packed documents under checkpointing",
    "219": "2, 4, 8 ranks within twice the fp32 error of one",
    "221": "replicated keys are one piece of the merge",
    "223": "tail padding of packed documents in 2 R chunks, repeated bitwise",
    "224": "gradients of a ring of pieces equal one device",
    "226": "fewer tokens than chunks, down to one",
    "228": "gradients have their input's dtype, fp32 partials too",
    "229": "one gradient per argument through every public op",
    "232": "FP8 is refused with a sentence, before anything runs",
    "236": "every dense op and merge in one graph",
    "237": "vmap equals the loop, with keys of all or of each, with and without a mask",
    "238": "grad under vmap: the gradients of each row by itself",
    "239": "as C237, with grouped heads",
    "240": "export with a batch size from the data, with lengths and with bias",
    "242": "at most three compilations over six sizes, right values after each",
    "243": "an exported graph run with longer sequences (CUDA graphs need a GPU)",
    "246": "autocast with q, k fp32 and v bf16, eager and compiled; refused outside",
    "248": "tensors on two devices are refused (a second GPU needs GPUs)",
    "067": "a gate of +176: exact from a state of zeros, huge otherwise, never NaN",
    "184": "gates of -50, -1e4 and -inf, fp32 and bf16, gradients",
    "185": "gates of 0, all or some, equal the delta rule",
    "188": "convolution and rule in two passes linked by states, gradients",
    "189": "the same with a batch, split in the middle",
    "191": "1 to 63 steps, every gradient",
    "193": "refused with a batch; flattened it equals the rows, weight gradient too",
    "195": "refused with a sentence",
    "197": "its state is kept bit for bit, and so is its gradient",
    "198": "0 past the last sequence, with NaN in inputs and upstream",
    "200": "outputs just after interior padding, whatever it holds",
    "201": "q, k, v in [0, 1), gradient of the state",
    "203": "log gates below -150 from a projection",
    "206": "gate gradient at -30 a step; the first is exactly 0",
    "209": "a second segment with left padding, through convolution and rule",
    "210": "1, 3 and 64 steps of padding",
    "211": "zeros through convolution and norm, finite gradients",
}

_SPARSE = "sparse attention is not here yet"
_NOT_YET = {
    "092": "PaTH attention is not offered; no dense op keeps a quadratic temporary",
    "181": "nothing is tuned by running it; C029 repeats first calls",
    "196": "a layer's bookkeeping; there are no layers here, and no op writes its bounds",
    "212": f"{_SPARSE}: invalid entries of a top-k list",
    "214": f"{_SPARSE}: top-1 of blocks is the own block",
    "217": f"{_SPARSE}: more blocks selected than there are",
    "218": f"{_SPARSE}: sentinels in block indices",
    "230": "FP8 kernels are not here yet; FP8 is refused (C232)",
}

INDEX: dict[str, Case] = {
    **{f"C{n}": Case("tested", reason) for n, reason in _TESTED.items()},
    **{f"C{n}": Case("not applicable", reason) for n, reason in _NOT_YET.items()},
    **{
        f"C{n}": Case("elsewhere", HUGGING_FACE)
        for n in THEMES["Hugging Face Transformers"].split()
    },
}


def ids() -> list[str]:
    return [f"C{number}" for theme in THEMES.values() for number in theme.split()]


def case_tests(folder: Path, *, on_gpu: bool = False) -> dict[str, list[str]]:
    """Test functions by the ids in their names, as `file::function`.

    on_gpu: without those that need fp64, which no kernel computes in.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                if on_gpu and "in_double" in map(ast.unparse, node.decorator_list):
                    continue
                for number in re.findall(r"_c(\d{3})(?=_)", node.name):
                    found.setdefault(f"C{number}", []).append(f"{path.name}::{node.name}")
    return found


def render() -> str:
    """docs/cases.md."""
    counts = dict.fromkeys(("tested", "elsewhere", "not applicable"), 0)
    for case in INDEX.values():
        counts[case.status] += 1
    lines = [
        "# Cases from the field",
        "",
        "Failures that people reported of attention libraries, and what stands here against each.",
        "Each failure has a number here; a test carries its number in its name,",
        "as in `tests/cases/test_varlen.py::test_c001_varlen_causal_backward_few_keys`. Written by",
        "`python -m tests.cases.index`.",
        "",
        f"{counts['tested']} of {len(INDEX)} are tested in `tests/cases/`, "
        f"{counts['elsewhere']} in `{HUGGING_FACE}`;",
        f"{counts['not applicable']} belong to what is not here yet. `make gpu-test` runs on a GPU "
        "those that say so.",
    ]
    found = case_tests(Path(__file__).parent)
    on_gpu = case_tests(Path(__file__).parent, on_gpu=True)
    for theme, numbers in THEMES.items():
        lines += ["", f"## {theme}", "", "| id | status | GPU | what |", "|---|---|---|---|"]
        for number in numbers.split():
            case = INDEX[f"C{number}"]
            files = sorted({test.split("::")[0] for test in found.get(f"C{number}", [])})
            where = ", ".join(f"`{name}`" for name in files) or case.status
            reason = f"`{case.reason}`" if case.status == "elsewhere" else case.reason
            gpu = "yes" if f"C{number}" in on_gpu else ""
            lines.append(f"| C{number} | {where} | {gpu} | {reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
