// Draws the ops of one stretch of a lane, and finds the op under the pointer. However many ops share a pixel, it is
// drawn once: in the colour that covers most of it, the fainter the less of it is covered.

const NARROW = 1.5; // pixels below which ops are merged

class Bins {
  constructor(colors) {
    this.cover = new Float32Array(colors);
    this.touched = [];
    this.pixel = -1;
  }

  add(color, cover) {
    if (this.cover[color] === 0) this.touched.push(color);
    this.cover[color] += cover + 1e-6;
  }

  // Draw the pixel that was collected, and start on another.
  flush(ctx, fills, y, height) {
    if (!this.touched.length) return;
    let total = 0;
    let most = this.touched[0];
    for (const color of this.touched) {
      total += this.cover[color];
      if (this.cover[color] > this.cover[most]) most = color;
      this.cover[color] = 0;
    }
    this.touched.length = 0;
    ctx.globalAlpha = Math.min(1, 0.45 + 0.55 * total);
    ctx.fillStyle = fills[most];
    ctx.fillRect(this.pixel, y, 1, height);
    ctx.globalAlpha = 1;
  }
}

// `x` maps times to pixels: {from, to, left, right, scale}.
function drawStretch(ctx, side, stretch, x, y, height, paint, bins) {
  const { start, end, id } = side;
  const { colorOf, fills, inks, labels } = paint;
  const first = firstAbove(end, x.from, stretch.from, stretch.to);
  const labelled = height >= 11;
  for (let i = first; i < stretch.to && start[i] < x.to; i++) {
    const left = Math.max(x.left + (start[i] - x.from) * x.scale, x.left);
    const right = Math.min(x.left + (end[i] - x.from) * x.scale, x.right);
    const width = right - left;
    const color = colorOf[id[i]];
    if (width < NARROW) {
      const pixel = Math.floor(left);
      if (pixel !== bins.pixel) {
        bins.flush(ctx, fills, y, height);
        bins.pixel = pixel;
      }
      bins.add(color, Math.max(width, 0));
      continue;
    }
    bins.flush(ctx, fills, y, height);
    ctx.fillStyle = fills[color];
    const gap = width > 5 ? 1 : width > 2.5 ? 0.5 : 0;
    ctx.fillRect(left, y, width - gap, height);
    if (labelled && width > 8) drawLabel(ctx, labels[id[i]], left, width - gap, y, height, inks[color]);
  }
  bins.flush(ctx, fills, y, height);
}

const labelWidths = new Map();

function drawLabel(ctx, text, left, width, y, height, ink) {
  let needed = labelWidths.get(text);
  if (needed === undefined) {
    needed = ctx.measureText(text).width;
    labelWidths.set(text, needed);
  }
  if (needed + 1 > width) return;
  ctx.fillStyle = ink;
  ctx.fillText(text, left + (width - needed) / 2, y + height / 2 + 0.5);
}

// The op at a moment, or the nearest within `slack` of it; -1 if there is none.
function opAt(side, stretch, time, slack) {
  const { start, end } = side;
  const next = firstAbove(end, time, stretch.from, stretch.to);
  let best = -1;
  let nearest = slack;
  for (const i of [next, next - 1]) {
    if (i < stretch.from || i >= stretch.to) continue;
    const away = Math.max(start[i] - time, time - end[i], 0);
    if (away <= nearest) {
      best = i;
      nearest = away;
      if (away === 0) break;
    }
  }
  return best;
}
