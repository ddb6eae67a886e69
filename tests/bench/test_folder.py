"""``bench.folder`` at a small size: the way in and out takes memory that does not grow with the model."""

import json
from pathlib import Path

from tests import warm

SCRIPT = """
import ctypes, json, sys
from pathlib import Path
import torch
from bench import folder
from bench.workload import peak_rss, resident

torch.set_num_threads(1)
M_MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # what is freed goes back to the system
scratch, found = Path(sys.argv[1]), {}
for name, layers in (("first", 2), ("small", 2), ("large", 14)):  # what all share is there after the first
    place = scratch / name
    config = folder.config_of(layers=layers, hidden=512, vocabulary=2048)
    parameters = folder.make(place / "in", config, shard=16_000_000)
    for stage in ("in", "out"):
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = resident()
        folder.run(stage, place, "64MiB", "64MiB")
        found[f"{name} {stage}"] = peak_rss() - before
    found[name] = parameters * 4
    assert folder.outline(place / "in") == folder.outline(place / "out")
print(json.dumps(found))
"""


def test_the_way_in_and_out_takes_memory_that_does_not_grow_with_the_model(tmp_path: Path) -> None:
    done = warm.run(["-c", SCRIPT, tmp_path])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    more = found["large"] - found["small"]
    assert more > 140e6
    for stage in ("in", "out"):
        assert found[f"large {stage}"] < 60e6, found  # of a model that takes 186 MB in fp32
        assert found[f"large {stage}"] - found[f"small {stage}"] < 0.15 * more, found
