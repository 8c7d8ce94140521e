"use strict";
// Values are read off the drawings themselves: every plot says which values its edges stand for.
const tip = document.getElementById("tip");

const format = (v) => {
  const size = Math.abs(v);
  if (size >= 1000) return Math.round(v).toLocaleString("en");
  return String(size >= 0.0001 || v === 0 ? Number(v.toPrecision(4)) : v.toExponential(2));
};

const scale = (text) => {
  const [p0, p1, v0, v1, kind] = text.split(",").map((part, i) => (i < 4 ? Number(part) : part));
  return (pixel) => {
    const share = (pixel - p0) / (p1 - p0);
    return kind === "log" ? v0 * (v1 / v0) ** share : v0 + share * (v1 - v0);
  };
};

const local = (svg, event) => {
  const box = svg.getBoundingClientRect();
  const view = svg.viewBox.baseVal;
  return [((event.clientX - box.left) / box.width) * view.width, ((event.clientY - box.top) / box.height) * view.height];
};

const show = (event, nodes) => {
  tip.replaceChildren(...nodes);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 6))}px`;
};

const row = (name, value, hue) => {
  const line = document.createElement("div");
  if (hue) line.append(Object.assign(document.createElement("i"), { className: hue }));
  line.append(name);
  if (value !== undefined) line.append(Object.assign(document.createElement("span"), { textContent: value }));
  return line;
};

const points = (path) => path.getAttribute("d").slice(1).split("L").map((pair) => pair.split(" ").map(Number));

const nearest = (list, x) => {
  let low = 0, high = list.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - list[low - 1][0] < list[low][0] - x ? list[low - 1] : list[low];
};

const watchLines = (svg) => {
  const toX = scale(svg.dataset.x), toY = scale(svg.dataset.y);
  const [top, bottom] = svg.dataset.y.split(",").slice(0, 2);
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cross.setAttribute("class", "cross off");
  cross.setAttribute("y1", top);
  cross.setAttribute("y2", bottom);
  svg.append(cross);
  const series = [...svg.querySelectorAll(".series")].map((group) => {
    const path = group.querySelector(".line");
    return { group, name: group.dataset.name, hue: path.classList[1], list: points(path) };
  });
  svg.addEventListener("pointermove", (event) => {
    const shown = series.filter((one) => !one.group.classList.contains("off"));
    if (!shown.length) return;
    const x = local(svg, event)[0];
    const found = shown.map((one) => ({ ...one, at: nearest(one.list, x) }));
    const closest = found.reduce((a, b) => (Math.abs(b.at[0] - x) < Math.abs(a.at[0] - x) ? b : a)).at[0];
    cross.setAttribute("x1", closest);
    cross.setAttribute("x2", closest);
    cross.classList.remove("off");
    const label = svg.querySelector("text.label").textContent;
    const unit = /\(([^)]*)\)/.exec(label);
    const head = document.createElement("b");
    head.textContent = `${format(toX(closest))} ${unit ? unit[1] : ""}`;
    found.sort((a, b) => a.at[1] - b.at[1]);
    show(event, [head, ...found.map((one) => row(one.name, format(toY(one.at[1])), one.hue))]);
  });
  svg.addEventListener("pointerleave", () => { cross.classList.add("off"); tip.hidden = true; });
};

const watchHeat = (svg) => {
  const [left, top, dx, dy, rows, columns] = svg.dataset.grid.split(",").map(Number);
  const cells = svg.dataset.cells.split(","), unit = svg.dataset.unit;
  const rowNames = svg.dataset.rows.split("|"), columnNames = svg.dataset.columns.split("|");
  svg.addEventListener("pointermove", (event) => {
    const [x, y] = local(svg, event);
    const r = Math.floor((y - top) / dy), c = Math.floor((x - left) / dx);
    if (r < 0 || c < 0 || r >= rows || c >= columns) { tip.hidden = true; return; }
    const head = document.createElement("b");
    head.textContent = `${rowNames[r]} ${svg.dataset.join} ${columnNames[c]}`;
    show(event, [head, row(`${format(Number(cells[r * columns + c] || 0))} ${unit}`)]);
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
};

const watchLegend = (legend) => {
  const groups = legend.parentElement.querySelectorAll(".series");
  legend.querySelectorAll(".key").forEach((key, i) => key.addEventListener("click", () => {
    const off = groups[i].classList.toggle("off");
    key.setAttribute("aria-pressed", String(!off));
  }));
};

document.querySelectorAll("svg.lines").forEach(watchLines);
document.querySelectorAll("svg.heat").forEach(watchHeat);
document.querySelectorAll(".legend").forEach(watchLegend);
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
