"""The catalog: every dotted name leads somewhere, and every public op is in it."""

from operator import attrgetter

import pytest

import tilewise
from tilewise import catalog

ROLES = ("public", "run", "exact", "eager", "floors", "cases", "takes")


@pytest.mark.parametrize("op", catalog.OPS, ids=lambda op: op.name)
def test_every_name_loads(op: catalog.Op) -> None:
    for role in ROLES:
        assert callable(op.load(role))
    assert op.load("public") is attrgetter(op.name)(tilewise)
    assert op.backends
    assert "arXiv" in op.paper


def test_every_public_op_is_verified_or_tested_apart() -> None:
    ops = {name for name in tilewise.__all__ if name.startswith("attention") or name == "merge"}
    # It returns nothing and adds into buffers: tests/contract/test_equivalences.py holds it.
    assert ops - {op.name for op in catalog.OPS} == {"attention_partial_backward"}
