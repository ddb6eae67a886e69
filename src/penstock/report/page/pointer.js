// What follows the pointer, on a canvas of its own: a line at its time, the op under it, the same op of the other side,
// and a curve from what it waited for.

function drawPointer(timeline) {
  const { hover, paint, ratio } = timeline;
  const ctx = timeline.top.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, timeline.width, timeline.shown);
  if (!hover) return;
  ctx.save();
  ctx.beginPath();
  ctx.rect(timeline.gutter - 1, 0, timeline.right - timeline.gutter + 3, timeline.shown);
  ctx.clip();
  if (hover.x >= timeline.gutter && hover.x <= timeline.right) {
    ctx.fillStyle = paint.faint;
    ctx.fillRect(Math.round(hover.x), AXIS - 5, 1, timeline.shown);
    drawMoment(ctx, timeline, hover.x);
  }
  if (hover.op >= 0) drawOps(ctx, timeline, hover);
  ctx.restore();
}

function drawOps(ctx, timeline, hover) {
  ctx.strokeStyle = timeline.paint.ink;
  ctx.lineWidth = 1.5;
  for (const { side, op } of hover.twins ?? []) outline(ctx, timeline.placeOf(side, op), [3, 2]);
  const own = timeline.placeIn(hover.band, hover.part, hover.op);
  outline(ctx, own, []);
  const { cause } = hover;
  const from = cause && timeline.placeOf(cause.side, cause.op, cause.rank < 0 ? hover.band.rank : cause.rank);
  if (!from) return;
  outline(ctx, from, [1, 2]);
  const [x0, y0] = [from.x + from.width, from.y + from.height / 2];
  const [x1, y1] = [own.x, own.y + own.height / 2];
  const bend = Math.max(12, Math.abs(x1 - x0) / 2);
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  ctx.stroke();
}

// The pointer's time, over the axis.
function drawMoment(ctx, timeline, x) {
  const { paint, view } = timeline;
  const text = formatMoment(timeline.timeAt(x), view[1] - view[0]);
  ctx.font = `600 11px ${paint.font}`;
  ctx.textBaseline = "middle";
  ctx.textAlign = "center";
  const half = ctx.measureText(text).width / 2 + 5;
  const at = Math.min(Math.max(x, timeline.gutter + half), timeline.right - half);
  ctx.fillStyle = paint.ink;
  ctx.beginPath();
  ctx.roundRect(at - half, 0, 2 * half, 17, 4);
  ctx.fill();
  ctx.fillStyle = paint.paper;
  ctx.fillText(text, at, 8);
}

function outline(ctx, place, dash) {
  if (!place) return;
  ctx.setLineDash(dash);
  ctx.strokeRect(place.x - 1, place.y - 1, Math.max(place.width, 1.5) + 1.5, place.height + 2);
  ctx.setLineDash([]);
}
