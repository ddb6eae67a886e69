// Zoom and pan by wheel, drag, touch, keys and buttons.

class Control {
  constructor(timeline, tip) {
    this.timeline = timeline;
    this.tip = tip;
    this.pointers = new Map();
    const host = timeline.host;
    host.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    host.addEventListener("pointerdown", (event) => this.down(event));
    host.addEventListener("pointermove", (event) => this.move(event));
    for (const kind of ["pointerup", "pointercancel"]) host.addEventListener(kind, (event) => this.up(event));
    host.addEventListener("pointerleave", () => this.leave());
    host.addEventListener("dblclick", () => timeline.reset());
    host.addEventListener("keydown", (event) => this.key(event));
    const press = (id, act) => document.getElementById(id).addEventListener("click", act);
    press("zoom-in", () => timeline.zoom(1.6));
    press("zoom-out", () => timeline.zoom(1 / 1.6));
    press("zoom-reset", () => timeline.reset());
    document.getElementById("find").addEventListener("keydown", (event) => this.search(event));
  }

  place(event) {
    const box = this.timeline.host.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  // The wheel zooms; sideways or with Shift it pans. Over the names it scrolls, and so it does the page where there is
  // nothing left to zoom out of.
  wheel(event) {
    const { timeline } = this;
    const [x] = this.place(event);
    const across = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : across;
    const pixels = event.deltaMode === 1 ? 16 : 1;
    if (sideways) {
      event.preventDefault();
      timeline.pan((sideways * pixels) / timeline.scale);
    } else if (x < timeline.gutter) {
      const before = timeline.offset;
      timeline.scroller.scrollTop += event.deltaY * pixels;
      if (timeline.offset !== before) event.preventDefault();
    } else if (event.deltaY < 0 || !timeline.isWhole()) {
      event.preventDefault();
      timeline.zoom(Math.exp(-event.deltaY * pixels * 0.0022), timeline.timeAt(x));
    }
    this.hover(event);
  }

  down(event) {
    if (event.button > 0) return;
    this.pointers.set(event.pointerId, this.place(event));
    this.moved = 0;
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return this.hover(event);
    const { timeline } = this;
    const now = this.place(event);
    if (this.pointers.size === 2) this.pinch(event.pointerId, before, now);
    else {
      this.moved += Math.abs(now[0] - before[0]) + Math.abs(now[1] - before[1]);
      if (this.moved > 3) {
        timeline.host.setPointerCapture(event.pointerId);
        timeline.host.classList.add("dragging");
        this.leave();
        timeline.pan((before[0] - now[0]) / timeline.scale);
        if (event.pointerType !== "touch") timeline.scroller.scrollTop += before[1] - now[1];
      }
    }
    this.pointers.set(event.pointerId, now);
  }

  pinch(id, before, now) {
    const other = [...this.pointers].find(([key]) => key !== id)[1];
    const was = Math.abs(before[0] - other[0]);
    const is = Math.abs(now[0] - other[0]);
    if (was > 4 && is > 4) this.timeline.zoom(is / was, this.timeline.timeAt((now[0] + other[0]) / 2));
  }

  up(event) {
    const clicked = this.pointers.has(event.pointerId) && this.moved <= 3 && event.type === "pointerup";
    this.pointers.delete(event.pointerId);
    this.timeline.host.classList.remove("dragging");
    if (clicked) this.click(event);
  }

  // A rank's name unfolds it.
  click(event) {
    const { timeline } = this;
    const [x, y] = this.place(event);
    const found = timeline.at(x, y);
    const named = found && x < timeline.gutter && found.band.rank !== undefined;
    if (named && timeline.toggle) timeline.toggle(found.band.rank);
    else if (event.pointerType === "touch") this.hover(event);
  }

  hover(event) {
    const { timeline } = this;
    const [x, y] = this.place(event);
    const found = timeline.at(x, y);
    timeline.hover = { x, ...found };
    const named = found && x < timeline.gutter && found.band.rank !== undefined && timeline.toggle;
    timeline.host.classList.toggle("pointing", Boolean(named));
    if (found && found.op >= 0) this.tip.op(timeline, found, event);
    else if (found?.part?.kind === "memory" && x >= timeline.gutter) this.tip.memory(timeline, found, x, event);
    else this.tip.hide();
    drawPointer(timeline);
  }

  search(event) {
    if (event.key === "Escape") this.leave();
    if (event.key !== "Enter") return;
    event.preventDefault();
    const box = event.currentTarget;
    box.setCustomValidity(box.value === "" || this.find(box.value) ? "" : "no op of this name is drawn here");
    box.reportValidity();
  }

  // Bring an op into view, as if it were pointed at: an id, or a rank and an id, as in 3:F2m0. Where no op is called so,
  // the first whose id has the text in it; asked for again, the next one.
  find(text) {
    const [, rank, name] = /^(?:(\d+):)?(.*)$/.exec(text.trim());
    const bands = this.timeline.bands.filter((band) => rank === undefined || band.rank === Number(rank));
    let places = this.places(bands, (id) => id === name);
    if (!places.length) {
      places = this.places(bands, (id) => id.toLowerCase().includes(name.toLowerCase()));
      places.sort((a, b) => a.part.side.start[a.op] - b.part.side.start[b.op]);
    }
    if (!places.length) return false;
    const next = this.found?.text === text ? (this.found.at + 1) % places.length : 0;
    this.found = { text, at: next };
    const { band, part, op } = places[next];
    this.reveal(band, part, op);
    return true;
  }

  // Where ops are drawn whose ids are wanted.
  places(bands, wanted) {
    const ids = new Set(facts.names.flatMap((name, i) => (wanted(name) ? [i] : [])));
    if (!ids.size) return [];
    const found = [];
    for (const band of bands) {
      for (const part of band.parts) {
        if (part.kind !== "ops") continue;
        for (const { from, to } of part.stretches ?? []) {
          for (let op = from; op < to; op++) if (ids.has(part.side.id[op])) found.push({ band, part, op });
        }
      }
    }
    return found;
  }

  reveal(band, part, op) {
    const { timeline } = this;
    const { start, end } = part.side;
    const took = end[op] - start[op] || (timeline.whole[1] - timeline.whole[0]) / 1e4;
    timeline.scroller.scrollTop = band.y - timeline.shown / 3;
    timeline.show(start[op] - 4 * took, end[op] + 4 * took);
    const place = timeline.placeIn(band, part, op);
    timeline.hover = { x: place.x + place.width / 2, band, part, op };
    const box = timeline.host.getBoundingClientRect();
    const corner = { clientX: box.left + timeline.hover.x, clientY: box.top + place.y + place.height };
    this.tip.op(timeline, timeline.hover, corner);
  }

  leave() {
    this.tip.hide();
    this.timeline.hover = null;
    drawPointer(this.timeline);
  }

  key(event) {
    const { timeline } = this;
    const span = timeline.view[1] - timeline.view[0];
    const acts = {
      "+": () => timeline.zoom(1.6),
      "=": () => timeline.zoom(1.6),
      "-": () => timeline.zoom(1 / 1.6),
      ArrowLeft: () => timeline.pan(-span * 0.15),
      ArrowRight: () => timeline.pan(span * 0.15),
      ArrowUp: () => (timeline.scroller.scrollTop -= 60),
      ArrowDown: () => (timeline.scroller.scrollTop += 60),
      0: () => timeline.reset(),
      Home: () => timeline.reset(),
      Escape: () => timeline.reset(),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }
}
