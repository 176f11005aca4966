// The heat map: one row per layer, one cell per expert, darker the more it is used; a line around what is hot.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const state = {plan: 0, traffic: 0, order: "use", cell: null, width: 0};
const PAPER_WIDTH = 680; // CSS pixels between the margins of A4
const NARROWEST_CELL = 9; // by id hot cells lie scattered, and each must be seen: the map scrolls instead

const $ = (id) => document.getElementById(id);
const percent = (rate, places = 1) => `${(100 * rate).toFixed(places)} %`;
const grouped = (number) => number.toLocaleString("en-US", {maximumFractionDigits: 3});
const size = (bytes) => (bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(3)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function make(tag, attributes = {}, text) {
  const isSvg = ["svg", "path", "line", "text", "circle", "g"].includes(tag);
  const node = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Per kind of traffic: totals of the layers, the order of use in each, and where the colour scale ends.
function prepared(traffic) {
  if (traffic.totals) return traffic;
  traffic.totals = traffic.rows.map((row) => row.reduce((sum, count) => sum + count, 0));
  traffic.byUse = traffic.rows.map((row) => row.map((_, e) => e).sort((a, b) => row[b] - row[a] || a - b));
  const ratios = traffic.rows.flatMap((row, l) => row.map((count) => evenShares(traffic, l, count))).sort((a, b) => a - b);
  const high = ratios[Math.floor(0.998 * (ratios.length - 1))] || 0;
  traffic.top = 2 ** Math.max(2, Math.ceil(Math.log2(Math.max(high, 1))));
  return traffic;
}

// A share as a multiple of what every expert would have if all were used alike.
function evenShares(traffic, l, count) {
  return traffic.totals[l] ? (count * data.experts) / traffic.totals[l] : 1;
}

function hotOf(plan) {
  if (!plan.mask) {
    plan.mask = plan.hot.map((ids) => {
      const row = new Uint16Array(data.experts); // 0: cold, n: the n-th most wanted of its layer
      ids.forEach((id, n) => (row[id] = n + 1));
      return row;
    });
  }
  return plan.mask;
}

function colours() {
  const stops = [0, 1, 2, 3, 4, 5].map((n) => parseInt(style(`--ramp-${n}`).slice(1), 16)).map((c) => [c >> 16, (c >> 8) & 255, c & 255]);
  return Array.from({length: 256}, (_, n) => {
    const at = (n / 255) * 5, i = Math.min(Math.floor(at), 4);
    const [r, g, b] = [0, 1, 2].map((c) => Math.round(stops[i][c] + (at - i) * (stops[i + 1][c] - stops[i][c])));
    return `rgb(${r},${g},${b})`;
  });
}

const scaled = (ratio, top) => Math.log2(1 + Math.min(ratio, top)) / Math.log2(1 + top);

function context(canvas, width, height) {
  const dpr = Math.max(state.width ? 3 : 1, devicePixelRatio || 1);
  canvas.width = Math.round(width * dpr);
  canvas.height = Math.round(height * dpr);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(dpr, dpr);
  return pen;
}

function heatMap() {
  const [labels, cells, mark, bars] = ["layers", "cells", "mark", "bars"].map((id) => $(id));
  const scroller = cells.parentElement.parentElement, tip = $("tip"), spoken = $("spoken");
  const L = data.layers.length, E = data.experts;
  let cell = 1, rowHeight = 5;

  const traffic = () => prepared(data.traffic[state.traffic]);
  const expertAt = (l, column) => (state.order === "use" ? traffic().byUse[l][column] : column);

  function drawCells() {
    const width = state.width ? state.width - labels.clientWidth - bars.clientWidth - 20 : scroller.clientWidth;
    cell = state.order === "id" && !state.width ? Math.max(width / E, NARROWEST_CELL) : width / E;
    const pen = context(cells, cell * E, L * rowHeight), lut = colours(), shown = traffic(), hot = hotOf(data.plans[state.plan]);
    for (let l = 0; l < L; l++) {
      for (let column = 0; column < E; column++) {
        const ratio = evenShares(shown, l, shown.rows[l][expertAt(l, column)]);
        pen.fillStyle = lut[Math.round(255 * scaled(ratio, shown.top))];
        pen.fillRect(column * cell, l * rowHeight, cell + 0.5, rowHeight + 0.5);
      }
    }
    drawOutline(pen, hot);
    const ring = context(mark, cell * E, L * rowHeight);
    if (state.cell) drawRing(ring);
  }

  // The border between hot and cold, drawn on the hot side of it, so that it tells in from out.
  function drawOutline(pen, hot) {
    const isHot = (l, column) => l >= 0 && l < L && column >= 0 && column < E && hot[l][expertAt(l, column)] > 0;
    const width = cell < 12 ? 1.25 : 1.75, inset = Math.min(width / 2 + 0.25, cell / 2);
    pen.strokeStyle = style("--hot");
    pen.lineWidth = width;
    pen.lineCap = "square";
    pen.beginPath();
    for (let l = 0; l < L; l++) {
      for (let column = 0; column < E; column++) {
        if (!isHot(l, column)) continue;
        const [left, right] = [column * cell + inset, (column + 1) * cell - inset];
        const [top, bottom] = [l * rowHeight + inset, (l + 1) * rowHeight - inset];
        const [above, below, before, after] = [isHot(l - 1, column), isHot(l + 1, column), isHot(l, column - 1), isHot(l, column + 1)];
        const [x0, x1] = [before ? left - 2 * inset : left, after ? right + 2 * inset : right];
        const [y0, y1] = [above ? top - 2 * inset : top, below ? bottom + 2 * inset : bottom];
        if (!above) pen.moveTo(x0, top), pen.lineTo(x1, top);
        if (!below) pen.moveTo(x0, bottom), pen.lineTo(x1, bottom);
        if (!before) pen.moveTo(left, y0), pen.lineTo(left, y1);
        if (!after) pen.moveTo(right, y0), pen.lineTo(right, y1);
      }
    }
    pen.stroke();
  }

  function drawRing(pen) {
    const [l, column] = state.cell, width = Math.max(cell, 6);
    const x = clamp(column * cell + cell / 2 - width / 2, 3.5, cell * E - width - 3.5);
    const y = clamp(l * rowHeight, 3.5, L * rowHeight - rowHeight - 3.5);
    for (const [colour, grow] of [["--paper", 2.5], ["--ink", 1]]) {
      pen.strokeStyle = style(colour);
      pen.lineWidth = 1.75;
      pen.strokeRect(x - grow, y - grow, width + 2 * grow, rowHeight + 2 * grow);
    }
  }

  function drawLabels() {
    const pen = context(labels, 26, L * rowHeight), every = Math.max(1, Math.ceil(13 / rowHeight));
    pen.fillStyle = style("--soft");
    pen.font = `11px ${style("--sans")}`;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (let l = 0; l < L; l += every) pen.fillText(data.layers[l], 25, clamp((l + 0.5) * rowHeight, 6, L * rowHeight - 5), 25);
  }

  function drawBars() {
    const width = state.width || scroller.parentElement.clientWidth < 560 ? 44 : 96, plan = data.plans[state.plan];
    const pen = context(bars, width, L * rowHeight), score = plan.scores[state.traffic];
    pen.fillStyle = style("--line");
    pen.globalAlpha = 0.5;
    pen.fillRect(0, 0, width, L * rowHeight);
    pen.fillStyle = style("--own");
    score.per_layer.forEach((rate, l) => {
      pen.globalAlpha = data.layers[l] === score.worst_layer ? 1 : 0.5;
      pen.fillRect(0, l * rowHeight + 0.5, rate * width, Math.max(rowHeight - 1, 1));
    });
    pen.globalAlpha = 1;
    pen.fillStyle = style("--ink");
    pen.fillRect(plan.null * width - 0.5, 0, 1, L * rowHeight);
  }

  function facts(l, e) {
    const plan = data.plans[state.plan], place = hotOf(plan)[l][e];
    const hot = place ? `hot, number ${place} of ${plan.hot[l].length} in its layer` : "cold, read from slow memory";
    const lines = data.traffic.map((kind) => {
      const total = prepared(kind).totals[l], count = kind.rows[l][e];
      const share = total ? `${percent(count / total, 2)} of its layer, ${Number(evenShares(kind, l, count).toPrecision(2))}\u00d7 an even share` : "an empty layer";
      return `${kind.title}: ${grouped(count)} pairs (${share})`;
    });
    const where = `${plan.has_bytes ? `${size(plan.row_bytes[l])} per rank; ` : ""}${plan.ranks[l]}`;
    return {title: `Layer ${data.layers[l]}, expert ${e}`, hot, isHot: place > 0, lines, where};
  }

  function tell(l, column, at) {
    state.cell = [l, column];
    const found = facts(l, expertAt(l, column));
    tip.replaceChildren(make("b", {}, found.title), make("div", {class: found.isHot ? "is-hot" : ""}, found.hot),
      ...found.lines.map((line) => make("div", {}, line)), make("div", {}, found.where));
    tip.hidden = false;
    const box = tip.getBoundingClientRect(), gap = 14;
    const x = at.x + gap + box.width > innerWidth - 8 ? at.x - gap - box.width : at.x + gap;
    const y = at.y + gap + box.height > innerHeight - 8 ? at.y - gap - box.height : at.y + gap;
    tip.style.left = `${clamp(x, 8, Math.max(innerWidth - 8 - box.width, 8))}px`;
    tip.style.top = `${clamp(y, 8, Math.max(innerHeight - 8 - box.height, 8))}px`;
    drawRing(context(mark, cell * E, L * rowHeight));
    return found;
  }

  function hide() {
    tip.hidden = true;
    state.cell = null;
    context(mark, cell * E, L * rowHeight);
  }

  function point(event) {
    const box = cells.getBoundingClientRect();
    const column = clamp(Math.floor((event.clientX - box.left) / cell), 0, E - 1);
    const l = clamp(Math.floor((event.clientY - box.top) / rowHeight), 0, L - 1);
    tell(l, column, {x: event.clientX, y: event.clientY});
  }

  const STEPS = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0],
    Home: [0, -Infinity], End: [0, Infinity]};

  function step(event) {
    if (event.key === "Escape") return hide();
    const move = STEPS[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const [l, column] = state.cell || [0, 0], far = event.shiftKey ? 10 : 1;
    const to = state.cell ? [clamp(l + move[0] * far, 0, L - 1), clamp(column + move[1] * far, 0, E - 1)] : [0, 0];
    scroller.scrollLeft = clamp(scroller.scrollLeft, (to[1] + 2) * cell - scroller.clientWidth, (to[1] - 1) * cell);
    const box = cells.getBoundingClientRect();
    const found = tell(...to, {x: box.left + (to[1] + 1) * cell, y: box.top + (to[0] + 1) * rowHeight});
    spoken.textContent = [found.title, found.hot, ...found.lines, found.where].join("; ");
  }

  cells.parentElement.addEventListener("pointermove", point);
  cells.parentElement.addEventListener("pointerdown", point);
  // A finger that is lifted leaves too, and what it asked for must stay to be read: until it touches something else.
  cells.parentElement.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  document.addEventListener("pointerdown", (event) => scroller.contains(event.target) || hide());
  addEventListener("scroll", () => document.activeElement === scroller || tip.hidden || hide(), {passive: true});
  scroller.addEventListener("keydown", step);
  scroller.addEventListener("blur", hide);
  scroller.addEventListener("scroll", () => document.activeElement === scroller || hide());
  for (const name of ["order", "traffic"]) {
    for (const input of document.querySelectorAll(`input[name=${name}]`)) {
      input.addEventListener("change", () => {
        state[name] = name === "traffic" ? Number(input.value) : input.value;
        hide();
        draw();
      });
    }
  }

  function drawRamp() {
    const top = traffic().top, ticks = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512].filter((tick) => tick <= top);
    $("ticks").replaceChildren(...ticks.map((tick, n) => {
      const text = `${tick}\u00d7${n && n === ticks.length - 1 ? " or more" : ""}`, node = make("span", {}, text);
      node.style.left = `${100 * scaled(tick, top)}%`;
      return node;
    }));
  }

  function draw() {
    rowHeight = clamp(Math.floor((state.width ? 430 : 560) / L), state.width ? 4 : 5, 24);
    drawBars();
    drawLabels();
    $("experts-head").textContent = state.order === "use" ? `${E} experts, most used first` : `experts 0 to ${E - 1}, by id`;
    drawCells();
    drawRamp();
  }
  return draw;
}
