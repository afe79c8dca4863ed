"use strict";
// Shows the values of the step under the pointer, or chosen with the arrow keys. The points of a line are drawn in the
// order of its values, so a value's place is that of its point in the path.
for (const figure of document.querySelectorAll("figure[data-values]")) {
  const lines = JSON.parse(figure.dataset.values);
  const svg = figure.querySelector("svg");
  const plot = svg.querySelector(".plot");
  const outputs = figure.querySelectorAll("output");
  const at = figure.querySelector(".at");
  const places = lines.map((_, index) => {
    const path = plot.querySelector(`.serie-${index} path`);
    const numbers = path ? path.getAttribute("d").match(/-?[\d.]+(?:e-?\d+)?/g).map(Number) : [];
    return numbers.filter((_, place) => place % 2 === 0);
  });
  const points = lines
    .flatMap((line, index) => line.steps.map((step, place) => ({ step, x: places[index][place] })))
    .filter((point) => point.x !== undefined)
    .sort((first, second) => first.step - second.step);
  const height = plot.querySelector("rect").getAttribute("height");
  const pointer = document.createElementNS("http://www.w3.org/2000/svg", "path");
  pointer.setAttribute("class", "pointer");
  plot.append(pointer);
  let chosen = null;

  const show = (index) => {
    chosen = index;
    const point = index === null ? null : points[index];
    pointer.setAttribute("d", point ? `M${point.x} 0V${height}` : "");
    at.textContent = point ? `step ${point.step.toLocaleString("en")}` : "";
    lines.forEach((line, number) => {
      let place = line.steps.length - 1;
      while (point && place > 0 && line.steps[place] > point.step) place -= 1;
      const value = point && line.steps[place] > point.step ? undefined : line.values[place];
      outputs[number].textContent = value === undefined ? "–" : format(value);
    });
  };
  const format = (value) =>
    Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en")
      : value && Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  const nearest = (event) => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse()).x;
    return points.reduce((best, point, index) =>
      Math.abs(point.x - x) < Math.abs(points[best].x - x) ? index : best, 0);
  };
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("pointermove", (event) => show(nearest(event)));
  svg.addEventListener("pointerleave", () => show(null));
  svg.addEventListener("blur", () => show(null));
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !points.length) return;
    event.preventDefault();
    const from = chosen === null ? (move > 0 ? -1 : points.length) : chosen;
    const step = points[from]?.step;
    let next = from + move;
    while (points[next] && points[next].step === step) next += move;
    if (points[next]) show(next);
  });
  show(null);
}
