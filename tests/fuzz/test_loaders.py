"""Files of other users' making: every loader reads what is there, or says in one line what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .loaders import LOADERS, Loader
from .outcome import outcome

INPUTS = 200


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.name)
def test_any_file_is_read_or_refused_in_one_line(loader: Loader, tmp_path: Path) -> None:
    seen: dict[str, int] = {}

    @settings(max_examples=INPUTS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        found = outcome(loader, tmp_path, data.draw(loader.inputs))
        seen[found] = seen.get(found, 0) + 1

    fuzz()
    assert seen.get("refused", 0) > INPUTS // 20, "hardly any input was wrong"
    assert seen.get("read", 0) > 0, "no input was right"
