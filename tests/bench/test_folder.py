"""``bench.folder`` at a small size: the way in and out takes memory that does not grow with the model."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from bench import folder
from bench.workload import peak_rss, resident

torch.set_num_threads(1)
scratch, found = Path(sys.argv[1]), {}
for name, layers in (("small", 2), ("large", 14)):
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
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    more = found["large"] - found["small"]
    assert more > 140e6
    for stage in ("in", "out"):
        assert found[f"large {stage}"] < 60e6, found  # of a model that takes 186 MB in fp32
        assert found[f"large {stage}"] - found[f"small {stage}"] < 0.15 * more, found
