"""The arithmetic of the plan table, at the points where it is plain."""

from __future__ import annotations

import pytest

from tilewise.parallel import volumes
from tilewise.parallel.model import H200, Machine, Prediction, flops_of, plan_table, predict
from tilewise.parallel.volumes import Shape

SHAPE = Shape(1, 65536, 32, 8, 128, 128, 2)
FREE = Machine("no cost to send", 1e12, 1e12, float("inf"), float("inf"), 0.0)
SLOW = Machine("no cost to compute", float("inf"), float("inf"), 1e9, 1e8, 1e-3)
NAMES = ("ring", "all_gather", "ulysses", "usp")


def of(name: str, machine: Machine, ranks: int = 8) -> Prediction:
    return predict(name, SHAPE, ranks, machine, inner=2)


def same(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b))


def test_flops_are_counted_by_hand() -> None:
    assert flops_of(Shape(2, 3, 5, 1, 7, 7), is_causal=False) == 4 * 2 * 5 * 3 * 3 * 7
    assert flops_of(SHAPE) == 2 * 32 * 65536**2 * 128


@pytest.mark.parametrize("name", NAMES)
def test_free_links_leave_the_rate_of_one_gpu(name: str) -> None:
    found = of(name, FREE)
    assert found.efficiency == 1.0
    assert same(found.tflops, 1.0)
    assert same(found.compute_s, 3.5 * flops_of(SHAPE) / 8 / 1e12)


@pytest.mark.parametrize("name", NAMES[:3])
def test_one_rank_sends_nothing(name: str) -> None:
    found = of(name, SLOW, 1)
    assert (found.received, found.exposed_s) == (0.0, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_without_compute_every_byte_is_exposed(name: str) -> None:
    """Then the time is the bytes over the link, and a latency a message."""
    found = of(name, SLOW)
    messages = {"ring": 7 + 7 + 1, "all_gather": 4 + 4 + 4, "ulysses": 4, "usp": 4 + 3 + 3 + 1}
    assert same(found.exposed_s, found.received / 1e9 + messages[name] * 1e-3)


def test_a_ring_hides_what_is_shorter_than_a_step() -> None:
    machine = Machine("even", 1e12, 1e12, 1e12, 1e12, 0.0)
    found = of("ring", machine)
    assert found.exposed_s == 0.0
    # Two ranks, links as fast as work: what is left of a message after the part that hides it.
    volume, step = volumes.ring(SHAPE, 2), 2.5 * flops_of(SHAPE) / 4 / 1e12
    link = volume.forward / step
    found = predict("ring", SHAPE, 2, Machine("slow", 1e12, 1e12, link, link, 0.0))
    # Forward, K and V take 2.5 of its steps, backward one; their gradients twice as long.
    assert same(found.exposed_s, (1 - 1 / 2.5) * step + 0.75 * step + (2 - 0.75) * step)


def test_pairs_stand_for_an_area() -> None:
    causal = predict("ring", SHAPE, 8, H200)
    assert same(predict("ring", SHAPE, 8, H200, pairs=SHAPE.S**2 / 2).seconds, causal.seconds)


def test_beyond_a_node_the_slow_link_counts() -> None:
    near, far = (of("ulysses", SLOW, ranks) for ranks in (8, 16))
    assert far.exposed_s > 2 * near.exposed_s > 0
    assert far.received < near.received


def test_the_table_has_every_size() -> None:
    rows = plan_table(SHAPE._replace(S=8192))
    sizes = sorted({row.ranks for row in rows})
    assert sizes == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert {row.schedule for row in rows if row.ranks == 8} == {"ring", "all_gather", "ulysses"}
    assert {row.schedule for row in rows if row.ranks == 1024} == {"ring", "all_gather", "usp"}
    assert all(0 < row.efficiency <= 1 for row in rows)
    assert all(row.tflops <= H200.forward_flops / 1e12 for row in rows)


def test_the_busiest_rank_is_what_counts() -> None:
    """Of 12 heads over 8 ranks some have two, as if there were 16."""
    uneven = predict("ulysses", SHAPE._replace(H=12, G=12), 8, FREE)
    even = predict("ulysses", SHAPE._replace(H=16, G=16), 8, FREE)
    assert same(uneven.seconds, even.seconds)
    assert same(uneven.tflops, 12 / 16)


@pytest.mark.parametrize("name", NAMES)
def test_forward_alone(name: str) -> None:
    found = predict(name, SHAPE, 8, SLOW, inner=2, backward=False)
    messages = {"ring": 7, "all_gather": 4, "ulysses": 2, "usp": 2 + 3}
    assert same(found.exposed_s, found.received / 1e9 + messages[name] * 1e-3)
    assert same(predict(name, SHAPE, 8, FREE, inner=2, backward=False).tflops, 1.0)
