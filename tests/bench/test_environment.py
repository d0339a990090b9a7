"""What is said of the machine beside figures."""

import torch

from tilewise.bench import environment


def test_a_busy_machine_is_told() -> None:
    facts = environment.describe(torch.device("cpu"))
    assert facts["cores"] >= 1 and (facts["load"] is None or facts["load"] >= 0)
    assert environment.describe_busy({"load": 3.0, "cores": 2}) == ""
    assert "3.1 threads on 2 cores" in environment.describe_busy({"load": 3.1, "cores": 2})
    # Where the system does not say, and of runs stored before it was asked.
    assert environment.describe_busy({"load": None, "cores": 2}) == ""
    assert environment.describe_busy({"cores": 2}) == ""
