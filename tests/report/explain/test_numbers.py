"""The figures of `tilewise explain` against what is known: by hand, from a dense mask, from the
library's own maps of tiles."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewise.cli import main
from tilewise.core.tiles import tile_map
from tilewise.report.explain import explanation, gpus, mask_text, plan, tables, tiles, traffic
from tilewise.report.explain.request import TERMS, Request

KNOWN = ["--seqlen", "8192", "--heads", "32", "--head-dim", "128", "--batch", "2"]
KNOWN += ["--dtype", "bf16", "--gpu", "h100"]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def ask(text: str = "causal()", N: int = 1024, M: int | None = None, **changes: Any) -> Request:
    sizes = {"B": 2, "M": N if M is None else M, "N": N, "H": 4, "G": 2, "D": 64, "E": 64}
    chosen = {"dtype": torch.bfloat16, **sizes, **changes}
    return Request(mask=mask_text.read(text), mask_text=text, **chosen)


def read_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["explain", *argv, "--no-compile", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_known_example(capsys: pytest.CaptureFixture[str]) -> None:
    found = read_json(capsys, *KNOWN)
    scores, counted = found["scores"], found["tiles"]
    assert scores["per_head_bytes"] == 128 * MIB
    assert (scores["all_bytes"], scores["heads"]) == (8 * GIB, 64)
    assert (scores["key_tiles"], scores["tile_bytes"]) == (64, 32 * KIB)
    forward = found["kernels"][0]
    assert (forward["block_m"], forward["block_n"]) == (128, 128)
    # Causal: of 64 x 64 tiles the diagonal in part, what is below it whole, half of all skipped.
    assert counted["partial"] == 64 * 64
    assert counted["full"] == counted["skipped"] == 64 * (64 * 63 // 2)
    assert counted["visible_pairs"] == 64 * 8192 * 8193 // 2
    assert found["forward"]["useful_flops"] == 4 * 128 * counted["visible_pairs"]
    assert found["forward"]["plain"]["bytes"] == 32 * GIB + 4 * 128 * MIB
    assert found["forward"]["tiled"]["bytes"] == 4 * 128 * MIB + 2 * MIB
    assert found["backend"]["name"] == "hopper"
    assert found["forward"]["plain"]["binds"] == "device memory"
    assert found["forward"]["tiled"]["binds"] == "matrix products"


def test_table_says_the_known_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *KNOWN, "--no-compile"]) == 0
    said = capsys.readouterr().out
    for words in ("128 MiB", "8 GiB", "64 x 64", "32 KiB", "4096 partial", "(50.8 %)"):
        assert words in said


MASKS = (
    "full", "causal", "window(20, 0)", "window(0, 9)", "window(5, 5)", "causal(offset=3)",
    "window(3, None)", "causal | prefix([5, 60])", "key_padding([10, 77])", "chunked(13)",
    "~causal", "window(40, 0) & left_padding(7)", "documents([0, 20, 33]) & causal",
    "blocks([[1, 0], [0, 1]], 32, 32) | causal",
)  # fmt: skip


@pytest.mark.parametrize("text", MASKS)
def test_tiles_are_those_of_the_mask(text: str) -> None:
    draw = random.Random(text)
    for _ in range(6):
        M, N = draw.randint(1, 150), draw.randint(1, 150)
        block_m, block_n = draw.choice((16, 32, 64)), draw.choice((16, 32, 64))
        request = ask(text, N, M, H=3, G=3)
        found = tiles.count(request, block_m, block_n)
        assert found.pairs == int(request.mask.dense(2, 3, M, N).sum())
        assert found.area >= found.pairs
        if "documents" in text:
            continue
        kinds = tile_map(request.mask, request.positions, block_m, block_n).expand(2, 3, -1, -1)
        expected = [int((kinds == kind).sum()) for kind in (2, 1, 0)]
        assert [found.full, found.partial, found.skipped] == expected, (M, N, block_m, block_n)


def test_documents_have_tiles_of_their_own() -> None:
    request = ask("documents([0, 100, 300]) & causal", 300)
    assert tiles.edges_of(request, 64, 128).rows == [0, 64, 100, 164, 228, 292, 300]
    assert tiles.edges_of(request, 64, 128).keys == [0, 100, 228, 300]
    # Of a document of 100 and one of 200: 2 + 4 query tiles, with no key tile over both.
    found = tiles.count(request, 64, 128)
    assert found.visited == 8 * (2 + (1 + 1 + 2 + 2))


def test_a_window_of_a_million_tokens_is_counted_at_once() -> None:
    found = tiles.count(ask("window(1023, 0)", 1 << 20, H=1, G=1, B=1), 128, 128)
    assert found.pairs == (1 << 20) * 1024 - 1023 * 1024 // 2
    assert found.partial == 2 * 8192 - 8
    assert found.full == 8192 * 7 - 7 * 8 // 2


@pytest.mark.parametrize("gpu", gpus.GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_launch_is_one_that_the_page_knows(gpu: gpus.Gpu) -> None:
    cases = [("causal", ()), ("causal | prefix(9)", ()), ("documents([0, 9]) & causal", ())]
    cases += [("causal", (term,)) for term in TERMS]
    for text, terms in cases:
        made = plan.make(ask(text, 256, terms=terms), gpu)
        roles = [launch.role for launch in made.launches]
        assert "other" not in roles
        assert roles.count("forward") == 1
        gradients = {name for launch in made.launches for name in launch.makes}
        is_one_pass = roles.count("backward") == roles.count("finish") == 1
        assert is_one_pass or (gradients == {"dK", "dV"} and "rows" in roles)
        is_hopper = "hopper" in (made.forward.name if made.forward else "")
        assert is_hopper == (made.choice.name == "hopper")


@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("name", ["h100", "a100"])
def test_the_backward_reads_what_is_there(name: str, D: int) -> None:
    """Inputs, what the forward left, what an earlier step wrote; and what is kept is counted."""
    request = ask(D=D, E=D)
    found = explanation.explain(request, gpus.find(name), compiles=False)
    backward = found.directions[1]
    there = {"Q", "K", "V", "dO", "O", "LSE", traffic.REST}
    for step in backward.tiled:
        assert set(step.reads) <= there, step.title
        there |= set(step.writes)
    assert traffic.rest_bytes(request) == 2 * 1024 * 4 * D * 2
    written = {name: size for step in backward.tiled for name, size in step.writes.items()}
    scratch = sum(size for name, size in written.items() if name not in ("dQ", "dK", "dV"))
    held = traffic.sizes(request)["LSE"] + traffic.rest_bytes(request) + scratch
    assert backward.tiled_extra_bytes == held
    assert any("takes off O too" in line for line in tables.sentences(found))


def test_plan_takes_the_tiles_of_the_tables() -> None:
    from tilewise.dense.config import Key, forward_config

    for D in (64, 96, 128, 256):
        made = plan.make(ask(D=D, E=D), gpus.find("a100"))
        key = Key(torch.bfloat16, D, "sm_80", False)
        assert made.forward is not None
        assert made.forward.config == forward_config(key)


def test_what_no_kernel_takes_is_plain_torch() -> None:
    found = explanation.explain(ask(D=512, E=512, N=512), gpus.find("h100"))
    assert found.plan.choice.name == "tiled"
    assert found.plan.launches == []
    assert "head dims up to 256" in found.plan.choice.rejected["triton"]
    assert explanation.as_json(found)["forward"]["tiled"] is None
    assert all("tiled" not in row[:2] for table in tables.tabulate(found) for row in table.rows)
    assert any("plain torch" in line for line in tables.sentences(found))


def test_a_binary_is_read() -> None:
    found = explanation.explain(ask(N=256), gpus.find("rtx4090"))
    forward = found.binaries[0]
    assert forward.registers is not None and 32 <= forward.registers <= 255
    assert 1 * KIB <= forward.shared_bytes <= found.gpu.shared_kib * KIB


@pytest.mark.parametrize(("D", "binds"), [(64, "exponentials"), (256, "matrix products")])
def test_exponentials_bind_where_heads_are_narrow(D: int, binds: str) -> None:
    """Of D columns a tile's products take 4 D FLOP for each exponential; a B200 makes one
    exponential in the time of 511."""
    found = explanation.explain(ask("full", 4096, D=D, E=D), gpus.find("b200"), compiles=False)
    step = found.directions[0].tiled[0].as_json(found.gpu, found.request)
    assert step["flops"] == 4 * D * step["exps"]
    assert step["binds"] == binds


def test_one_query_waits_for_memory() -> None:
    found = explanation.explain(
        ask("full", 8192, M=1, H=8, G=8, D=128, E=128), gpus.find("h100"), compiles=False
    )
    forward = found.directions[0]
    assert forward.binds(forward.tiled, found.gpu, found.request) == "device memory"
    assert traffic.sizes(found.request)["K"] == 2 * 8192 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seqlen", "0"], "seqlen must be at least 1, got 0"),
        (["--seqlen", str(1 << 21)], "seqlen must be at most 1048576"),
        (["--heads", "7", "--kv-heads", "2"], "must be a multiple of the kv heads"),
        (["--gpu", "tpu"], "gpu must be one of a100, h100, h200, b200, rtx4090, mi300x, got 'tpu'"),
        (["--dtype", "int8"], "dtype must be bf16, fp16 or fp32, got 'int8'"),
        (["--terms", "relu"], "terms must be some of softcap"),
        (["--mask", "causl()"], "mask may use blocks, causal"),
        (["--mask", "window(1"], "is no expression"),
        (["--mask", "window(-1, 0)"], "left must be None or an int >= 0"),
        (["--mask", "key_padding([1, 2, 3])", "--batch", "2"], "expected 2 entries"),
        (["--mask", "window(__import__('os'), 0)"], "takes numbers, lists and None"),
        (["--mask", "no_such_file.py:mask"], "mask file 'no_such_file.py'"),
        (["--html", "no/such/folder/x.html"], "cannot be written"),
        (["--mask", "~chunked(7)", "--seqlen", "1048576"], "are too many"),
    ],
)
def test_one_sentence(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert main(["explain", *argv]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1 and found.err.endswith(".\n")
    assert words in found.err


def test_a_mask_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def checkered(b, h, m, n):\n    return (m + n) % 2 == 0\n")
    request = ask(f"{path}:checkered", 64)
    assert tiles.count(request, 32, 32).pairs == 8 * 64 * 32
    with pytest.raises(ValueError, match="has no mask and no function 'other'"):
        mask_text.read(f"{path}:other")


@pytest.mark.parametrize("name", ["H100", "RTX 4090", "rtx-4090", "NVIDIA H200", "4090"])
def test_gpus_are_found_however_they_are_spelled(name: str) -> None:
    assert gpus.find(name).name in name.lower().replace(" ", "").replace("-", "") or "4090" in name


@pytest.mark.parametrize(
    ("name", "processors", "memory_gib", "found"),
    [
        ("NVIDIA H200", 132, 139.8, "h200"),
        ("NVIDIA H100 80GB HBM3", 132, 79.1, "h100"),
        ("NVIDIA H100 PCIe", 114, 79.1, None),
        ("NVIDIA A100-SXM4-80GB", 108, 79.2, "a100"),
        ("NVIDIA A100-SXM4-40GB", 108, 39.4, None),
        ("NVIDIA A100 80GB PCIe", 108, 79.2, None),
        ("NVIDIA GeForce RTX 4090", 128, 23.6, "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", 114, 23.6, None),
        ("AMD Instinct MI300X", 304, 191.7, "mi300x"),
    ],
)
def test_the_gpu_here_is_one_of_the_table_or_none(
    monkeypatch: pytest.MonkeyPatch, name: str, processors: int, memory_gib: float, found: str
) -> None:
    here = SimpleNamespace(
        name=name, multi_processor_count=processors, total_memory=memory_gib * GIB
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: here)
    gpu = gpus.find_here()
    assert (None if gpu is None else gpu.name) == found
