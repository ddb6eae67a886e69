// Colours: those of penstock.report.colors, of which the last is for all other ops; layers by a ramp that grows lighter.

const GROUPS = facts.groups;
const RAMP = [
  [43, 58, 140],
  [38, 104, 176],
  [24, 143, 167],
  [66, 172, 122],
  [176, 195, 70],
  [243, 180, 66],
];
const TONES = [0, 0.5, 0.74]; // how far towards white: forward, backward, gradient of the weights
const TONE_OF = { F: 0, E: 0, B: 1, I: 1, W: 2 };

function ramp(share) {
  const place = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
  const i = Math.min(Math.floor(place), RAMP.length - 2);
  return RAMP[i].map((channel, c) => channel + (RAMP[i + 1][c] - channel) * (place - i));
}

function tinted(rgb, towardsWhite) {
  return rgb.map((channel) => Math.round(channel + (255 - channel) * towardsWhite));
}

function luminance([r, g, b]) {
  return (0.299 * r + 0.587 * g + 0.114 * b) / 255;
}

function parseHex(text) {
  return [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
}

// Which colour each op has: one of GROUPS on a run's page; on a simulated one, compute is coloured by layer.
class Paint {
  // `sides`: whose ops there are; the other names are those of pools.
  constructor(names, sides) {
    this.layers = 0;
    const parsed = names.map(parseOpId);
    const byLayer = facts.kind === "simulated";
    if (byLayer) {
      for (const { kind, stage } of parsed) {
        if (kind in TONE_OF && kind !== "E") this.layers = Math.max(this.layers, stage + 1);
      }
    }
    const groupOf = new Map(GROUPS.flatMap((group, i) => group.kinds.map((kind) => [kind, i])));
    this.colorOf = Uint16Array.from(parsed, (op) =>
      byLayer && this.layers && op.kind in TONE_OF
        ? GROUPS.length + Math.min(op.stage, this.layers - 1) * TONES.length + TONE_OF[op.kind]
        : (groupOf.get(op.kind) ?? GROUPS.length - 1),
    );
    this.used = new Set();
    for (const side of sides) for (const id of side.id) this.used.add(this.colorOf[id]);
    this.labels = names.map((name, i) => (byLayer && parsed[i].microBatch >= 0 ? String(parsed[i].microBatch) : name));
  }

  // Read the theme's colours off the style sheet; call again when it changes.
  apply(dark) {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ink", "muted", "faint", "track", "line", "paper", "accent", "predicted", "limit"]) {
      this[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.font = style.getPropertyValue("--font").trim();
    const solid = GROUPS.map((group) => parseHex(dark ? group.dark : group.light));
    for (let layer = 0; layer < this.layers; layer++) {
      const base = tinted(ramp(this.layers > 1 ? layer / (this.layers - 1) : 0.3), dark ? 0.14 : 0);
      for (const tone of TONES) solid.push(tinted(base, tone));
    }
    this.fills = solid.map((rgb) => `rgb(${rgb.map(Math.round).join(",")})`);
    this.inks = solid.map((rgb) => (luminance(rgb) > 0.56 ? "#10151c" : "#ffffff"));
  }

  // Entries of the legend: {name, fills}.
  legend() {
    const entries = GROUPS.map((group, i) => ({ name: group.name, index: i }))
      .filter(({ index }) => this.used.has(index))
      .map(({ name, index }) => ({ name, fills: [this.fills[index]] }));
    if (!this.layers) return entries;
    const shown = Math.min(this.layers, 8);
    const of = (i) => GROUPS.length + Math.round((i * (this.layers - 1)) / Math.max(shown - 1, 1)) * TONES.length;
    const fills = Array.from({ length: shown }, (_, i) => this.fills[of(i)]);
    const tone = (t) => fills.map((_, i) => this.fills[of(i) + t]);
    const has = (t) => [...this.used].some((c) => c >= GROUPS.length && (c - GROUPS.length) % TONES.length === t);
    const layers = this.layers === 1 ? "layer 0" : `layers 0 to ${this.layers - 1}`;
    const first = [{ name: `forward, ${layers}`, fills }];
    if (has(1)) first.push({ name: "backward", fills: tone(1) });
    if (has(2)) first.push({ name: "gradient of weights", fills: tone(2) });
    return [...first, ...entries];
  }
}
