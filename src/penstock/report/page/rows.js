// The bands of the two kinds of page.

const BAR = 19;
const GAP = 9;

// A run: a band per lane, prediction above measurement, and a band of memory per tier.
function runBands(timeline) {
  const { sides, narrow } = timeline;
  const bands = [];
  for (const lane of facts.lanes) {
    const parts = [];
    let y = 0;
    for (const side of sides) {
      const stretches = side.lane(lane);
      if (!stretches.length) continue;
      const height = Math.max(BAR, 6 * stretches.length);
      const note = sides.length < 2 ? "" : narrow ? `${side.name.slice(0, 4)}.` : side.name;
      parts.push({ kind: "ops", y, height, side, stretches, note });
      y += height + 2;
    }
    if (parts.length) bands.push({ label: lane, height: y + GAP, gap: GAP, parts });
  }
  for (const tier of ["device", "host", "disk"]) {
    const curves = memoryCurves(sides.filter((side) => side.memory[tier]), tier);
    if (!curves.length) continue;
    const peak = Math.max(...curves.map((curve) => curve.peak));
    const limit = facts.budget[tier] ?? 0;
    const most = (limit && limit < 3 * peak ? Math.max(limit, peak) : peak) * 1.25; // room for the limit's name
    const part = { kind: "memory", y: 24, height: 92, curves, most, limit, tier };
    bands.push({ label: `${tier} memory`, labelY: 11, height: 124, gap: 8, parts: [part] });
  }
  return bands;
}

function memoryCurves(sides, tier) {
  // The filled curve goes first, so that the dashed one is drawn over it.
  return [...sides].reverse().map((side) => ({
    ...side.memory[tier],
    dashed: side.name === "predicted",
    until: side.end.reduce((most, end) => Math.max(most, end), 0),
  }));
}

// A simulation: a band per rank. Folded: compute, thin strips of the other lanes, memory. Unfolded: a row per lane.
class RankRows {
  constructor(ranks, sides) {
    this.ranks = ranks;
    this.open = new Set(ranks.length === 1 ? [0] : []);
    this.dense = ranks.length > 48;
    this.tiers = ["device", "host", "disk"].filter((tier) => sides.some((side) => side.memory[tier]));
    const few = [4, 12, 32].findIndex((most) => ranks.length <= most);
    [this.bar, this.strip, this.curve] = [[30, 4, 40], [26, 4, 28], [22, 3, 20]][few] ?? [18, 3, 14];
    this.most = {};
    for (const tier of this.tiers) {
      this.most[tier] = sides.reduce((most, side) => Math.max(most, side.memory[tier]?.peak ?? 0), 0) * 1.05;
    }
  }

  bands(timeline) {
    return this.ranks.map((kind, rank) => {
      const side = timeline.sides[kind];
      const band = this.open.has(rank)
        ? this.unfolded(side)
        : this.dense
          ? this.line(side, rank)
          : this.folded(side);
      const many = this.ranks.length > 1;
      const mark = many && band.height >= 14 ? (this.open.has(rank) ? "\u25be" : "\u25b8") : "";
      return { label: `rank ${rank}`, mark, rank, ...band };
    });
  }

  line(side, rank) {
    const room = window.innerHeight * TALLEST - AXIS;
    const height = Math.min(Math.max(Math.floor(room / this.ranks.length), 3), 12);
    const every = [1, 2, 4, 8, 16, 32, 64].find((n) => n * height >= 15) ?? 128;
    const compute = side.lane("compute");
    const stretches = compute.length ? compute : side.stretches.slice(0, 1);
    const parts = [{ kind: "ops", y: 0, height: height - (height > 4 ? 1 : 0.5), side, stretches }];
    const labelY = Math.max(height / 2, rank ? 0 : 7);
    return { height, gap: 0, parts, labelY, ...(rank % every ? { label: "" } : {}) };
  }

  folded(side) {
    const parts = [];
    let y = 3;
    for (const lane of facts.lanes) {
      const stretches = side.lane(lane);
      if (!stretches.length) continue;
      const height = lane === "compute" ? this.bar : this.strip;
      parts.push({ kind: "ops", y, height, side, stretches });
      y += height + 1;
    }
    for (const tier of this.tiers.filter((one) => side.memory[one])) {
      const note = `peak ${formatAmount(side.memory[tier].peak)}`;
      parts.push({ ...this.memory(side, tier, y + 1, this.curve, true), note });
      y += this.curve + 2;
    }
    return { height: y + 7, gap: 7, parts };
  }

  unfolded(side) {
    const parts = [];
    let y = 3;
    for (const lane of facts.lanes) {
      const stretches = side.lane(lane);
      if (!stretches.length) continue;
      const height = Math.max(lane === "compute" ? 26 : this.ranks.length > 1 ? 14 : 20, 6 * stretches.length);
      parts.push({ kind: "ops", y, height, side, stretches, note: lane });
      y += height + 2;
    }
    for (const tier of this.tiers.filter((one) => side.memory[one])) {
      parts.push({ ...this.memory(side, tier, y + 18, 60, false), title: `${tier} memory` });
      y += 80;
    }
    return { height: y + 12, gap: 10, parts };
  }

  memory(side, tier, y, height, small) {
    const curves = memoryCurves([side], tier);
    return { kind: "memory", y, height, curves, most: this.most[tier], limit: 0, small, tier };
  }
}
