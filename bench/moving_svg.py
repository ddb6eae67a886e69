"""Draws the moving picture of ``bench.moving_picture`` as one SVG file: a terminal, and below it the losses.

Nothing but CSS moves it, so that it moves where an image may run no program, as on GitHub. All text is there from the
beginning, behind *curtains* of the background's colour, which fall back line by line and letter by letter. Where
animations are off, or unknown, there are none: the picture then stands still at the kill and what came after it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _MARGIN = 860, 18
_ROWS, _COLUMNS, _PITCH, _FONT = 17, 104, 17, 12.5
_TOP = 18  # of the first line
_TERMINAL = _TOP + _ROWS * _PITCH + 12
_CHART_TOP, _CHART_HEIGHT, _CHART_LEFT = _TERMINAL + 44, 110, 62
_HEIGHT = _CHART_TOP + _CHART_HEIGHT + 34
_TYPED, _LEAST, _MOST, _SHOWN, _HELD = 1.6, 0.03, 0.45, 1.8, 6.0
"""Seconds: a command is typed in, the shortest and longest wait between two lines, the kill is shown, the end is."""

STYLE = """
svg { --paper: #ffffff; --screen: #f6f8fa; --edge: #d0d7de; --text: #1f2328; --pale: #59636e;
      --first: #0969da; --second: #1a7f37; --alarm: #cf222e; --whole: #afb8c1; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --screen: #161b22; --edge: #3d444d; --text: #e6edf3; --pale: #9198a1;
        --first: #58a6ff; --second: #3fb950; --alarm: #ff7b72; --whole: #59636e; }
}
text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: var(--text); }
.t { font-size: 12.5px; white-space: pre; }
.s { font-size: 12px; fill: var(--pale); }
.p { fill: var(--pale); } .a { fill: var(--first); } .b { fill: var(--second); } .k { fill: var(--alarm); }
.strong { font-weight: 600; }
.screen { fill: var(--screen); } .paper { fill: var(--paper); }
.curtain { visibility: hidden; }
.still { transform: translateY(STILLpx); }
"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a terminal, and the seconds after which it came."""

    text: str
    at: float


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is shown: ``losses`` by step, the ``first`` run's lines up to its kill, of the process ``pid``, and those of
    the ``second``, which goes on."""

    losses: Sequence[float]
    first: Sequence[Line]
    second: Sequence[Line]
    pid: int


def cut(text: str, columns: int = _COLUMNS) -> str:
    """A line that is too long ends after its last whole field, or word, that fits."""
    if len(text) <= columns:
        return text
    kept = text[: columns - 1]
    for gap in ("  ", " "):
        if (end := kept.rfind(gap)) > columns // 2:
            return f"{kept[:end]} …"
    return f"{kept}…"


def step_of(text: str) -> int | None:
    """The step that a line reports."""
    found = re.match(r"step +(\d+)/\d+ ", text)
    return int(found[1]) if found else None


def times(scene: Scene) -> list[float]:
    """When each line is shown: commands take a while to type, and no wait is shown in full."""
    found: list[float] = []
    now = 0.0
    for lines in (scene.first, scene.second):
        for i, line in enumerate(lines):
            if not i:
                now += _TYPED
            else:
                now += min(max(line.at - lines[i - 1].at, _LEAST), _MOST)
            if line.text.startswith("Killed"):
                now += _SHOWN
            found.append(now)
    return found


def draw(scene: Scene) -> str:
    """The picture, as the text of an SVG file."""
    lines = [*scene.first, *scene.second]
    at = times(scene)
    lasts = at[-1] + _HELD
    begins = len(scene.first)
    killed = begins - 1
    shown = [(moment - _TYPED * (i in (0, begins)), i + 1) for i, moment in enumerate(at)]
    scroll = [(moment, f"translateY({-max(row - _ROWS, 0) * _PITCH}px)") for moment, row in shown]
    fall = [(moment, f"translateY({row * _PITCH}px)") for moment, row in shown]
    moves = [
        _animated("scroll", scroll, lasts, "transform"),
        _animated("fall", fall, lasts, "transform"),
        _appears("kill", at[killed] - _SHOWN, lasts),
        _appears("end", at[-1], lasts),
        *(_appears(f"d{i}", at[i], lasts) for i, line in enumerate(lines) if step_of(line.text) is not None),
        _typing("type1", 0.0, lines[0].text, lasts),
        _typing("type2", at[killed], lines[begins].text, lasts),
    ]
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
                f'height="{_HEIGHT}" role="img">'
            ),
            "<title>A training run is killed and goes on, with the losses of one that was not</title>",
            f"<style>{STYLE.replace('STILL', str(-_still(scene) * _PITCH))}",
            "@media (prefers-reduced-motion: no-preference) {",
            *moves,
            ".curtain { visibility: visible; }",
            "}",
            "</style>",
            (
                f'<clipPath id="window"><rect x="1" y="{_TOP - 3}" width="{_WIDTH - 2}" height="{_ROWS * _PITCH}"/>'
                "</clipPath>"
            ),
            f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}"/>',
            *_terminal(scene, lines, begins),
            *_chart(lines, begins, scene),
            "</svg>",
            "",
        ]
    )


def _still(scene: Scene) -> int:
    """The lines that are out of sight above where nothing moves: of what follows, the kill is near the middle."""
    return max(len(scene.first) - 6, 0)


def _animated(name: str, stops: Iterable[tuple[float, str]], lasts: float, key: str) -> str:
    """A value that changes from one moment to another, again and again."""
    frames = "".join(f"{100 * moment / lasts:.2f}%{{{key}:{value}}}" for moment, value in stops)
    return f"@keyframes {name} {{{frames}}}\n.{name} {{ animation: {name} {lasts:.2f}s step-end infinite; }}"


def _appears(name: str, moment: float, lasts: float) -> str:
    return _animated(name, [(0.0, "hidden"), (moment, "visible")], lasts, "visibility")


def _typing(name: str, begins: float, text: str, lasts: float) -> str:
    """The curtain over a command: it leaves the prompt free, then letter after letter."""
    pace = 0.8 * _TYPED / max(len(text) - 2, 1)
    letters = [(begins + 0.1 * _TYPED + i * pace, f"translateX({(2 + i) * _letter():.1f}px)") for i in range(len(text))]
    return _animated(name, [(0.0, f"translateX({2 * _letter():.1f}px)"), *letters], lasts, "transform")


def _letter() -> float:
    return _FONT * 0.602


def _terminal(scene: Scene, lines: Sequence[Line], begins: int) -> list[str]:
    found = [
        f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_TERMINAL}" rx="8" class="screen" stroke="var(--edge)"/>',
        '<g clip-path="url(#window)"><g class="still scroll">',
    ]
    found += [_line(cut(line.text), i, i >= begins) for i, line in enumerate(lines)]
    for i, name in ((0, "type1"), (begins, "type2")):
        y = _TOP + i * _PITCH - 3
        found.append(_curtain(name, _MARGIN, y, _WIDTH, _PITCH, "screen"))
    found.append(_curtain("fall", 1, _TOP - 4, _WIDTH - 2, (len(lines) + _ROWS) * _PITCH, "screen"))
    return [*found, *_kill(scene.pid, begins - 1), "</g></g>"]


def _curtain(name: str, x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect class="curtain {colour} {name}" x="{x}" y="{y}" width="{width}" height="{height}"/>'


def _line(text: str, row: int, goes_on: bool) -> str:
    y = _TOP + row * _PITCH + 10
    run = "b" if goes_on else "a"
    if text.startswith("$ "):
        inside = f'<tspan class="p">$</tspan> <tspan class="strong">{escape(text[2:])}</tspan>'
    elif text.startswith("Killed"):
        inside = f'<tspan class="k strong">{escape(text)}</tspan>'
    elif step_of(text) is not None and (parts := re.fullmatch(r"(step .*?  )(loss [\d.]+)(.*)", text)):
        inside = f'{escape(parts[1])}<tspan class="{run} strong">{parts[2]}</tspan>{escape(parts[3])}'
    elif text.startswith(("continuing", "loss ")):
        inside = f'<tspan class="{run} strong">{escape(text)}</tspan>'
    else:
        inside = f'<tspan class="p">{escape(text)}</tspan>'
    return f'<text class="t" x="{_MARGIN}" y="{y}">{inside}</text>'


def _kill(pid: int, row: int) -> list[str]:
    """What another shell does, beside the lines before the one in which this shell tells of it."""
    width, height = 236, 46
    x, y = _WIDTH - width - _MARGIN, _TOP + row * _PITCH - height - 6
    return [
        (
            f'<g class="kill"><rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="paper" '
            'stroke="var(--alarm)"/>'
        ),
        f'<text class="s" x="{x + 12}" y="{y + 18}">another shell</text>',
        (
            f'<text class="t" x="{x + 12}" y="{y + 36}"><tspan class="p">$</tspan> '
            f'<tspan class="k strong">kill -9 {pid}</tspan></text></g>'
        ),
    ]


# ---- the losses


def _x(step: float, scene: Scene) -> float:
    return _CHART_LEFT + (step - 1) * (_WIDTH - _CHART_LEFT - 24) / (len(scene.losses) - 1)


def _y(loss: float, scene: Scene) -> float:
    low, high = min(scene.losses), max(scene.losses)
    return _CHART_TOP + (high - loss) * _CHART_HEIGHT / (high - low)


def _chart(lines: Sequence[Line], begins: int, scene: Scene) -> list[str]:
    steps = [step_of(line.text) for line in lines]
    killed = max(step for step in steps[:begins] if step is not None)
    path = " ".join(f"{_x(i, scene):.1f},{_y(loss, scene):.1f}" for i, loss in enumerate(scene.losses, 1))
    base, mark = _CHART_TOP + _CHART_HEIGHT, _x(killed + 0.5, scene)
    dots = [
        f'<circle class="d{i} {"b" if i >= begins else "a"}" cx="{_x(step, scene):.1f}" '
        f'cy="{_y(scene.losses[step - 1], scene):.1f}" r="3.2"/>'
        for i, step in enumerate(steps)
        if step is not None
    ]
    return [
        *_legend(),
        f'<text class="s" x="{_CHART_LEFT - 12}" y="{_CHART_TOP + 4}" text-anchor="end">{max(scene.losses):.2f}</text>',
        f'<text class="s" x="{_CHART_LEFT - 12}" y="{base + 4}" text-anchor="end">{min(scene.losses):.2f}</text>',
        f'<text class="s" x="{_CHART_LEFT}" y="{base + 24}">step 1</text>',
        f'<text class="s" x="{_WIDTH - 24}" y="{base + 24}" text-anchor="end">{len(scene.losses)}</text>',
        (
            f'<polyline points="{path}" fill="none" stroke="var(--whole)" stroke-width="8" stroke-linejoin="round" '
            'stroke-linecap="round"/>'
        ),
        *dots,
        (
            f'<g class="kill"><path d="M{mark:.1f} {_CHART_TOP - 8}V{base + 8}" stroke="var(--alarm)" '
            'stroke-dasharray="4 3"/>'
        ),
        f'<text class="s k" x="{mark + 6:.1f}" y="{_CHART_TOP + 4}">kill -9</text></g>',
        (
            f'<text class="t b strong end" x="{_WIDTH / 2}" y="{base + 24}" text-anchor="middle">'
            f"all {len(scene.losses)} losses are equal to the last bit</text>"
        ),
    ]


def _legend() -> list[str]:
    y = _TERMINAL + 22
    return [
        f'<text class="s" x="{_MARGIN}" y="{y}">loss of</text>',
        f'<path d="M86 {y - 4}h22" stroke="var(--whole)" stroke-width="8" stroke-linecap="round"/>',
        f'<text class="s" x="118" y="{y}">a run that is left alone</text>',
        f'<circle class="a" cx="330" cy="{y - 4}" r="3.2"/><text class="s" x="340" y="{y}">one that is killed</text>',
        f'<circle class="b" cx="506" cy="{y - 4}" r="3.2"/><text class="s" x="516" y="{y}">the same, going on</text>',
    ]
