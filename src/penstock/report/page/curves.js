// Curves over the run's steps, as SVG: they print well, and there are few points.

const SVG = "http://www.w3.org/2000/svg";

function svg(kind, attributes, parent, text) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return parent ? parent.appendChild(made) : made;
}

// `lines`: {name, class, points: [[step, value]], only, stretch, lows, highs, gaps}, as report/curves.py has them.
class Curve {
  constructor(host, tip, { lines, format, unit, fromZero, label }) {
    Object.assign(this, { host, tip, format, unit, fromZero, label });
    this.lines = lines.filter((line) => line.points.length);
    new ResizeObserver(() => this.draw()).observe(host);
  }

  ranges() {
    const points = this.lines.flatMap((line) => line.points);
    const steps = points.map(([step]) => step);
    const values = this.lines.flatMap(({ points, lows, highs }) => [...points.map(([, value]) => value), ...lows, ...highs]);
    const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    const first = steps.reduce((a, b) => Math.min(a, b));
    const last = steps.reduce((a, b) => Math.max(a, b));
    return { first, last: Math.max(last, first + 1), low: this.fromZero ? 0 : low - room, high: high + room };
  }

  draw() {
    const width = this.host.clientWidth;
    if (!width || !this.lines.length) return;
    const height = 210;
    const [left, right, top, bottom] = [58, 12, 12, 34];
    const { first, last, low, high } = this.ranges();
    const x = (step) => left + ((step - first) / (last - first)) * (width - left - right);
    const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
    const root = svg("svg", { width, height, role: "img", "aria-label": this.label });
    const unit = this.unit(high);
    for (const { value, text } of ticks(low, high, 4, unit.factor)) {
      svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }, root);
      const at = { class: "tick", x: left - 8, y: y(value) + 4, "text-anchor": "end" };
      svg("text", at, root, `${text} ${unit.name}`.trim());
    }
    for (const { value, text } of ticks(first, last, Math.min(Math.floor(width / 90), last - first))) {
      svg("text", { class: "tick", x: x(value), y: height - 16, "text-anchor": "middle" }, root, text);
    }
    svg("text", { class: "tick", x: (left + width - right) / 2, y: height - 2, "text-anchor": "middle" }, root, "step");
    for (const line of this.lines) this.drawLine(root, line, x, y);
    this.cursor = svg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" }, root);
    root.addEventListener("pointermove", (event) => this.point(event, x));
    root.addEventListener("pointerleave", () => (this.tip.hide(), this.cursor.setAttribute("visibility", "hidden")));
    this.host.replaceChildren(root, this.legend());
  }

  drawLine(root, line, x, y) {
    const ends = [...line.gaps, line.points.length];
    if (!line.only) ends.forEach((end, n) => this.drawPart(root, line, [n ? ends[n - 1] : 0, end], x, y));
    const alone = new Set(ends.filter((end, n) => end - (n ? ends[n - 1] : 0) === 1)); // a line of one point is none
    const r = line.only ? 4 : 2.5;
    for (const [i, [step, value]] of line.points.entries()) {
      if (!line.only && line.points.length > 60 && !alone.has(i + 1)) continue;
      svg("circle", { class: line.class, cx: x(step), cy: y(value), r }, root);
    }
  }

  // The points of a line that follow each other without a gap, over the band of what each is the median of.
  drawPart(root, line, [from, to], x, y) {
    const path = (values) =>
      values.slice(from, to).map((value, i) => `${x(line.points[from + i][0]).toFixed(1)},${y(value).toFixed(1)}`);
    if (line.lows.length) {
      const around = [...path(line.highs), ...path(line.lows).reverse()];
      svg("polygon", { class: `band ${line.class}`, points: around.join(" ") }, root);
    }
    const middle = path(line.points.map(([, value]) => value));
    svg("polyline", { class: `curve ${line.class}`, points: middle.join(" ") }, root);
  }

  point(event, x) {
    const at = event.clientX - this.host.getBoundingClientRect().left;
    const away = ([step]) => Math.abs(x(step) - at);
    const [step] = this.lines[0].points.reduce((best, point) => (away(point) < away(best) ? point : best));
    const rows = this.lines.flatMap((line) =>
      line.points.flatMap((point, i) => (point[0] === step ? [[line.name, this.valueOf(line, i)]] : [])),
    );
    const { stretch } = this.lines[0];
    this.cursor.setAttribute("visibility", "visible");
    this.cursor.setAttribute("x1", x(step));
    this.cursor.setAttribute("x2", x(step));
    this.tip.point(event, stretch > 1 ? `${stretch} steps about ${step}` : `step ${step}`, rows);
  }

  valueOf(line, i) {
    const value = this.format(line.points[i][1]);
    return line.stretch > 1 ? `${value} (${this.format(line.lows[i])} to ${this.format(line.highs[i])})` : value;
  }

  legend() {
    const list = element("ul", "legend small");
    for (const entry of this.lines) {
      const item = list.appendChild(element("li"));
      item.append(element("i", `key ${entry.class}${entry.only ? " dots" : ""}`), document.createTextNode(entry.name));
    }
    return list;
  }
}

const UNITS = {
  plain: { unit: (high) => plainUnit(high), format: (value) => significant(value, 5) },
  time: { unit: timeUnit, format: (time) => formatTime(time) },
  amount: { unit: amountUnit, format: formatAmount },
  share: { unit: () => ({ factor: 100, name: "%" }), format: (share) => `${significant(share * 100, 3)} %` },
};

// Learning rates are small, and losses of a run that diverges large: their axis has a power of ten.
function plainUnit(high) {
  if (high === 0 || (Math.abs(high) >= 1e-2 && Math.abs(high) < 1e6)) return { factor: 1, name: "" };
  const power = Math.floor(Math.log10(Math.abs(high)) + 1e-9);
  return { factor: 10 ** -power, name: `e${power < 0 ? MINUS : ""}${Math.abs(power)}` };
}

function drawCurves(tip) {
  for (const { key, title, unit, lines, from_zero: fromZero } of facts.curves) {
    new Curve(document.getElementById(key), tip, {
      lines: lines.map((line) => ({ ...line, class: line.style })),
      ...UNITS[unit],
      fromZero,
      label: title,
    });
  }
}
