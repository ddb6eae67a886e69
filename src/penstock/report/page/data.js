// The page's numbers: columns of typed arrays, unpacked once, and the sides (or ranks) that they make up.

const facts = JSON.parse(document.getElementById("facts").textContent);
const KINDS = { f8: Float64Array, u4: Uint32Array, i4: Int32Array };

async function unpackColumns() {
  const packed = atob(document.getElementById("columns").textContent.trim());
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(inflated).arrayBuffer();
  return ([kind, offset, length]) => new KINDS[kind](buffer, offset, length);
}

// One row of ops and its memory. Arrays are by op; a stretch [from, to) of them is one lane and never overlaps itself.
class Side {
  constructor(record, column) {
    this.name = record.name;
    this.stretches = record.stretches.map(([lane, from, to]) => ({ lane: facts.lanes[lane], from, to }));
    for (const key of ["id", "start", "end", "bytes", "waited", "cause", "rank", "pool"]) {
      this[key] = column(record[key]);
    }
    this.memory = {};
    for (const [tier, [times, amounts]] of Object.entries(record.memory)) {
      const amount = column(amounts);
      const peak = amount.reduce((most, value) => Math.max(most, value), 0);
      if (peak > 0) this.memory[tier] = { time: column(times), amount, peak };
    }
  }

  lane(name) {
    return this.stretches.filter((stretch) => stretch.lane === name);
  }

  // The op of this name, or -1.
  find(name) {
    if (!this.index) {
      this.index = new Map();
      this.id.forEach((id, i) => this.index.set(id, i));
    }
    return this.index.get(name) ?? -1;
  }

  laneOf(op) {
    return this.stretches.find((stretch) => op >= stretch.from && op < stretch.to).lane;
  }
}

// First position in [from, to) whose value is greater than x; the values ascend.
function firstAbove(values, x, from, to) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] > x) to = middle;
    else from = middle + 1;
  }
  return from;
}
