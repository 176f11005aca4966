// What the page can do: one plan of several is shown, figures are drawn to the width there is, paper is always light.
// Text reaches the page by textContent alone. This file is joined behind map.js and charts.js, in one script.
const views = [heatMap, coverageChart, forecastCharts, runCharts];
const redraws = [];

function show(plan) {
  state.plan = plan;
  for (const part of document.querySelectorAll("[data-plan]")) part.hidden = Number(part.dataset.plan) !== plan;
  redraw();
}

function redraw() {
  for (const draw of redraws) draw();
}

function start() {
  for (const view of views) {
    const draw = view();
    if (draw) redraws.push(draw);
  }
  for (const input of document.querySelectorAll("input[name=plan]")) {
    input.addEventListener("change", () => show(Number(input.value)));
    if (input.checked) state.plan = Number(input.value);
  }
  let width = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (width !== document.documentElement.clientWidth) redraw();
    width = document.documentElement.clientWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const print = (on) => {
    document.documentElement.toggleAttribute("data-print", on);
    state.width = on ? PAPER_WIDTH : 0;
    redraw();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  show(state.plan);
}

start();
