// Puts the page to work. `window.penstock` is for a browser's console, and for tests.

function drawLegend(paint, sides) {
  const list = document.getElementById("legend");
  list.replaceChildren();
  for (const { name, fills } of paint.legend()) {
    const item = list.appendChild(element("li"));
    const key = item.appendChild(element("span", "swatches"));
    for (const fill of fills) key.appendChild(element("i")).style.background = fill;
    item.append(document.createTextNode(name));
  }
  if (facts.kind !== "run" || facts.sides.length < 2) return;
  for (const { name } of sides.filter(({ memory }) => Object.keys(memory).length)) {
    list.appendChild(element("li")).append(element("i", `key ${name}`), document.createTextNode(`memory ${name}`));
  }
}

function showRange(timeline) {
  const [from, to] = timeline.view;
  document.getElementById("range").textContent = `${formatMoment(from, to - from)} to ${formatMoment(to, to - from)}`;
}

function rankRows(timeline) {
  const rows = new RankRows(facts.ranks, timeline.sides);
  const again = () => timeline.layout((t) => rows.bands(t));
  timeline.toggle = (rank) => {
    if (!rows.open.delete(rank)) rows.open.add(rank);
    again();
  };
  const button = document.getElementById("rows");
  const say = () => (button.textContent = rows.dense ? "with memory" : "overview");
  button.hidden = facts.ranks.length < 9;
  button.addEventListener("click", () => {
    rows.dense = !rows.dense;
    say();
    again();
  });
  say();
  again();
}

async function start() {
  const column = await unpackColumns();
  const sides = facts.sides.map((record) => new Side(record, column));
  const paint = new Paint(facts.names, sides);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const tip = new Tip(document.getElementById("tip"));
  paint.apply(dark.matches);
  const timeline = new Timeline(document.getElementById("timeline"), sides, paint, facts.end);
  timeline.onView = () => showRange(timeline);
  const theme = (isDark) => {
    paint.apply(isDark);
    drawLegend(paint, sides);
    timeline.draw();
  };
  if (facts.kind === "simulated") rankRows(timeline);
  else timeline.layout(runBands);
  new Control(timeline, tip);
  drawLegend(paint, sides);
  showRange(timeline);
  if (facts.curves) drawCurves(tip);
  dark.addEventListener("change", () => theme(dark.matches));
  matchMedia("print").addEventListener("change", (print) => theme(!print.matches && dark.matches));
  window.penstock = { timeline, facts, describe };
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  const said = `This page cannot be drawn: ${error.message}. It needs a browser of 2023 or later.`;
  const note = element("p", "note", said);
  document.querySelector("header").append(note);
  throw error;
});
