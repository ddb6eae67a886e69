"""Draws one step of a run's trace as an SVG: a row per lane, a bar per op, the memory in use below.

    python docs/timeline.py runs/demo/trace.json docs/timeline.svg --step 3

Needs nothing but Python, so that the picture in the README can be made anew anywhere.
"""

import argparse
import json
from pathlib import Path
from typing import Any

WIDTH, LEFT, ROW, GAP = 1000, 90, 26, 8
KINDS = {
    "F": ("#4c8bd6", "forward"),
    "E": ("#2f6db5", "loss"),
    "B": ("#1d4a80", "recompute + backward"),
    "RW": ("#e0a030", "weights in"),
    "UW": ("#e0a030", ""),
    "RS": ("#7fb069", "optimizer state in and out"),
    "WS": ("#7fb069", ""),
    "WW": ("#e0a030", ""),
    "OP": ("#3c7a36", "optimizer step"),
    "DG": ("#c8553d", "gradients down"),
    "DC": ("#8a6fb0", "checkpoints out and back"),
    "WC": ("#8a6fb0", ""),
    "RC": ("#8a6fb0", ""),
    "UC": ("#8a6fb0", ""),
}


def kind_of(name: str) -> str:
    return name[:2] if name[:2] in KINDS else name[:1]


def load(path: Path, step: int) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The ops of one step, and the lane of each row. A trace that was cut off lacks its closing bracket."""
    text = path.read_text(encoding="utf-8").rstrip()
    events = json.loads(text if text.endswith("]") else text.rstrip(",") + "]")
    rows = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    ops = [e for e in events if e["ph"] == "X" and e["args"].get("step") == step]
    if not ops:
        raise SystemExit(f"{path} has no step {step}")
    return ops, rows


def draw(ops: list[dict[str, Any]], rows: dict[int, str]) -> str:
    begin, end = min(e["ts"] for e in ops), max(e["ts"] + e["dur"] for e in ops)
    scale = (WIDTH - LEFT - 10) / (end - begin)
    used = [tid for tid in sorted(rows) if any(e["tid"] == tid for e in ops)]
    height = len(used) * (ROW + GAP) + 85
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for i, tid in enumerate(used):
        y = i * (ROW + GAP) + 10
        out.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 10}" height="{ROW}" fill="#f2f2f0"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 18}" text-anchor="end" font-size="14">{rows[tid]}</text>')
        for e in (e for e in ops if e["tid"] == tid):
            color = KINDS.get(kind_of(e["name"]), ("#888888", ""))[0]
            x, width = LEFT + (e["ts"] - begin) * scale, max(e["dur"] * scale, 0.4)
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{color}">'
                f"<title>{e['name']}: {e['dur'] / 1e3:.1f} ms</title></rect>"
            )
    out += _legend(len(used) * (ROW + GAP) + 10, (end - begin) / 1e6, {kind_of(e["name"]) for e in ops})
    return "\n".join([*out, "</svg>"]) + "\n"


def _legend(y: int, seconds: float, kinds: set[str]) -> list[str]:
    out = [
        f'<text x="{LEFT}" y="{y + 14}" font-size="13" fill="#555">0 s</text>',
        f'<text x="{WIDTH - 10}" y="{y + 14}" font-size="13" fill="#555" text-anchor="end">{seconds:.2f} s</text>',
    ]
    x: float = LEFT
    for kind, (color, label) in KINDS.items():
        if label and kind in kinds:
            out.append(f'<rect x="{x}" y="{y + 28}" width="13" height="13" fill="{color}"/>')
            out.append(f'<text x="{x + 18}" y="{y + 39}" font-size="13">{label}</text>')
            x += 36 + 7.5 * len(label)
            if x > WIDTH - 200:
                x, y = LEFT, y + 20
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--step", type=int, default=3)
    arguments = parser.parse_args()
    arguments.out.write_text(draw(*load(arguments.trace, arguments.step)), encoding="utf-8")


if __name__ == "__main__":
    main()
