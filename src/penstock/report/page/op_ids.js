// An op's id taken apart, and said in a sentence: the ids of penstock.schedule.ir.ops.

const OP_ID =
  /^(?:([FBEIW]|[DWRUG]C|[SR][ADX])(\d+)m(\d+)|([A-Z]{2})(\d+)(?:\.(\d+))?(?:@(\w+))?|(NORM|AN|CM))$/;
const parsedIds = new Map();

function parseOpId(id) {
  let parsed = parsedIds.get(id);
  if (parsed === undefined) {
    const match = OP_ID.exec(id);
    parsed = match
      ? {
          kind: match[1] ?? match[4] ?? match[8],
          stage: match[2] === undefined ? -1 : Number(match[2]),
          microBatch: match[3] === undefined ? -1 : Number(match[3]),
          group: match[5] === undefined ? -1 : Number(match[5]),
          chunk: match[6] === undefined ? -1 : Number(match[6]),
          visit: match[7] ?? "",
        }
      : { kind: "", stage: -1, microBatch: -1, group: -1, chunk: -1, visit: "" };
    parsedIds.set(id, parsed);
  }
  return parsed;
}

const SENTENCES = {
  F: "forward of {stage}",
  B: facts.kind === "run" ? "recompute and backward of {stage}" : "backward of {stage}",
  E: facts.kind === "run" ? "forward, loss and backward of the last stage{mb}" : "loss{mb}",
  I: facts.kind === "run" ? "recompute of {stage}, and gradient of its input" : "backward of {stage}: gradient of its input",
  W: "backward of {stage}: gradient of its weights",
  RW: "weights of {group} from disk to host{for}",
  UW: "weights of {group} up to the device{for}",
  AD: "gradient of {group}: two sums added up, on the device",
  DG: "gradient of {group} down to host memory",
  UG: "gradient of {group} up to the device, to be exchanged",
  AG: "gradient of {group} added to what is there",
  NG: "sum of squares of {group}'s gradient",
  ND: "sum of squares of {group}'s gradient, on the device",
  NORM: "global gradient norm",
  WG: "gradient of {group} to disk, until the norm is known",
  RG: "gradient of {group} back from disk",
  RS: "optimizer state of {group} from disk, and weights that are not in memory",
  OP: "optimizer step of {group}",
  WS: "optimizer state of {group} to disk",
  WW: "new weights of {group} to disk",
  UN: "new weights of {group} up to the device",
  OD: "optimizer step of {group}, on the device",
  RM: "momentum of {group} from disk",
  MU: "momentum of {group} takes the gradient in, and makes the update",
  WM: "momentum of {group} to disk",
  UU: "update of {group} up to the device",
  GU: "all-gather of {group}'s updates",
  NS: "updates of {group} made orthogonal",
  DU: "orthogonal update of {group} down to host memory",
  CM: "commit of the step before",
  DC: "saved activation of {stage} down to host memory",
  WC: "saved activation of {stage} to disk",
  RC: "saved activation of {stage} back from disk",
  UC: "saved activation of {stage} up to the device",
  GW: "all-gather of {group}'s weights{for}",
  GN: "all-gather of {group}'s new weights",
  AR: "all-reduce of {group}'s gradient",
  SG: "reduce-scatter of {group}'s gradient",
  AN: "all-reduce of the gradient norm",
  GC: "all-gather of the saved activation of {stage}",
  HW: "all-gather between hosts of {group}'s weights{for}",
  DP: "weights of {group} that have crossed between hosts down to host memory",
  UP: "weights of {group} that had crossed between hosts up to the device{for}",
  HU: "all-gather between hosts of {group}'s updates",
  HG: "reduce-scatter between hosts of {group}'s gradient",
  HR: "all-reduce between copies of {group}'s gradient",
  SA: "send the activation of {stage}",
  RA: "receive the activation of {stage}",
  SD: "send the gradient of {stage}'s activation",
  RD: "receive the gradient of {stage}'s activation",
  SX: "send what {stage} is handed besides its input",
  RX: "receive what {stage} is handed besides its input",
};
const VISIT = /^([A-Z])(\d+)(?:m(\d+))?$/;
const PASSES = { F: "forward", B: "backward", E: "last stage", I: "backward", W: "backward" };

function describe(id) {
  const parsed = parseOpId(id);
  const sentence = SENTENCES[parsed.kind];
  if (!sentence) return "";
  const mb = parsed.microBatch < 0 ? "" : `, micro-batch ${parsed.microBatch}`;
  const chunk = parsed.chunk < 0 ? "" : `, chunk ${parsed.chunk}`;
  const visit = VISIT.exec(parsed.visit);
  const purpose = visit
    ? `, for the ${PASSES[visit[1]] ?? visit[1]} of stage ${visit[2]}${visit[3] ? `, micro-batch ${visit[3]}` : ""}`
    : "";
  const owned = sentence.includes("{stage}'s");
  const text = sentence
    .replace("{stage}", `stage ${parsed.stage}`)
    .replace("{group}", `group ${parsed.group}`)
    .replace("{mb}", mb)
    .replace("{for}", purpose);
  const rest = (sentence.includes("{mb}") ? "" : mb) + chunk;
  return owned || rest === "" || !purpose ? text + rest : text.replace(purpose, rest + purpose);
}
