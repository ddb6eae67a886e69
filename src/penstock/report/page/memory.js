// Memory over time: the measured curve filled, the predicted one dashed above it, and the budget as a line.

function amountTicks(part) {
  const unit = amountUnit(part.most);
  return ticks(0, part.most * 0.97, part.height > 48 ? 3 : 2, unit.factor);
}

// The stairs of a curve between the edges of what is visible; of many values in one pixel, the lowest and the highest.
function tracePath(ctx, curve, x, y, height, most) {
  const { time, amount } = curve;
  const yOf = (value) => y + height * (1 - value / most);
  let i = Math.max(firstAbove(time, x.from, 0, time.length) - 1, 0);
  let last = amount[i];
  let pixel = Math.max(x.left, x.left + (time[i] - x.from) * x.scale);
  const first = pixel;
  ctx.moveTo(pixel, yOf(last));
  for (i++; i < time.length && time[i] < x.to; ) {
    const at = Math.max(x.left + (time[i] - x.from) * x.scale, x.left);
    let low = amount[i];
    let high = low;
    const before = last;
    for (; i < time.length && x.left + (time[i] - x.from) * x.scale < at + 1; i++) {
      last = amount[i];
      if (last < low) low = last;
      if (last > high) high = last;
    }
    ctx.lineTo(at, yOf(before));
    if (high > before && high > last) ctx.lineTo(at, yOf(high));
    if (low < before && low < last) ctx.lineTo(at, yOf(low));
    ctx.lineTo(at, yOf(last));
    pixel = at;
  }
  const edge = Math.min(x.right, Math.max(pixel, x.left + (time[time.length - 1] - x.from) * x.scale));
  const until = curve.until === undefined ? edge : Math.min(x.right, x.left + (curve.until - x.from) * x.scale);
  ctx.lineTo(until, yOf(last));
  return [first, until];
}

function drawMemory(ctx, part, y, x, paint) {
  ctx.fillStyle = paint.track;
  ctx.fillRect(x.left, y, x.right - x.left, part.height);
  ctx.save();
  ctx.beginPath();
  ctx.rect(x.left, y - 2, x.right - x.left, part.height + 4);
  ctx.clip();
  if (!part.small) {
    ctx.fillStyle = paint.line;
    for (const { value } of amountTicks(part)) {
      ctx.fillRect(x.left, Math.round(y + part.height * (1 - value / part.most)), x.right - x.left, 1);
    }
  }
  for (const curve of part.curves) {
    if (curve.time[0] >= x.to || (curve.until ?? Infinity) <= x.from) continue;
    ctx.beginPath();
    const [first, last] = tracePath(ctx, curve, x, y, part.height, part.most);
    ctx.strokeStyle = curve.dashed ? paint.predicted : paint.accent;
    ctx.lineWidth = part.small ? 1 : 1.5;
    ctx.setLineDash(curve.dashed ? [5, 3] : []);
    ctx.stroke();
    ctx.setLineDash([]);
    if (curve.dashed) continue;
    ctx.lineTo(last, y + part.height);
    ctx.lineTo(first, y + part.height);
    ctx.globalAlpha = part.small ? 0.28 : 0.16;
    ctx.fillStyle = paint.accent;
    ctx.fill();
    ctx.globalAlpha = 1;
  }
  if (part.limit) drawLimit(ctx, part, y, x, paint);
  ctx.restore();
}

// The budget; where it is far above the curves, a word at the top says where.
function drawLimit(ctx, part, y, x, paint) {
  const inside = part.limit <= part.most;
  const at = inside ? Math.round(y + part.height * (1 - part.limit / part.most)) + 0.5 : y + 0.5;
  ctx.strokeStyle = paint.limit;
  ctx.lineWidth = 1.5;
  if (inside) {
    ctx.setLineDash([2, 3]);
    ctx.beginPath();
    ctx.moveTo(x.left, at);
    ctx.lineTo(x.right, at);
    ctx.stroke();
    ctx.setLineDash([]);
  }
  const text = `budget ${formatAmount(part.limit)}${inside ? "" : " (above)"}`;
  ctx.font = `600 11px ${paint.font}`;
  ctx.textAlign = "right";
  const below = inside && at - y < 15;
  const middle = at + (below || !inside ? 9 : -8);
  ctx.fillStyle = paint.track;
  ctx.globalAlpha = 0.8;
  const width = ctx.measureText(text).width;
  ctx.fillRect(x.right - width - 8, middle - 7, width + 6, 14);
  ctx.globalAlpha = 1;
  ctx.fillStyle = paint.limit;
  ctx.fillText(text, x.right - 5, middle);
}
