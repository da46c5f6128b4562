"""The comparison finds one element that is another one."""

from __future__ import annotations

import numpy as np
import pytest
from seeds import seeded

from simulation.agreement import Agreement
from simulation.loco_float64 import LoCoSimulation


@pytest.mark.parametrize("changed", ["nothing", "sent", "errors", "shards"])
def test_one_changed_element_of_what_ranks_report_is_found(changed: str) -> None:
    real, agreement = LoCoSimulation(3, 300, bits=4), Agreement(LoCoSimulation(3, 300, bits=4))
    random = np.random.default_rng(seeded(1))
    for step in range(2):
        gradients = random.standard_normal((3, 300)).astype(np.float32)
        result = real.step(gradients)
        report = {name: getattr(result, name).astype(np.float32) for name in ("sent", "errors", "shards")}
        if changed == "nothing" or step == 0:
            agreement.check(gradients, **report)
            continue
        report[changed][2, 7] = np.nextafter(report[changed][2, 7], np.float32(np.inf))
        with pytest.raises(AssertionError, match=rf"step 2, rank 2, element 7: {changed.removesuffix('s')}"):
            agreement.check(gradients, **report)
        with pytest.raises(AssertionError, match="has the shape"):
            agreement.check(gradients, **{changed: report[changed][:, :-1]})
