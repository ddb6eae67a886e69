// Numbers for people, and the round numbers that axes are marked at.

const MINUS = "\u2212";

// A time with the unit that suits `scale`, a time of about the size that matters.
function timeUnit(scale) {
  if (facts.unit !== "s") return { factor: 1, name: facts.unit };
  if (scale >= 0.9995) return { factor: 1, name: "s" };
  if (scale >= 0.9995e-3) return { factor: 1e3, name: "ms" };
  return { factor: 1e6, name: "\u00b5s" };
}

function significant(value, digits) {
  if (value === 0) return "0";
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value)) + 1e-9));
  const text = Math.abs(value).toLocaleString("en-US", { maximumFractionDigits: Math.min(decimals, 12) });
  return (value < 0 ? MINUS : "") + text;
}

function formatTime(time, digits = 3) {
  const unit = timeUnit(Math.abs(time));
  return `${significant(time * unit.factor, facts.unit === "s" ? digits : 6)} ${unit.name}`.trim();
}

// A moment, precise to about a thousandth of what is visible.
function formatMoment(time, span) {
  const unit = timeUnit(Math.max(span, Math.abs(time)));
  const decimals = Math.min(9, Math.max(0, Math.ceil(3 - Math.log10(Math.max(span, 1e-12) * unit.factor))));
  const text = (time * unit.factor).toLocaleString("en-US", { maximumFractionDigits: decimals });
  return `${text} ${unit.name}`.trim();
}

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB"];

function amountUnit(scale) {
  if (facts.amounts !== "bytes") {
    const power = scale >= 1e9 ? [1e9, "G"] : scale >= 1e6 ? [1e6, "M"] : scale >= 1e4 ? [1e3, "k"] : [1, ""];
    return { factor: 1 / power[0], name: power[1] };
  }
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(scale, 1)) / 10 + 1e-9)));
  return { factor: 1 / 1024 ** power, name: BINARY[power] };
}

function formatAmount(amount) {
  const unit = amountUnit(amount);
  return `${significant(amount * unit.factor, 4)} ${unit.name}`.trim();
}

// Round numbers from 0 or `low` to `high`, about `count` of them: {value, text}. `factor` scales to the shown unit.
function ticks(low, high, count, factor = 1) {
  const rough = ((high - low) * factor) / Math.max(count, 1);
  if (!(rough > 0) || !Number.isFinite(rough)) return [];
  const power = 10 ** Math.floor(Math.log10(rough) + 1e-9);
  const step = power * ([1, 2, 5].find((one) => one * power >= rough * 0.999) ?? 10);
  const decimals = Math.min(12, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  const found = [];
  for (let i = Math.ceil((low * factor) / step - 1e-9); i * step <= high * factor + step * 1e-9; i++) {
    const digits = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
    const text = (i * step + 0).toLocaleString("en-US", digits); // + 0: not the zero that has a sign
    found.push({ value: (i * step) / factor, text });
  }
  return found;
}
