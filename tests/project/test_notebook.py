"""The notebook runs from its first cell to its last as it stands, but for sizes, and keeps no outputs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.documented import ROOT

CELLS: list[dict[str, Any]] = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
SIZES = "HIDDEN, LAYERS, LENGTH ="
"""How the cell begins whose values are smaller here."""


@pytest.mark.usefixtures("one_thread")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_MEASURE", "never")
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(compile(source, f"cell {number}", "exec"), names)
            if source.startswith(SIZES):
                names |= {"HIDDEN": 32, "LAYERS": 2, "LENGTH": 32, "STEPS": 4, "MICRO_BATCHES": 2, "SEQUENCES": 2}
    said = capsys.readouterr().out
    assert "penstock-run/broken-off: begins after step 2" in said
    assert "4 losses of the run that went on are equal to the last bit" in said
    assert "\ndef " in said, "what the exported model goes on with"


def test_the_notebook_keeps_no_outputs() -> None:
    for cell in CELLS:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
