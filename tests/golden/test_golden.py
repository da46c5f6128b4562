"""What exchanges send, sum and keep is what was recorded before the package was rearranged, bit for bit."""

from __future__ import annotations

import json
from typing import Any

from golden import record


def test_exchanges_are_the_recorded_ones(pool: Any) -> None:
    recorded = json.loads(record.RECORD.read_text())
    chosen = record.setups()
    assert recorded.keys() == chosen.keys()
    of_ranks = pool.run(record.several, list(chosen.values()))
    found = {name: record.all_ranks([rank[at] for rank in of_ranks]) for at, name in enumerate(chosen)}
    assert [name for name in chosen if found[name] != recorded[name]] == []
