// The box beside the pointer. All of its text is set as text, so that no name can be markup.

const AT_ONCE = 1e-4; // seconds: to start an op takes a thread that long now and then

class Tip {
  constructor(box) {
    this.box = box;
  }

  hide() {
    this.box.hidden = true;
  }

  show(event, parts) {
    this.box.replaceChildren(...parts);
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    const left = event.clientX + 16 + width > window.innerWidth - 8 ? event.clientX - width - 16 : event.clientX + 16;
    const top = event.clientY + 18 + height > window.innerHeight - 8 ? event.clientY - height - 14 : event.clientY + 18;
    this.box.style.left = `${Math.max(8, Math.min(left, window.innerWidth - width - 8))}px`;
    this.box.style.top = `${Math.max(8, top)}px`;
  }

  // An op: what it does, and a column of figures for each side that has it.
  op(timeline, found, event) {
    const { side } = found.part;
    const id = side.id[found.op];
    const name = facts.names[id];
    const sides = facts.kind === "run" ? timeline.sides : [side];
    const columns = sides
      .map((one) => (one === side ? { side, op: found.op, own: true } : { side: one, op: one.find(id), own: false }))
      .filter(({ op }) => op >= 0);
    timeline.hover.twins = columns.filter(({ own }) => !own);
    timeline.hover.cause = causeOf(timeline, side, found.op);
    const where = facts.kind === "run" ? side.laneOf(found.op) : `rank ${found.band.rank}, ${side.laneOf(found.op)}`;
    const head = element("p", "op");
    head.append(element("strong", "", name), element("span", "", where));
    this.box.dataset.op = name;
    this.show(event, [head, element("p", "does", describe(name)), figuresTable(columns)]);
  }

  memory(timeline, found, x, event) {
    const time = timeline.timeAt(x);
    const rows = found.part.curves
      .filter((curve) => curve.time[0] <= time && time <= curve.until)
      .map((curve) => {
        const i = Math.max(firstAbove(curve.time, time, 0, curve.time.length) - 1, 0);
        const name = curve.dashed ? "predicted" : "measured";
        return [facts.kind === "run" ? name : "taken", formatAmount(curve.amount[i])];
      });
    if (found.part.limit) rows.push(["budget", formatAmount(found.part.limit)]);
    delete this.box.dataset.op;
    const tier = found.part.tier ?? found.band.label.split(" ")[0];
    const head = element("p", "op");
    const moment = formatMoment(time, timeline.view[1] - timeline.view[0]);
    head.append(element("strong", "", `${tier} memory`), element("span", "", moment));
    this.show(event, [head, rowsTable(rows)]);
  }

  // A point of a curve: [name, value] rows under a title.
  point(event, title, rows) {
    delete this.box.dataset.op;
    const head = element("p", "op");
    head.append(element("strong", "", title));
    this.show(event, [head, rowsTable(rows)]);
  }
}

function causeOf(timeline, side, op) {
  const id = side.cause[op];
  if (id < 0) return null;
  const rank = side.rank[op];
  const other = rank < 0 ? side : timeline.sides[facts.ranks[rank]];
  const found = other ? other.find(id) : -1;
  return found < 0 ? null : { side: other, op: found, rank };
}

function waitedFor(side, op) {
  const id = side.cause[op];
  if (side.waited[op] <= 0) return "";
  const pool = side.pool[op] < 0 ? "" : `a free buffer of pool ${facts.names[side.pool[op]]}`;
  const late = facts.explained && side.waited[op] > AT_ONCE;
  if (id < 0) return pool || (late ? "nothing in the schedule: it started late" : "");
  const name = facts.names[id];
  const rank = side.rank[op] < 0 ? "" : ` on rank ${side.rank[op]}`;
  const words = describe(name);
  return pool ? `${pool}, which ${name}${rank} gave back` : `${name}${rank}${words ? `: ${words}` : ""}`;
}

function figuresTable(columns) {
  const table = element("table");
  const line = (name, of) => {
    const cells = columns.map(of);
    if (cells.every((text) => text === "")) return;
    const row = table.appendChild(element("tr"));
    row.append(element("th", "", name), ...cells.map((text, i) => element("td", columns[i].own ? "own" : "", text)));
  };
  if (columns.length > 1 || facts.kind === "run") line("", ({ side }) => side.name);
  line("start", ({ side, op }) => formatMoment(side.start[op], side.end[op] - side.start[op] || 1e-3));
  line("takes", ({ side, op }) => formatTime(side.end[op] - side.start[op]));
  line("moves", ({ side, op }) => (side.bytes[op] > 0 ? formatAmount(side.bytes[op]) : ""));
  line("at", ({ side, op }) => {
    const seconds = side.end[op] - side.start[op];
    const rated = facts.unit === "s" && side.bytes[op] > 0 && seconds > 0;
    return rated ? `${significant(side.bytes[op] / seconds / 1e9, 3)} GB/s` : "";
  });
  line("waited", ({ side, op }) => (side.waited[op] > 0 ? formatTime(side.waited[op]) : "not"));
  line("for", ({ side, op }) => waitedFor(side, op));
  table.lastElementChild.classList.toggle("words", columns.some(({ side, op }) => waitedFor(side, op)));
  return table;
}

function rowsTable(rows) {
  const table = element("table");
  for (const [name, value] of rows) {
    const row = table.appendChild(element("tr"));
    row.append(element("th", "", name), element("td", "own", value));
  }
  return table;
}
