"""The page in a real browser: it opens in silence, zooms, pans, shows the right op, and stays quick with 50,000 ops.

Needs Chromium. Where it is missing the tests are skipped and say why, but fail if the variable CI is ``true``: a skip
would look like a pass there.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.engine.trace import TraceEvent, TraceWriter
from penstock.errors import ScheduleError
from penstock.report.prediction import Prediction
from penstock.report.run_page import Report, run_page
from penstock.report.simulated_page import simulated_page
from penstock.report.trace_file import MeasuredStep
from penstock.schedule.ir.ops import Op, Pool, Schedule
from penstock.schedule.ir.references import LANE_OF, OpId
from penstock.schedule.ir.text import buffer, op_id
from penstock.schedule.ir.worlds import World
from penstock.sim.cause import parse_cause
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.reports import offload_schedule, ran_as, simulated, write_lines, write_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MISSING = "the report is tested in a browser, and there is no Chromium: apt-get install chromium"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    """A tab for one page after the other: a process of its own for each takes half a second."""
    found = browser.new_page(viewport={"width": 1280, "height": 900})
    yield found
    found.close()


class Page:
    """A page that is open in a tab, and everything that it should not have done."""

    def __init__(self, tab: Any, path: Path) -> None:
        self.page = tab
        self.complaints: list[str] = []
        self.listeners = {
            "console": lambda message: self.complaints.append(f"console: {message.text}"),
            "pageerror": lambda error: self.complaints.append(f"error: {error}"),
            "request": self._request,
        }
        tab.mouse.move(0, 0)
        for event, listener in self.listeners.items():
            tab.on(event, listener)
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.documentElement.dataset.ready === 'yes'")
        self.page.locator("#timeline").scroll_into_view_if_needed()
        self.own = path.as_uri()

    def _request(self, request: Any) -> None:
        if request.url.startswith(("file:", "data:")) and request.is_navigation_request():
            return
        self.complaints.append(f"request: {request.url}")

    def js(self, expression: str, argument: Any = None) -> Any:
        return self.page.evaluate(expression, argument)

    def view(self) -> tuple[float, float]:
        self.js("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        low, high = self.js("() => penstock.timeline.view")
        return low, high

    def point_of(self, side: int, op: str) -> tuple[float, float]:
        """The middle of an op on the screen."""
        place = self.js(
            """([number, name]) => {
                const { timeline, facts } = penstock;
                const side = timeline.sides[number];
                const place = timeline.placeOf(side, side.find(facts.names.indexOf(name)));
                const box = timeline.host.getBoundingClientRect();
                return place && [box.left + place.x + place.width / 2, box.top + place.y + place.height / 2];
            }""",
            [side, op],
        )
        assert place is not None, f"{op} is not on the screen"
        x, y = place
        return x, y

    def hover(self, side: int, op: str) -> str:
        """The text beside the pointer over an op."""
        self.page.mouse.move(*self.point_of(side, op))
        return str(self.page.locator("#tip").inner_text())

    def middle(self) -> tuple[float, float]:
        box = self.page.locator("#timeline").bounding_box()
        return box["x"] + box["width"] / 2, box["y"] + 60

    def colors(self, y: float) -> int:
        """How many colours there are in a row of the timeline: an empty one has two or three."""
        count: int = self.js(
            """(y) => {
                const { base, ratio, gutter, width } = penstock.timeline;
                const copy = Object.assign(document.createElement("canvas"), { width: width * ratio, height: 1 });
                const ctx = copy.getContext("2d", { willReadFrequently: true });
                ctx.drawImage(base, 0, -Math.round(y * ratio));
                const row = ctx.getImageData(gutter * ratio, 0, (width - gutter) * ratio, 1).data;
                const pixels = Array.from({ length: row.length / 4 }, (_, i) => row.slice(4 * i, 4 * i + 3).join());
                return new Set(pixels).size;
            }""",
            y,
        )
        return count

    def close(self) -> None:
        for event, listener in self.listeners.items():
            self.page.remove_listener(event, listener)
        assert not self.complaints


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


@pytest.fixture
def opened(tab: Any, run: Path) -> Iterator[Page]:
    page = Page(tab, run)
    yield page
    page.close()


def test_it_opens_in_silence_with_prediction_above_measurement(opened: Page) -> None:
    bands = opened.js(
        """() => penstock.timeline.bands.map((band) => [band.label, band.y,
            band.parts.map((part) => [part.kind, part.note, part.y, part.height])])"""
    )
    lanes = {label: parts for label, _, parts in bands if "memory" not in label}
    assert set(lanes) == {"compute", "h2d", "d2h", "read", "write", "cpu"}
    for parts in lanes.values():
        assert [(kind, note) for kind, note, _, _ in parts] == [("ops", "predicted"), ("ops", "measured")]
        assert parts[0][2] + parts[0][3] <= parts[1][2]
    assert {label for label, _, _ in bands if "memory" in label} == {"device memory", "host memory"}
    for _, y, parts in bands:
        for _, _, top, height in parts:
            assert opened.colors(26 + y + top + height / 2) > 1, "something is drawn in every row"
    assert opened.page.locator("#loss svg polyline").count() == 1
    assert opened.page.locator("#seconds svg polyline.predicted").count() == 1
    assert opened.page.locator("table caption").count() == 2, "lanes, and settings"


def test_the_axis_of_a_loss_that_diverges_is_on_the_page(tab: Any, tmp_path: Path) -> None:
    write_run(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 8.0', '"loss": 8.0e11'))
    assert main(["report", str(tmp_path)]) == 0
    page = Page(tab, tmp_path / "report.html")
    marks = page.js("() => [...document.querySelectorAll('#loss text')].map((m) => [m.textContent, m.getBBox().x])")
    assert min(x for _, x in marks) >= 0
    assert "5 e11" in dict(marks)
    page.close()


def test_memory_that_does_not_change_is_drawn_over_the_whole_step(opened: Page) -> None:
    """The curve of host memory is one point: what is below it is filled to both ends, and what is above it is not."""
    points, above, *below = opened.js(
        """() => {
            const { base, ratio, gutter, bands, sides, width } = penstock.timeline;
            const { y, parts: [part] } = bands.find((band) => band.label === "host memory");
            const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
            const color = (x, share) => {
                const at = 26 + y + part.y + part.height * share;
                copy.drawImage(base, -Math.round(x * ratio), -Math.round(at * ratio));
                return copy.getImageData(0, 0, 1, 1).data.join();
            };
            const places = [gutter + 3, (gutter + width) / 2, width - 20];
            return [sides[1].memory.host.amount.length, color(width / 3, 0.03), ...places.map((x) => color(x, 0.7))];
        }"""
    )
    assert points == 1
    assert len(set(below)) == 1
    assert above not in below


def test_the_wheel_zooms_around_the_pointer_and_only_there(opened: Page) -> None:
    low, high = opened.view()
    x, y = opened.middle()
    opened.page.mouse.move(x, y)
    under = opened.js("(x) => penstock.timeline.timeAt(x - penstock.timeline.host.getBoundingClientRect().left)", x)
    for _ in range(3):
        opened.page.mouse.wheel(0, -240)
    zoomed = opened.view()
    assert zoomed[1] - zoomed[0] < (high - low) / 2
    still = opened.js("(x) => penstock.timeline.timeAt(x - penstock.timeline.host.getBoundingClientRect().left)", x)
    assert still == pytest.approx(under, rel=1e-6)
    for _ in range(6):
        opened.page.mouse.wheel(0, 240)
    assert opened.view() == (low, high)


def test_dragging_pans_and_a_double_click_shows_the_whole_step(opened: Page) -> None:
    whole = opened.view()
    x, y = opened.middle()
    opened.js("() => penstock.timeline.zoom(4)")
    before = opened.view()
    opened.page.mouse.move(x, y)
    opened.page.mouse.down()
    opened.page.mouse.move(x - 100, y, steps=4)
    opened.page.mouse.up()
    after = opened.view()
    moved = opened.js("() => 100 / penstock.timeline.scale")
    assert after[0] - before[0] == pytest.approx(moved, rel=1e-3)
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])
    opened.page.mouse.dblclick(x, y)
    assert opened.view() == whole


def test_keys_and_buttons_do_the_same(opened: Page) -> None:
    whole = opened.view()
    opened.page.locator("#timeline").focus()
    opened.page.keyboard.press("+")
    closer = opened.view()
    assert closer[1] - closer[0] == pytest.approx((whole[1] - whole[0]) / 1.6)
    opened.page.keyboard.press("ArrowRight")
    assert opened.view()[0] > closer[0]
    opened.page.keyboard.press("ArrowLeft")
    assert opened.view()[0] == pytest.approx(closer[0])
    opened.page.keyboard.press("-")
    assert opened.view() == pytest.approx(whole)
    opened.page.locator("#zoom-in").click()
    assert opened.view() != whole
    assert opened.page.locator("#range").inner_text() != ""
    opened.page.keyboard.press("0")
    opened.page.locator("#zoom-reset").click()
    assert opened.view() == whole


def test_pointing_at_an_op_says_what_it_is_and_what_it_waited_for(opened: Page, run: Path) -> None:
    prediction = Prediction.of(simulated(offload_schedule(), 0))
    opened.js("() => penstock.timeline.zoom(1)")
    for side in (0, 1):
        said = opened.hover(side, "B2m1")
        assert said.startswith("B2m1")
        assert "Recompute and backward of stage 2, micro-batch 1" in said
        assert "predicted" in said
        assert "measured" in said
    ops = prediction.ops
    index = max(range(len(ops.waited)), key=lambda i: ops.waited[i] * bool(ops.cause[i]))
    op = prediction.schedule.ops[index]
    start, end = ops.start[index], ops.end[index]
    opened.js("([a, b]) => penstock.timeline.show(a, b)", [start - 3 * (end - start), end + 3 * (end - start)])
    opened.view()
    said = opened.hover(0, op.id)
    assert said.startswith(op.id)
    cause = parse_cause(ops.cause[index])
    assert cause is not None
    assert (cause.pool or cause.op) in said
    if op.nbytes:
        assert "GB/s" in said


def test_an_op_is_found_by_its_id(opened: Page) -> None:
    before = opened.view()
    box = opened.page.locator("#find")
    box.fill("B1m1")
    box.press("Enter")
    low, high = opened.view()
    prediction = Prediction.of(simulated(offload_schedule(), 0))
    index = [op.id for op in prediction.schedule.ops].index("B1m1")
    assert low <= prediction.ops.start[index] < prediction.ops.end[index] <= high
    assert high - low < (before[1] - before[0]) / 2
    assert opened.page.locator("#tip").inner_text().startswith("B1m1")
    box.fill("B99m9")
    box.press("Enter")
    assert opened.js("() => document.getElementById('find').validationMessage") != ""
    assert opened.view() == (low, high)


def test_an_op_is_found_by_a_part_of_its_id_and_again_the_next_one(opened: Page) -> None:
    ids = [op.id for op in offload_schedule().ops if "1m1" in op.id]
    assert len({op_id(name).lane for name in ids}) > 2
    opened.page.locator("#find").fill("1M1")
    told, starts = [], []
    for _ in range(2 * len(ids) + 1):
        opened.page.locator("#find").press("Enter")
        told.append(opened.page.locator("#tip").inner_text().split()[0])
        starts.append(opened.js("() => { const { part, op } = penstock.timeline.hover; return part.side.start[op]; }"))
    assert sorted(told[:-1]) == sorted(2 * ids), "predicted and measured, each once"
    assert starts[:-1] == sorted(starts[:-1])
    assert told[-1] == told[0], "and over again"


def test_every_op_is_found_under_the_pointer(opened: Page) -> None:
    """Zoomed in on, the op in the middle of the screen is the one that was asked for, in both sides."""
    wrong = opened.js(
        """() => {
            const { timeline } = penstock;
            const wrong = [];
            for (const side of timeline.sides) {
                for (let op = 0; op < side.id.length; op++) {
                    const took = side.end[op] - side.start[op];
                    timeline.view = [side.start[op] - took, side.end[op] + took];
                    const place = timeline.placeOf(side, op);
                    const found = timeline.at(place.x + place.width / 2, place.y + place.height / 2);
                    if (!found || found.part.side !== side || found.op !== op) wrong.push([side.name, op]);
                }
            }
            timeline.reset();
            return wrong;
        }"""
    )
    assert wrong == []


def test_every_kind_of_op_has_words(opened: Page) -> None:
    """The words of the page are those of the schedule: no op without a sentence, none with a gap left open."""
    names = [_example(kind) for kind in LANE_OF]
    words = {name: opened.js("(id) => penstock.describe(id)", name) for name in names}
    assert all(text and "{" not in text and "undefined" not in text for text in words.values()), words
    assert len(set(words.values())) == len(words)
    said = opened.js("() => penstock.describe('RW5.1@F3')")
    assert said == "weights of group 5 from disk to host, chunk 1, for the forward of stage 3"


def _example(kind: str) -> str:
    """An op's id of this kind."""
    for name in (kind, f"{kind}3m0", f"{kind}5"):
        with suppress(ScheduleError):
            if op_id(name).kind == kind:
                return name
    raise AssertionError(f"no id of {kind}")


def test_it_holds_in_the_dark_on_a_narrow_window_and_on_paper(browser: Any, run: Path) -> None:
    page = Page(browser.new_page(viewport={"width": 400, "height": 700}, color_scheme="dark"), run)
    assert page.js("() => document.documentElement.scrollWidth") <= 400
    assert page.js("() => penstock.timeline.gutter") < 130
    assert page.colors(26 + 10) > 2
    paper = page.js("() => getComputedStyle(document.body).backgroundColor")
    page.page.emulate_media(media="print")
    assert page.js("() => getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)" != paper
    page.close()
    page.page.close()


def test_no_name_of_a_run_can_become_markup(tab: Any, tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    write_run(folder, predict=False)
    evil = '</script><img src="x" onerror="alert(2)">'
    with TraceWriter(folder / "trace.json") as writer:
        writer.step([TraceEvent(step=1, op=evil, lane="compute", start=0.0, end=1.0)])
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    page = Page(tab, tmp_path / "page.html")
    assert page.page.locator("img").count() == 0
    assert page.page.locator("h1").inner_text() == folder.name
    assert evil in page.hover(0, evil)
    assert page.page.locator("img").count() == 0
    page.close()


def _large(count: int) -> Schedule:
    kinds = ("RW{k}.{c}@F{k}", "UW{k}.{c}@F{k}", "F{k}m{c}", "DG{k}.{c}@B{k}", "OP{k}.{c}")
    ops: list[Op] = []
    for i in range(count // len(kinds)):
        before: tuple[OpId, ...] = ()
        for kind in kinds:
            name = op_id(kind.format(k=i // 16, c=i % 16))
            ops.append(Op(id=name, after=before, nbytes=0 if name.kind == "F" else 4 << 20))
            before = (name,)
    pool = Pool(name="w", tier="device", size=1, count=1)
    return Schedule(name="large", micro_batches=16, chunk=0, pools=(pool,), ops=tuple(ops))


def test_fifty_thousand_ops_stay_usable(tab: Any, tmp_path: Path) -> None:
    simulation = simulated(_large(50_000), 1)
    ops = tuple(ran_as(simulation))
    report = Report(
        name="large",
        description="",
        step=MeasuredStep(step=1, ops=ops, memory={}, whole=True, file="trace.json"),
        metrics=[],
        prediction=Prediction.of(simulation),
        budget={},
    )
    path = tmp_path / "large.html"
    path.write_text(run_page(report), encoding="utf-8")
    page = Page(tab, path)
    took = page.js(
        """() => {
            const { timeline } = penstock;
            const time = (act) => {
                const began = performance.now();
                act();
                return performance.now() - began;
            };
            // The quickest: what else the machine does takes time from the others, and gives none.
            const quickest = (n, act) => Math.min(...Array.from({ length: n }, () => time(act)));
            const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
            const draw = () => {
                timeline.draw();
                copy.drawImage(timeline.base, 0, 0);
                copy.getImageData(0, 0, 1, 1); // so that what was drawn is really there
            };
            return {
                whole: quickest(9, draw),
                near: (timeline.zoom(40), quickest(9, draw)),
                hover: (timeline.reset(), quickest(101, () => timeline.at(500, 40))),
            };
        }"""
    )
    assert took["whole"] < 50
    assert took["near"] < 50
    assert took["hover"] < 1
    name = "F300m7"
    side = page.js("(name) => penstock.timeline.sides[1].find(penstock.facts.names.indexOf(name))", name)
    page.js(
        """(op) => {
            const side = penstock.timeline.sides[1];
            penstock.timeline.show(side.start[op] - 0.01, side.end[op] + 0.01);
        }""",
        side,
    )
    page.view()
    assert page.hover(1, name).startswith(name)
    page.close()


def _pipeline(ranks: int, micro_batches: int) -> World:
    """GPipe: all forwards, then all backwards; a stage to a rank."""
    schedules = []
    for rank in range(ranks):
        ops: list[Op] = []

        def add(name: str, *after: OpId, peer: int = -1, into: list[Op] = ops, **buffers: Any) -> OpId:
            into.append(Op(id=op_id(name), after=after, peer=peer, **buffers))
            return into[-1].id

        for m in range(micro_batches):
            got = (add(f"RA{rank - 1}m{m}", peer=rank - 1),) if rank else ()
            done = add(f"F{rank}m{m}", *got, takes=((buffer(f"a{m}"), "kept"),))
            if rank + 1 < ranks:
                add(f"SA{rank}m{m}", done, peer=rank + 1)
        for m in range(micro_batches):
            got = (add(f"RD{rank}m{m}", peer=rank + 1),) if rank + 1 < ranks else ()
            done = add(f"B{rank}m{m}", *got, op_id(f"F{rank}m{m}"), gives=(buffer(f"a{m}"),))
            if rank:
                add(f"SD{rank - 1}m{m}", done, peer=rank - 1)
        pool = Pool(name="kept", tier="device", size=1, count=micro_batches, backed=False)
        schedules.append(Schedule(name="gpipe", micro_batches=micro_batches, chunk=0, pools=(pool,), ops=tuple(ops)))
    return World(name="gpipe", ranks=tuple(schedules), groups={})


def _seconds(op: Op) -> float:
    return {"F": 1.0, "B": 2.0}.get(op.id.kind, 0.1)


def _simulated_page(folder: Path, ranks: int, micro_batches: int = 8) -> Path:
    simulation = simulate(_pipeline(ranks, micro_batches), Costs(name="unit", seconds=_seconds))
    path = folder / "simulated.html"
    path.write_text(simulated_page(simulation, title="gpipe <8>", unit="", costs="one"), encoding="utf-8")
    return path


def test_a_simulated_schedule_has_a_row_per_rank_that_unfolds_into_lanes(tab: Any, tmp_path: Path) -> None:
    page = Page(tab, _simulated_page(tmp_path, 4))
    assert page.js("() => penstock.timeline.bands.map((b) => b.label)") == [f"rank {r}" for r in range(4)]
    assert page.js("() => penstock.timeline.bands.every((b) => b.parts.at(-1).kind === 'memory')")
    said = page.hover(2, "F2m0")
    assert said.startswith("F2m0")
    assert "rank 2, compute" in said
    assert "Forward of stage 2, micro-batch 0" in said
    assert "RA1m0" in said
    said = page.hover(0, "B0m0")
    assert "RD0m0" in said
    box = page.page.locator("#timeline").bounding_box()
    at = page.js("() => penstock.timeline.bands[1].y")
    page.page.mouse.click(box["x"] + 40, box["y"] + 26 + at + 14)
    notes = page.js("() => penstock.timeline.bands[1].parts.map((part) => part.note)")
    assert [note for note in notes if note] == ["compute", "send", "recv"]
    page.close()


def test_a_thousand_ranks_scroll_and_draw_only_what_is_seen(tab: Any, tmp_path: Path) -> None:
    page = Page(tab, _simulated_page(tmp_path, 1024, micro_batches=2))
    assert page.js("() => penstock.timeline.bands.length") == 1024
    seen = page.js("() => penstock.timeline.visibleBands().length")
    assert 0 < seen < 400
    box = page.page.locator("#timeline").bounding_box()
    page.page.mouse.move(box["x"] + 30, box["y"] + 100)
    page.page.mouse.wheel(0, 600)
    page.view()
    assert page.js("() => penstock.timeline.offset") > 0
    assert page.js("() => penstock.timeline.visibleBands()[0].rank") > 0
    page.page.locator("#rows").click()
    assert page.js("() => penstock.timeline.bands[0].parts.at(-1).kind") == "memory"
    assert page.js("() => { penstock.timeline.draw(); return penstock.timeline.took }") < 50
    page.close()


def test_layers_have_colours_of_their_own_and_backward_is_lighter(tab: Any, tmp_path: Path) -> None:
    page = Page(tab, _simulated_page(tmp_path, 4))
    fill = "(id) => penstock.timeline.paint.fills[penstock.timeline.paint.colorOf[penstock.facts.names.indexOf(id)]]"
    fills = {name: page.js(fill, name) for name in ("F0m0", "F0m1", "F1m0", "B0m0", "F3m0", "B3m0")}
    light = {name: sum(map(int, text.strip("rgb()").split(","))) for name, text in fills.items()}
    assert fills["F0m0"] == fills["F0m1"] != fills["F1m0"]
    assert light["B0m0"] > light["F0m0"]
    assert light["B3m0"] > light["F3m0"]
    page.close()


def test_curves_of_many_steps_are_a_line_over_the_band_of_its_steps_with_gaps(tab: Any, tmp_path: Path) -> None:
    write_run(tmp_path, steps=1)
    metrics = tmp_path / "metrics.jsonl"
    line = json.loads(metrics.read_text())
    gone = {*range(1000, 1501), *range(1506, 2000)}
    lines = [line | {"step": n, "loss": None if n in gone else 3.0 + n % 2} for n in range(1, 5001)]
    write_lines(metrics, lines)
    assert main(["report", str(tmp_path)]) == 0
    page = Page(tab, tmp_path / "report.html")
    assert page.js("() => document.querySelectorAll('#loss .measured:is(polyline, polygon)').length") == 6
    assert page.js("() => document.querySelectorAll('#loss circle.measured').length") == 1, "what stands alone is seen"
    box = page.page.locator("#loss svg").bounding_box()
    page.page.locator("#loss svg").hover(position={"x": box["width"] - 12, "y": box["height"] / 2})
    said = page.page.locator("#tip").inner_text()
    assert "5 steps about 4998" in said
    assert "3 (3 to 4)" in said
    page.close()
