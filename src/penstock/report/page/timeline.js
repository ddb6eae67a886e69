// The timeline: bands of ops and of memory over one axis of time, on a canvas that shows what is scrolled to.
//
// A band is {label, y, height, parts, rank}; a part is either
//   {kind: "ops", y, height, side, stretches, note}     stretches of one lane, one below the other
//   {kind: "memory", y, height, curves, most, limit}    curves of one tier; each {side, tier, dashed}

const AXIS = 26;
const RIGHT = 14;
const TALLEST = 0.78; // share of the window's height that the timeline takes at most

class Timeline {
  constructor(host, sides, paint, end) {
    this.host = host;
    this.sides = sides;
    this.paint = paint;
    this.whole = [0, end > 0 ? end : 1];
    this.view = [...this.whole];
    this.bands = [];
    this.height = 0;
    this.hover = null;
    this.onView = () => {};
    this.scroller = host.appendChild(element("div", "scroller"));
    this.spacer = this.scroller.appendChild(element("div", "spacer"));
    this.base = host.appendChild(element("canvas", "base"));
    this.top = host.appendChild(element("canvas", "top"));
    this.bins = null;
    this.pending = false;
    this.scroller.addEventListener("scroll", () => this.refresh());
    new ResizeObserver(() => this.resize()).observe(host);
  }

  // Lay the bands out; `makeBands` makes them for the width at hand.
  layout(makeBands) {
    this.makeBands = makeBands ?? this.makeBands;
    this.narrow = this.host.clientWidth < 620;
    this.gutter = this.narrow ? 102 : 148;
    this.bands = this.makeBands(this);
    let y = 0;
    for (const band of this.bands) {
      band.y = y;
      y += band.height;
    }
    this.height = y;
    const room = Math.max(300, Math.round(window.innerHeight * TALLEST) - AXIS);
    const shown = facts.kind === "run" ? y : Math.min(y, room); // a run has few rows, many ranks scroll
    this.host.style.height = `${shown + AXIS}px`;
    this.spacer.style.height = `${y}px`;
    this.scroller.style.top = `${AXIS}px`;
    this.resize();
  }

  resize() {
    const width = this.host.clientWidth;
    if (!width || !this.makeBands) return;
    if (this.narrow !== width < 620) return this.layout();
    const height = this.host.clientHeight;
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.base, this.top]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    this.ratio = ratio;
    this.width = width;
    this.shown = height;
    this.right = this.scroller.clientWidth - RIGHT;
    this.draw();
  }

  // Draw again before the next frame, once.
  refresh() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  get offset() {
    return this.scroller.scrollTop;
  }

  get scale() {
    return (this.right - this.gutter) / (this.view[1] - this.view[0]);
  }

  timeAt(x) {
    return this.view[0] + (x - this.gutter) / this.scale;
  }

  xOf(time) {
    return this.gutter + (time - this.view[0]) * this.scale;
  }

  // Show [from, to], moved into what there is.
  show(from, to) {
    const [low, high] = this.whole;
    const span = Math.min(Math.max(to - from, (high - low) * 1e-7), high - low);
    from = Math.min(Math.max((from + to - span) / 2, low), high - span);
    this.view = [from, from + span];
    this.onView();
    this.refresh();
  }

  zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
    const [from, to] = this.view;
    const span = Math.min((to - from) / factor, this.whole[1] - this.whole[0]);
    const left = around - ((around - from) / (to - from)) * span;
    this.show(left, left + span);
  }

  pan(seconds) {
    const [low, high] = this.whole;
    const [from, to] = this.view;
    const by = Math.min(Math.max(seconds, low - from), high - to);
    this.show(from + by, to + by);
  }

  reset() {
    this.show(...this.whole);
  }

  isWhole() {
    return this.view[1] - this.view[0] >= (this.whole[1] - this.whole[0]) * 0.999999;
  }

  draw() {
    const began = performance.now();
    const { paint } = this;
    this.bins ??= new Bins(paint.fills.length);
    const ctx = this.base.getContext("2d");
    ctx.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    ctx.clearRect(0, 0, this.width, this.shown);
    ctx.textBaseline = "middle";
    const lines = this.timeTicks();
    const x = { from: this.view[0], to: this.view[1], left: this.gutter, right: this.right, scale: this.scale };
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, AXIS, this.width, this.shown - AXIS);
    ctx.clip();
    for (const band of this.visibleBands()) {
      const top = AXIS + band.y - this.offset;
      for (const part of band.parts) this.drawPart(ctx, part, top + part.y, x);
      this.drawLines(ctx, band, top, lines);
      this.drawGutter(ctx, band, top);
    }
    ctx.restore();
    this.drawAxis(ctx, lines);
    drawPointer(this);
    this.took = performance.now() - began;
  }

  visibleBands() {
    const low = this.offset;
    const high = low + this.shown - AXIS;
    return this.bands.filter((band) => band.y < high && band.y + band.height > low);
  }

  drawPart(ctx, part, y, x) {
    const { paint } = this;
    if (part.kind === "memory") return drawMemory(ctx, part, y, x, paint);
    ctx.fillStyle = paint.track;
    ctx.fillRect(x.left, y, x.right - x.left, part.height);
    ctx.font = `${part.height >= 16 ? 11 : 10}px ${paint.font}`;
    ctx.textAlign = "left";
    const each = part.height / Math.max(part.stretches.length, 1);
    const gap = part.stretches.length > 1 ? 1 : 0;
    part.stretches.forEach((stretch, i) => {
      drawStretch(ctx, part.side, stretch, x, y + i * each, each - gap, paint, this.bins);
    });
  }

  // The axis' marks, continued faintly between the bars of a band.
  drawLines(ctx, band, top, lines) {
    if (band.height < 12) return;
    ctx.fillStyle = this.paint.line;
    for (const { value } of lines) {
      ctx.fillRect(Math.round(this.xOf(value)), top + band.height - band.gap, 1, band.gap);
    }
  }

  drawGutter(ctx, band, top) {
    const { paint } = this;
    if (!band.label) return;
    ctx.textAlign = "left";
    ctx.fillStyle = paint.ink;
    ctx.font = `600 ${this.narrow ? 11 : 12.5}px ${paint.font}`;
    const first = band.parts[0];
    const middle = band.labelY ?? first.y + first.height / 2;
    if (band.mark) {
      ctx.fillStyle = paint.muted;
      ctx.fillText(band.mark, 2, top + middle);
      ctx.fillStyle = paint.ink;
    }
    ctx.fillText(band.label, band.mark ? 15 : 2, top + middle);
    ctx.textAlign = "right";
    ctx.fillStyle = paint.muted;
    ctx.font = `${this.narrow ? 10 : 11}px ${paint.font}`;
    for (const part of band.parts) {
      if (part.note) ctx.fillText(part.note, this.gutter - 8, top + part.y + part.height / 2);
      if (part.kind === "memory" && !part.small) this.drawAmounts(ctx, part, top + part.y);
      if (part.title) this.drawTitle(ctx, part, top + part.y);
    }
  }

  drawAmounts(ctx, part, y) {
    const unit = amountUnit(part.most);
    for (const { value, text } of amountTicks(part)) {
      const at = y + part.height * (1 - value / part.most);
      const label = value === 0 ? "0" : `${text} ${unit.name}`.trim();
      ctx.fillText(label, this.gutter - 8, Math.min(at, y + part.height - 4));
    }
  }

  // The name of a curve that is not a band of its own.
  drawTitle(ctx, part, y) {
    ctx.textAlign = "left";
    ctx.fillText(part.title, this.gutter, y - 8);
    ctx.textAlign = "right";
  }

  timeTicks() {
    const count = Math.max(2, Math.floor((this.right - this.gutter) / (this.narrow ? 75 : 110)));
    this.tickUnit = timeUnit(this.view[1]);
    return ticks(this.view[0], this.view[1], count, this.tickUnit.factor);
  }

  drawAxis(ctx, lines) {
    const { paint } = this;
    ctx.font = `11px ${paint.font}`;
    ctx.fillStyle = paint.line;
    ctx.fillRect(this.gutter, AXIS - 5, this.right - this.gutter, 1);
    for (const { value, text } of lines) {
      const x = Math.round(this.xOf(value));
      ctx.fillStyle = paint.muted;
      ctx.fillRect(x, AXIS - 9, 1, 5);
      const label = `${text} ${this.tickUnit.name}`.trim();
      const half = ctx.measureText(label).width / 2;
      ctx.textAlign = "center";
      ctx.fillText(label, Math.min(Math.max(x, this.gutter + half - 4), this.right + RIGHT - half), 8);
    }
  }

  // What is under a point of the canvas: {band, part, op}; op is -1 where there is none.
  at(x, y) {
    const inside = y - AXIS + this.offset;
    if (y < AXIS) return null;
    const band = this.bands.find((one) => inside >= one.y && inside < one.y + one.height);
    if (!band) return null;
    const below = inside - band.y;
    const part = band.parts.find((one) => below >= one.y - 1 && below < one.y + one.height + 1);
    if (!part || part.kind !== "ops" || x < this.gutter || x > this.right) return { band, part, op: -1 };
    const each = part.height / part.stretches.length;
    const row = Math.min(Math.max(Math.floor((below - part.y) / each), 0), part.stretches.length - 1);
    return { band, part, op: opAt(part.side, part.stretches[row], this.timeAt(x), 3 / this.scale) };
  }

  // Where an op is drawn: {x, y, width, height}, or null where its band is scrolled away or folded. `rank`: whose band,
  // for ranks of one kind share their ops.
  placeOf(side, op, rank) {
    for (const band of this.visibleBands()) {
      if (rank !== undefined && band.rank !== rank) continue;
      for (const part of band.parts) {
        const place = part.kind === "ops" && part.side === side && this.placeIn(band, part, op);
        if (place) return place;
      }
    }
    return null;
  }

  placeIn(band, part, op) {
    const row = part.stretches.findIndex((stretch) => op >= stretch.from && op < stretch.to);
    if (row < 0) return null;
    const height = part.height / part.stretches.length;
    const x = this.xOf(part.side.start[op]);
    const y = AXIS + band.y - this.offset + part.y + row * height;
    return { x, y, width: this.xOf(part.side.end[op]) - x, height };
  }
}

function element(kind, name = "", text = "") {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text) made.textContent = text;
  return made;
}
