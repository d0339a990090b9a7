"""The support table says what is so: what a backend takes is within budget, what it does not it
refuses."""

import pytest

from tests.helpers import OPS, UNDER_TEST, backends
from tilewise.report import support
from tilewise.report.support import FEATURES, Feature
from tilewise.report.verify import verify_case


@pytest.mark.parametrize("backend", backends("tiled"))
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.title)
def test_what_it_takes_is_within_budget(feature: Feature, backend: str) -> None:
    case = feature.load()
    if support.why_not(feature, backend):
        with pytest.raises(NotImplementedError, match=f"backend '{backend}'"):
            OPS[feature.op].load("run")(case, case.tensors, backend)
        return
    failed = [str(x) for x in verify_case(OPS[feature.op], case, backend) if not x.is_within]
    assert not failed, failed


@pytest.mark.skipif(UNDER_TEST.backend is not None, reason="asks every backend")
def test_cells_that_are_known() -> None:
    table = support.tabulate()
    lines = {row[0]: dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows}
    assert len(lines) == len(FEATURES)
    assert set(lines["bf16"].values()) == {"yes"}
    assert "not float64" in lines["fp64"]["triton"]
    assert "not float32" in lines["fp32, to fp32 accuracy"]["hopper"]
    assert lines["any predicate"]["triton"] == "yes" != lines["any predicate"]["hopper"]
    assert lines["dropout"]["hopper"].startswith("drops nothing")
    assert {line["tiled"] for line in lines.values()} == {"yes"}
