"""The kernels of a rank's rows: no number is stored where another warp may still load it."""

import pytest
import torch

from tests.compile.offline import compile_call, recorded
from tilewise.core.partials import Partial
from tilewise.kernels.structs import Statistics
from tilewise.parallel.triton_rows import merge_rows, row_deltas

M, H, E = 96, 2, 128


def partial() -> Partial:
    return Partial(torch.randn(1, M, H, E), torch.randn(1, H, M))


def merge_and_weigh() -> None:
    total, part = partial(), partial()
    merge_rows(total, part, total.out.to(torch.bfloat16))
    merge_rows(
        Partial(total.out[:, 32:], total.lse[..., 32:]),
        Partial(part.out[:, 32:], part.lse[..., 32:]),
    )
    row_deltas(total.out, part.out.to(torch.bfloat16), part.lse)


def test_what_is_stored_for_rows_is_not_what_is_loaded() -> None:
    """A race that an H200 showed: an lse was read by every warp and written over by one."""
    with recorded("sm_90") as launches:
        merge_and_weigh()
    assert [launch.name for launch in launches] == ["merge_rows", "merge_rows", "row_deltas"]
    for launch in launches:
        *read, written = [x.ptr for x in launch.arguments if isinstance(x, Statistics)]
        places = {x.untyped_storage().data_ptr() for x in read}
        assert read and written.untyped_storage().data_ptr() not in places


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_they_compile(target: str) -> None:
    found = compile_call(merge_and_weigh, target)
    assert {x.name for x in found} == {"merge_rows", "row_deltas"}
    assert all(x.spills == 0 and x.mma == "" for x in found)
