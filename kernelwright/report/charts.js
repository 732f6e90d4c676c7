"use strict";
// Everything is drawn from the data block of this page; nothing is loaded. The data's shape: kernelwright/report/__init__.py.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const COLOURS = { CORRECT: "correct", WRONG: "wrong", COMPILE_ERROR: "compile", CRASH: "crash", TIMEOUT: "timeout", NO_CODE: "nocode" };
const colour = (name) => `var(--${name})`;
const turnColour = (index) => colour(`turn${index % 8}`);
const words = (status) => status.toLowerCase().replace("_", " ");
const known = (value) => value !== null && value !== undefined;
const percent = (value) => (known(value) ? `${(100 * value).toFixed(0)} %` : "–");
const times = (value) => (known(value) ? `${value.toFixed(2)}×` : "–");
const number = (value) => (known(value) ? (Math.abs(value) >= 100 ? value.toFixed(0) : Number(value.toPrecision(3)).toString()) : "–");

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "rect", "text", "circle", "g"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (known(value)) node.setAttribute(name, value);
  }
  node.append(...children.filter(known));
  return node;
}

const BOX = { width: 360, height: 190, left: 38, right: 8, top: 8, bottom: 22 };

function scale(from, to, low, high) {
  const span = to - from || 1;
  return (value) => low + ((value - from) / span) * (high - low);
}

function ticks(low, high, count) {
  const rough = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) found.push(value);
  return found;
}

function frame(bottom, top, format) {
  const y = scale(bottom, top, BOX.height - BOX.bottom, BOX.top);
  const svg = make("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img" });
  for (const tick of ticks(bottom, top, 4)) {
    svg.append(make("line", { class: "gridline", x1: BOX.left, x2: BOX.width - BOX.right, y1: y(tick), y2: y(tick) }));
    svg.append(make("text", { x: BOX.left - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
  }
  return { svg, y };
}

function key(entries) {
  return make("div", { class: "key" }, ...entries.map(({ name, fill, value }) =>
    make("span", {}, make("i", { style: `background:${fill}` }), name + (known(value) ? ` ${value}` : ""))));
}

// series: [{name, fill, values [steps], band [steps] or undefined}]
function curve({ title, series, steps, format, zero = true, top = null }) {
  const all = series.flatMap((one) => one.values.flatMap((value, index) => {
    const band = (one.band && one.band[index]) || 0;
    return known(value) ? [value - band, value + band] : [];
  }));
  if (!all.length) return null;
  const high = known(top) ? top : Math.max(...all) * 1.04;
  const { svg, y } = frame(zero ? Math.min(0, ...all) : Math.min(...all), high || 1, format);
  const x = scale(steps[0], steps.at(-1), BOX.left, BOX.width - BOX.right);
  const at = (index) => (steps.length > 1 ? x(steps[index]) : (BOX.left + BOX.width - BOX.right) / 2);
  for (const tick of ticks(steps[0], steps.at(-1), 6).filter(Number.isInteger))
    svg.append(make("text", { x: x(tick), y: BOX.height - 6, "text-anchor": "middle" }, String(tick)));
  for (const { fill, values, band } of series) {
    const shown = values.map((value, index) => ({ value, index })).filter((point) => known(point.value));
    const clamp = (value) => (known(top) ? Math.min(value, top) : value);
    if (band) {
      const edge = (sign) => shown.map(({ value, index }) => `${at(index)},${y(clamp(value + sign * (band[index] || 0)))}`);
      svg.append(make("path", { d: `M${edge(1).join("L")}L${edge(-1).reverse().join("L")}Z`, fill, opacity: 0.16 }));
    }
    svg.append(make("path", { d: `M${shown.map(({ value, index }) => `${at(index)},${y(value)}`).join("L")}`, fill: "none", stroke: fill, "stroke-width": 2, "stroke-linejoin": "round" }));
    if (shown.length < 30)
      for (const { value, index } of shown) svg.append(make("circle", { cx: at(index), cy: y(value), r: 2.2, fill }));
  }
  return card(title, svg, steps, at, (index) => series.map(({ name, fill, values }) => ({ name, fill, value: format(values[index]) })));
}

function stack({ title, series, steps }) {
  const { svg, y } = frame(0, 1, percent);
  const x = scale(steps[0], steps.at(-1), BOX.left, BOX.width - BOX.right);
  const at = (index) => (steps.length > 1 ? x(steps[index]) : BOX.left + index);
  const total = steps.map((_, index) => series.reduce((sum, one) => sum + one.values[index], 0) || 1);
  let floor = steps.map(() => 0);
  for (const { fill, values } of series) {
    const ceiling = floor.map((value, index) => value + values[index] / total[index]);
    const wide = steps.length > 1 ? (index) => at(index) : null;
    const points = (edge) => (wide ? edge.map((value, index) => `${wide(index)},${y(value)}`)
      : [`${BOX.left},${y(edge[0])}`, `${BOX.width - BOX.right},${y(edge[0])}`]);
    svg.append(make("path", { d: `M${points(ceiling).join("L")}L${points(floor).reverse().join("L")}Z`, fill }));
    floor = ceiling;
  }
  for (const tick of ticks(steps[0], steps.at(-1), 6).filter(Number.isInteger))
    svg.append(make("text", { x: at(steps.indexOf(tick)) || BOX.left, y: BOX.height - 6, "text-anchor": "middle" }, String(tick)));
  return card(title, svg, steps, at, (index) => series.map(({ name, fill, values }) => ({ name, fill, value: percent(values[index] / total[index]) })));
}

// a card whose key follows the pointer and otherwise shows the last step
function card(title, svg, steps, at, entries) {
  const heading = make("h3", {}, title);
  const legend = make("div", {}, key(entries(steps.length - 1)));
  const hair = make("line", { class: "hair", y1: BOX.top, y2: BOX.height - BOX.bottom });
  svg.append(hair);
  svg.setAttribute("aria-label", title);
  const show = (index) => {
    const inside = index !== null;
    heading.textContent = inside ? `${title}, step ${steps[index]}` : title;
    hair.style.visibility = inside ? "visible" : "hidden";
    if (inside) for (const end of ["x1", "x2"]) hair.setAttribute(end, at(index));
    legend.replaceChildren(key(entries(inside ? index : steps.length - 1)));
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const pointer = ((event.clientX - box.left) / box.width) * BOX.width;
    show(steps.reduce((best, _, index) => (Math.abs(at(index) - pointer) < Math.abs(at(best) - pointer) ? index : best), 0));
  });
  svg.addEventListener("pointerleave", () => show(null));
  return make("div", { class: "card" }, heading, svg, legend);
}

// groups: [{name, bars: [{fill, value, error}]}]
function bars({ title, groups, format, top, legend }) {
  const values = groups.flatMap((group) => group.bars.map((bar) => (bar.value || 0) + (bar.error || 0)));
  const { svg, y } = frame(0, known(top) ? top : Math.max(...values, 1e-9) * 1.1, format);
  const width = (BOX.width - BOX.left - BOX.right) / groups.length;
  groups.forEach((group, place) => {
    const thick = Math.min(34, (width * 0.72) / group.bars.length);
    group.bars.forEach((bar, index) => {
      const x = BOX.left + (place + 0.5) * width + (index - group.bars.length / 2) * thick;
      if (!known(bar.value)) return;
      svg.append(make("rect", { x: x + 1, y: y(bar.value), width: thick - 2, height: Math.max(0, y(0) - y(bar.value)), rx: 2, fill: bar.fill }));
      if (bar.error) {
        const ends = { y1: y(bar.value - bar.error), y2: y(known(top) ? Math.min(top, bar.value + bar.error) : bar.value + bar.error) };
        svg.append(make("line", { x1: x + thick / 2, x2: x + thick / 2, ...ends, stroke: colour("ink"), "stroke-width": 1.2, opacity: 0.55 }));
      }
    });
    svg.append(make("text", { x: BOX.left + (place + 0.5) * width, y: BOX.height - 6, "text-anchor": "middle" }, group.name));
  });
  svg.setAttribute("aria-label", title);
  return make("div", { class: "card" }, make("h3", {}, title), svg, key(legend));
}

function drawHead() {
  $("title").textContent = DATA.run.title;
  $("about").textContent = DATA.run.paper;
  $("facts").append(...Object.entries(DATA.run.facts).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
  $("footer").textContent = DATA.run.footer;
}

function big(title, from, to, note) {
  const figures = make("div", { class: "big" }, known(from) && make("span", { class: "from" }, from),
    known(from) && make("span", { class: "arrow" }, "→"), make("span", { class: "to" }, to));
  return make("div", { class: "card" }, make("h3", {}, title), figures, make("div", { class: "small" }, note));
}

function drawEvaluations() {
  const sets = DATA.evaluations.filter((one) => one.before || one.after);
  const pair = ({ before, after }, get, format) => [before && after ? format(get(before)) : null, format(get(after || before))];
  const first = sets[0];
  if (first) {
    const scope = `${first.tasks} ${first.name.toLowerCase()} × ${first.samples} trajectories`;
    const last = (values) => values.at(-1);
    $("headline").append(
      big("Correct at the last turn", ...pair(first, (record) => last(record.correct), percent), scope),
      big("Correct at any turn", ...pair(first, (record) => record.any_correct, percent), "best turn of each trajectory"),
      big("Speedup of correct kernels", ...pair(first, (record) => last(record.speedup), times), "over PyTorch, geometric mean, last turn"),
      big("Faster than PyTorch", ...pair(first, (record) => record.faster, percent), "correct as well, best turn of each trajectory"));
  }
  for (const { name, before, after } of sets) {
    const turns = (after || before).correct.map((_, index) => index);
    const legend = [["before", before], ["after", after]].filter(([, record]) => record).map(([label]) => ({ name: label, fill: colour(label) }));
    const both = (field, error) => turns.map((turn) => ({
      name: `turn ${turn + 1}`,
      bars: [["before", before], ["after", after]].filter(([, record]) => record)
        .map(([label, record]) => ({ fill: colour(label), value: record[field][turn], error: error && record[error][turn] })),
    }));
    $("turns").append(bars({ title: `${name}: correct`, groups: both("correct", "correct_error"), format: percent, top: 1, legend }));
    $("turns").append(bars({ title: `${name}: speedup`, groups: both("speedup"), format: (value) => `${number(value)}×`, legend }));
  }
  if (!sets.length) $("turns").append(make("p", { class: "none" }, "This run has no evaluation yet."));
}

function drawCurves() {
  const { steps, reward, correct, speedup, entropy, statuses, validation } = DATA.curves;
  if (!steps.length) return void $("curves").append(make("p", { class: "none" }, "This run has no step yet."));
  const perTurn = ({ mean, error }) => mean.map((values, turn) => ({ name: `turn ${turn + 1}`, fill: turnColour(turn), values, band: error && error[turn] }));
  const drawn = [
    curve({ title: "Reward", steps, format: number, series: [{ name: "mean of all turns", fill: colour("after"), values: reward.mean, band: reward.error }] }),
    curve({ title: "Correct", steps, format: percent, top: 1, series: perTurn(correct) }),
    curve({ title: "Speedup of correct kernels", steps, format: (value) => (known(value) ? `${number(value)}×` : "–"), series: perTurn(speedup) }),
    stack({ title: "What became of the kernels", steps, series: Object.entries(statuses).map(([name, values]) => ({ name: words(name), fill: colour(COLOURS[name]), values })) }),
    curve({ title: "Entropy, nats a token", steps, format: number, series: [{ name: "mean of trained tokens", fill: colour("after"), values: entropy }] }),
    validation.steps.length > 1 && curve({ title: "Validation score (chooses the checkpoint)", steps: validation.steps, format: number, series: [{ name: "mean score", fill: colour("after"), values: validation.score }] }),
  ];
  $("curves").append(...drawn.filter(Boolean));
}

drawHead();
drawEvaluations();
drawCurves();
