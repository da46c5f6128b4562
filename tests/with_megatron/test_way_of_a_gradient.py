"""The files that docs/architecture.md says a gradient passes are those that run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def files_run() -> set[str]:
    """In a worker: the package's files whose functions run from Megatron's call to the sums in the shards."""
    from with_megatron.seam_runs import built

    import megatron_patch

    tiny, _ = built({"dtypes": ("float32",)}, {"bits": 4})
    tiny.step(tiny.random_gradients(0))  # What is made at the first use is there.
    package, files = str(ROOT / "megatron_patch") + "/", set()

    def note(frame: Any, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(package) and frame.f_code.co_name != "<lambda>":
            files.add(path.removeprefix(package))

    tiny.ddp.zero_grad_buffer()
    tiny.backward(tiny.random_gradients(1))
    sys.setprofile(note)
    try:
        tiny.ddp.finish_grad_sync()
    finally:
        sys.setprofile(None)
    megatron_patch.disable()
    return files


def test_the_page_lists_the_files_that_a_gradient_passes(pool: Any) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## The way of a gradient")[2].partition("\n## ")[0]
    numbered = dict(re.findall(r"^\| (\d+) \| `([\w/]+\.py)`", section, re.MULTILINE))
    ran = set.union(*pool.run(files_run, world_size=2))
    # Options are looked at everywhere; on a GPU nothing stands in for it.
    passed = {name for name in ran if name != "config.py" and not name.startswith("megatron/cpu/")}
    assert set(numbered.values()) == passed
    assert sorted(map(int, numbered)) == list(range(1, len(passed) + 1))
