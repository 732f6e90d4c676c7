"use strict";
// The trajectory view: step -> task -> trajectory -> turns, with every sampled token coloured.
const LIST = DATA.trajectories;
const state = { index: 0, shade: "advantage" };

const unique = (values) => [...new Set(values)];
const current = () => LIST[state.index];
const short = (task) => task.replace(/^builtin\//, "");
const best = (one) => Math.max(...one.turns.map((turn) => turn.reward ?? 0), 0);

// the trajectory that comes nearest to what was asked for: the first fitting one, members before tasks before steps
function choose(wanted) {
  const fits = (keys) => LIST.findIndex((one) => keys.every((name) => !known(wanted[name]) || one[name] === wanted[name]));
  const place = [["step", "task", "member"], ["step", "task"], ["step"]].map(fits).find((found) => found >= 0);
  if (!known(place)) return;
  state.index = place;
  draw();
  const one = current();
  history.replaceState(null, "", `#step=${one.step}&task=${encodeURIComponent(one.task)}&member=${one.member}`);
}

function selector(label, values, chosen, name, text) {
  const select = make("select", { id: `choose-${name}`, onchange: (event) => choose({ ...current(), member: null, [name]: values[event.target.selectedIndex] }) },
    ...values.map((value) => make("option", value === chosen ? { selected: "" } : {}, text(value))));
  return make("label", {}, label, select);
}

function drawControls() {
  const one = current();
  const steps = unique(LIST.map((other) => other.step));
  const tasks = unique(LIST.filter((other) => other.step === one.step).map((other) => other.task));
  const move = (offset) => () => {
    const next = steps[steps.indexOf(one.step) + offset];
    if (known(next)) choose({ step: next, task: one.task, member: 0 });
  };
  $("controls").replaceChildren(
    selector("Step", steps, one.step, "step", String), selector("Task", tasks, one.task, "task", short),
    make("button", { type: "button", id: "earlier", onclick: move(-1) }, "← earlier step"),
    make("button", { type: "button", id: "later", onclick: move(1) }, "later step →"));
  const group = LIST.filter((other) => other.step === one.step && other.task === one.task);
  $("members").replaceChildren(...group.map((other) => make("button",
    { type: "button", role: "tab", "aria-selected": String(other === one), title: other.turns.map((turn) => words(turn.evaluation?.status ?? turn.purpose)).join(", "), onclick: () => choose(other) },
    `${other.member + 1}`,
    make("span", { class: "dots" }, ...other.turns.map((turn) => make("i", { class: "dot", style: `background:${colour(COLOURS[turn.evaluation?.status] ?? "nocode")}` }))),
    number(best(other)))));
}

function strongest() {
  const one = current();
  const group = LIST.filter((other) => other.step === one.step && other.task === one.task);
  return Math.max(...group.flatMap((other) => other.turns.flatMap((turn) => [].concat(turn.advantages).map(Math.abs))), 1e-9);
}

function shade(advantage, logprob, limit) {
  if (state.shade === "probability") return `rgba(var(--rare),${(0.75 * (1 - Math.exp(logprob))).toFixed(3)})`;
  return `rgba(var(--${advantage < 0 ? "minus" : "plus"}),${(0.06 + 0.44 * Math.min(1, Math.abs(advantage) / limit)).toFixed(3)})`;
}

function drawLegend() {
  const limit = strongest();
  const toggle = make("button", { type: "button", id: "shade", onclick: () => { state.shade = state.shade === "advantage" ? "probability" : "advantage"; draw(); } },
    state.shade === "advantage" ? "colour by probability" : "colour by advantage");
  const sides = state.shade === "advantage"
    ? [`advantage ${number(-limit)}`, `linear-gradient(90deg,rgba(var(--minus),.5),rgba(var(--minus),.06) 49%,rgba(var(--plus),.06) 51%,rgba(var(--plus),.5))`, `+${number(limit)}`]
    : ["probability 1", "linear-gradient(90deg,transparent,rgba(var(--rare),.75))", "0"];
  const statuses = unique(LIST.flatMap((one) => one.turns.map((turn) => turn.evaluation?.status))).filter(known);
  $("legend").replaceChildren(sides[0], make("span", { class: "scale", style: `background:${sides[1]}` }), sides[2], toggle,
    ...statuses.map((status) => make("span", { class: "badge" }, make("i", { class: "dot", style: `background:${colour(COLOURS[status])}` }), words(status))));
}

// tokens [from, to) of a turn; without token texts the whole reply is one piece
function tokens(turn, from, to, limit) {
  return turn.pieces.slice(from, to).map((piece, offset) => {
    const index = from + offset;
    const advantage = Array.isArray(turn.advantages) ? turn.advantages[index] : turn.advantages;
    const logprob = turn.logprobs ? turn.logprobs[index] : 0;
    const title = turn.logprobs ? `advantage ${number(advantage)}, probability ${number(Math.exp(logprob))}` : `mean advantage ${number(advantage)}`;
    return make("span", { class: "token", title, style: `background:${shade(advantage, logprob, limit)}` }, piece);
  });
}

function reply(turn, limit) {
  const count = turn.pieces.length;
  const found = Object.entries(turn.spans).filter(([, [from, to]]) => to > from && to <= count).sort((a, b) => a[1][0] - b[1][0]);
  const parts = [];
  let reached = 0;
  for (const [name, [from, to]] of [...found, ["", [count, count]]]) {
    if (from > reached) parts.push(["", reached, from]);
    if (to > from) parts.push([name, from, to]);
    reached = Math.max(reached, to);
  }
  // what stands between the parts is a line break or the end token: shown only when it says something
  return parts.filter(([name, from, to]) => name || turn.pieces.slice(from, to).join("").trim()).map(([name, from, to]) => make("div", { class: "part", "data-part": name || "rest" },
    make("p", { class: "label" }, name || (found.length ? "rest" : "reply")),
    make(name === "code" || !found.length ? "pre" : "p", { class: name === "code" ? "code" : "prose" }, ...tokens(turn, from, to, limit))));
}

function rows(entries) {
  return make("table", {}, make("tbody", {}, ...entries.filter(([, value]) => known(value) && value !== "").map(([name, value]) =>
    make("tr", {}, make("td", {}, name), make("td", {}, String(value))))));
}

function labelled(label, node) {
  return make("div", { class: "part" }, make("p", { class: "label" }, label), node);
}

function verdict(evaluation) {
  const place = evaluation.location && `line ${evaluation.location.line}${evaluation.location.column ? `, column ${evaluation.location.column}` : ""}`;
  return rows([
    ["status", words(evaluation.status)], ["message", evaluation.message], ["place", place], ["source", evaluation.location?.text?.trim()],
    ["first wrong", evaluation.error_index && `out[${evaluation.error_index.join(", ")}] is ${number(evaluation.got)}, expected ${number(evaluation.expected)}`],
    ["speedup", known(evaluation.speedup) ? times(evaluation.speedup) : null],
    ["kernel", known(evaluation.kernel_ms) ? `${number(evaluation.kernel_ms)} ms, PyTorch ${number(evaluation.reference_ms)} ms (medians)` : null],
    ...Object.entries(evaluation.profile).map(([name, value]) => [name.replaceAll("_", " "), typeof value === "object" ? JSON.stringify(value) : value]),
    ...evaluation.hacks.map((hack) => [`hack: ${hack.rule}`, hack.evidence]),
    ["checked on", evaluation.verified],
  ]);
}

function drawTurn(turn, place, limit) {
  const status = turn.evaluation?.status;
  const speedup = known(turn.evaluation?.speedup) ? ` ${times(turn.evaluation.speedup)}` : "";
  const flat = [].concat(turn.advantages);
  const mean = flat.reduce((sum, value) => sum + value, 0) / flat.length;
  return make("article", { class: "card turn" },
    make("header", {}, make("b", {}, `Turn ${place + 1}${turn.purpose === "attempt" ? "" : `, ${turn.purpose}`}`),
      status && make("span", { class: "badge" }, make("i", { class: "dot", style: `background:${colour(COLOURS[status])}` }), words(status) + speedup),
      known(turn.reward) && make("span", {}, `reward ${number(turn.reward)}`), make("span", {}, `advantage ${number(mean)}`),
      make("span", { class: "muted" }, `${turn.length} tokens sampled${turn.cut ? ", cut off" : ""}`)),
    make("div", { class: "columns" },
      make("div", {}, make("details", place ? {} : { open: "" }, make("summary", {}, turn.continues
        ? `What was added to the context (${turn.context} tokens)` : `What the model read (${turn.context} tokens)`), make("pre", {}, turn.prompt)), ...reply(turn, limit)),
      make("div", {}, known(turn.feedback) && labelled("feedback to the model", make("p", { class: "prose" }, turn.feedback)),
        turn.parts && labelled("reward", rows([...Object.entries(turn.parts).map(([name, value]) => [name, number(value)]), ["sum", number(turn.reward)]])),
        turn.evaluation && labelled("evaluation", verdict(turn.evaluation)))));
}

function draw() {
  const limit = strongest();
  drawControls();
  drawLegend();
  const one = current();
  const end = one.stop === "MAX_TURNS" ? [] : [make("p", { class: "muted" }, `Stopped: ${words(one.stop)}. ${one.note}`)];
  $("trajectory").replaceChildren(...one.turns.map((turn, place) => drawTurn(turn, place, limit)), ...end);
}

function start() {
  $("chosen").textContent = DATA.chosen;
  if (!LIST.length) return void $("trajectory").append(make("p", { class: "none" }, "This run has no trajectory yet."));
  const asked = new URLSearchParams(location.hash.slice(1));
  const figure = (name) => (asked.has(name) ? Number(asked.get(name)) : null);
  choose(asked.has("step") ? { step: figure("step"), task: asked.get("task"), member: figure("member") } : LIST[0]);
}

start();
