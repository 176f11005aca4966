// Line charts: drawn to the width there is; the key below shows the values at the cursor, or at the plan.
// A value of a line between its points; null outside of them. Points are [x, y, low, high], x rising.
function valueAt(points, x, n = 1) {
  if (!points.length || x < points[0][0] - 1e-9 || x > points[points.length - 1][0] + 1e-9) return null;
  const after = points.findIndex((point) => point[0] >= x - 1e-9);
  if (after <= 0) return points[0][n];
  const [a, b] = [points[after - 1], points[after]];
  if (a[n] === null || b[n] === null) return b[0] - x < x - a[0] ? b[n] : a[n];
  return b[0] === a[0] ? b[n] : a[n] + ((b[n] - a[n]) * (x - a[0])) / (b[0] - a[0]);
}

// About four round steps from 0 to what holds `high`.
function ticksTo(high) {
  const rough = (high || 1) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  return Array.from({length: Math.ceil(high / step - 1e-9) + 1}, (_, n) => n * step);
}

function pathOf(points, x, y) {
  let text = "", isPen = false;
  for (const point of points) {
    if (point[1] === null) isPen = false;
    else text += `${isPen ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`, (isPen = true);
  }
  return text;
}

// spec: {x: {ticks, low, high, text, label, at?}, y: {ticks, text, label}, lines: [{name, kind, points}], marks: [{x, y, isNow, text}], rest}
function lineChart(id, specOf) {
  const host = $(id);
  if (!host) return null;
  const key = $(`${id}-key`), spoken = $("spoken");
  let cursor = null, spec = null, scale = null;

  function draw() {
    spec = specOf();
    host.closest("figure").hidden = !spec;
    if (!spec) return;
    const onPaper = host.closest(".two") ? PAPER_WIDTH / 2 - 16 : PAPER_WIDTH;
    const width = state.width ? onPaper : Math.max(host.clientWidth, 240);
    const height = Math.round(clamp(width * 0.5, state.width ? 180 : 220, state.width ? 225 : spec.height || 400)), box = {left: 54, right: 22, top: 12, bottom: 40};
    const [low, high, top] = [spec.x.low, spec.x.high, spec.y.ticks[spec.y.ticks.length - 1]];
    const x = (value) => box.left + ((value - low) / (high - low || 1)) * (width - box.left - box.right);
    const y = (value) => height - box.bottom - (value / top) * (height - box.top - box.bottom);
    scale = {x, y, width, height, box, back: (px) => low + ((px - box.left) / (width - box.left - box.right)) * (high - low)};
    const svg = make("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.title});
    grid(svg);
    for (const line of spec.lines) if (line.band) band(svg, line);
    for (const line of spec.lines) {
      for (const n of line.band ? [2, 3] : [1]) {
        const points = line.points.map((point) => [point[0], point[n]]);
        svg.append(make("path", {class: `line ${line.kind}`, d: pathOf(points, x, y)}));
      }
    }
    for (const mark of spec.marks || []) {
      svg.append(make("circle", {class: mark.isNow ? "point now" : "point", cx: x(mark.x).toFixed(1), cy: y(mark.y).toFixed(1), r: mark.r || (mark.isNow ? 6.5 : 4.5)}));
    }
    svg.append(make("line", {class: "cursor", y1: box.top, y2: height - box.bottom, visibility: "hidden"}));
    host.replaceChildren(svg);
    read(null);
  }

  function grid(svg) {
    const {x, y, width, height, box} = scale, every = width < 480 && spec.x.ticks.length > 6 ? 2 : 1;
    for (const tick of spec.y.ticks) {
      svg.append(make("line", {class: "grid", x1: box.left, x2: width - box.right, y1: y(tick), y2: y(tick)}));
      svg.append(make("text", {x: box.left - 8, y: y(tick) + 4, "text-anchor": "end"}, spec.y.text(tick)));
    }
    spec.x.ticks.forEach((tick, n) => {
      if (n % every) return;
      svg.append(make("line", {class: "grid", x1: x(tick), x2: x(tick), y1: height - box.bottom, y2: height - box.bottom + 5}));
      svg.append(make("text", {x: x(tick), y: height - box.bottom + 18, "text-anchor": "middle"}, spec.x.text(tick)));
    });
    svg.append(make("text", {x: width - box.right, y: height - 4, "text-anchor": "end"}, spec.x.label));
  }

  function band(svg, line) {
    const {x, y} = scale, low = line.points.map((point) => [point[0], point[2]]).reverse();
    const d = `${pathOf(line.points.map((point) => [point[0], point[3]]), x, y)}${pathOf(low, x, y).replace("M", "L")}Z`;
    svg.append(make("path", {class: `band ${line.kind}`, d}));
  }

  // The key's values at x, or where the chart rests.
  function read(at) {
    cursor = at;
    const x = at === null ? spec.rest : at, line = host.querySelector(".cursor");
    line.setAttribute("visibility", at === null ? "hidden" : "visible");
    for (const end of ["x1", "x2"]) line.setAttribute(end, scale.x(x).toFixed(1));
    const head = make("li", {class: "at"}, spec.x.at(x, at === null));
    key.replaceChildren(head, ...spec.lines.map((each) => entry(each, x, at === null)));
    return [head.textContent, ...spec.lines.map((each) => `${each.name} ${text(each, x, at === null)}`)].join("; ");
  }

  function text(line, x, isResting) {
    if (line.band) {
      const [low, high] = isResting && line.rest ? line.rest : [valueAt(line.points, x, 2), valueAt(line.points, x, 3)];
      return low === null ? "-" : line.read(low, high);
    }
    const value = isResting && line.rest !== undefined ? line.rest : valueAt(line.points, x);
    return value === null || value === undefined ? "-" : spec.y.value(value);
  }

  function entry(line, x, isResting) {
    const item = make("li"), swatch = make("svg", {width: 30, height: 8, "aria-hidden": "true"});
    swatch.append(make("path", {class: `line ${line.kind}`, d: "M0 4L30 4"}));
    item.append(swatch, make("span", {}, line.name), make("span", {class: "value"}, text(line, x, isResting)));
    return item;
  }

  const point = (event) => {
    const box = host.getBoundingClientRect();
    if (spec) read(clamp(scale.back(((event.clientX - box.left) * scale.width) / box.width), spec.x.low, spec.x.high));
  };
  host.addEventListener("pointermove", point);
  host.addEventListener("pointerdown", point);
  host.addEventListener("pointerleave", (event) => spec && event.pointerType === "mouse" && read(null));
  host.addEventListener("blur", () => spec && read(null));
  host.addEventListener("keydown", (event) => {
    const way = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
    if (event.key === "Escape") return read(null);
    if (!spec || !way) return;
    event.preventDefault();
    const from = cursor === null ? spec.rest : cursor, step = ((spec.x.high - spec.x.low) / 50) * way;
    spoken.textContent = read(clamp(from + step, spec.x.low, spec.x.high));
  });
  return draw;
}

const PERCENTS = {ticks: [0, 0.2, 0.4, 0.6, 0.8, 1], text: (rate) => percent(rate, 0), value: (rate) => percent(rate)};
const round = (value) => grouped(Number(value.toPrecision(3)));
const zip = (xs, ys) => xs.map((x, n) => [x, ys[n]]);

function coverageChart() {
  return lineChart("coverage", () => {
    const plan = data.plans[state.plan], curves = plan.curves, score = plan.scores[plan.scored];
    const line = (name, kind, values, rest) => ({name, kind, points: zip(curves.budget, values), rest});
    const ranking = plan.test === null ? "this ranking, its own traffic" : "this ranking, traffic it was made from";
    return {
      title: "Traffic served by fast memory against the part of the experts\u2019 bytes that is there",
      x: {low: 0, high: 1, ticks: [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1], text: (x) => percent(x, 0), label: "experts\u2019 bytes in fast memory",
        at: (x, isResting) => `${isResting ? "The plan, " : "At "}${percent(x)} of the bytes${plan.has_bytes ? `, ${size(x * plan.all_bytes)}` : ""}`},
      y: {...PERCENTS, label: "traffic served"},
      lines: [
        line("best in hindsight, any layers", "free", curves.oracle_free, score.oracle_free),
        line("best in hindsight, as many per layer", "reach", curves.oracle_reachable, score.oracle_reachable),
        line(ranking, "own", curves.own, plan.own),
        ...(curves.unseen ? [line("this ranking, unseen traffic", "unseen", curves.unseen, plan.test)] : []),
        line("a blind choice", "null", curves.budget, plan.null),
        line("whole layers in order", "layers", curves.layer_order, score.layer_order),
      ],
      marks: data.plans.map((each, n) => ({x: each.null, y: each.scores[each.scored].hit_rate, isNow: n === state.plan})).sort((a, b) => a.isNow - b.isNow),
      rest: plan.null,
    };
  });
}

// Every forecast figure has the same form: a band between two bounds, along the budget or the chunk.
function forecastCharts() {
  const draws = [...document.querySelectorAll("[data-forecast]")].map((host) => lineChart(host.id, () => {
    const plan = data.plans[state.plan], chart = (plan.forecast || [])[Number(host.dataset.forecast)];
    if (!chart || chart.at.length < 2) return null;
    const points = chart.at.map((x, n) => [x, chart.high[n], chart.low[n], chart.high[n]]), isBudget = chart.axis === "budget";
    const speed = (ms) => `${round(chart.tokens / (ms / 1e3))} tokens/s`;
    const value = (low, high) => `${round(low)} to ${round(high)} ${chart.unit}`;
    const last = chart.at[chart.at.length - 1], rest = chart.plan ? chart.plan[0] : last;
    return {
      title: chart.title, height: 280, rest,
      marks: chart.plan ? [chart.plan[1], chart.plan[2]].map((y) => ({x: rest, y, isNow: true, r: 5})) : [],
      x: {low: isBudget ? 0 : chart.at[0], high: last, ticks: isBudget ? [0, 0.2, 0.4, 0.6, 0.8, 1] : chart.at.filter((x, n) => n === 0 || x >= last / 4),
        text: (x) => (isBudget ? percent(x, 0) : grouped(x)), label: isBudget ? "experts\u2019 bytes in fast memory" : "prompt tokens in a step",
        at: (x, isResting) => (isBudget ? `${isResting ? "The plan, " : "At "}${percent(x)} of the bytes` : `${grouped(Math.round(x))} tokens in a step`)},
      y: {ticks: ticksTo(Math.max(...chart.high, chart.plan ? chart.plan[2] : 0)), text: grouped},
      lines: [{name: isBudget ? "per step" : "prompt", kind: "s0", points, band: true, read: (low, high) => value(low, high), rest: chart.plan && chart.plan.slice(1)},
        ...(isBudget ? [{name: "all requests", kind: "none", points, band: true, read: (low, high) => `${speed(high).split(" ")[0]} to ${speed(low)}`, rest: chart.plan && chart.plan.slice(1)}] : [])],
    };
  }));
  return () => draws.forEach((draw) => draw && draw());
}

function runCharts() {
  if (!data.run || !data.run.length) return null;
  const spec = (title, lines) => () => {
    const rank = data.run[state.rank || 0], steps = rank.lines.map((line) => line[0]);
    return steps.length < 2 ? null : {
      title, height: 320, rest: steps[steps.length - 1], marks: [],
      x: {low: steps[0], high: steps[steps.length - 1], ticks: ticksTo(steps[steps.length - 1]).filter((tick) => tick >= steps[0] && tick <= steps[steps.length - 1]), text: grouped, label: "engine steps",
        at: (x, isResting) => `${isResting ? "Last update" : "Near here"}, rank ${rank.rank}, step ${grouped(Math.round(x))}`},
      y: PERCENTS,
      lines: lines.map(([name, kind, n]) => ({name, kind, points: rank.lines.map((line) => [line[0], line[n]])})),
    };
  };
  const draws = [
    lineChart("hits", spec("Hit rate of every update\u2019s window", [["served hot", "s1", 1], ["of the bytes touched", "s0", 2], ["best in reach", "s2", 3]])),
    lineChart("drift", spec("Distance of the live traffic from the plan\u2019s", [["drift", "s1", 4]])),
  ];
  for (const input of document.querySelectorAll("input[name=rank]")) {
    input.addEventListener("change", () => {
      state.rank = Number(input.value);
      draws.forEach((draw) => draw());
    });
  }
  return () => draws.forEach((draw) => draw && draw());
}
