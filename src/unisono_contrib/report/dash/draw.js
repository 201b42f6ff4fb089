// Pictures on canvases: curves and rows of bars, as `picture.draw_lines` and `picture.draw_bars` have them.
"use strict";
const Dash = { palette: new Map(), visible: new WeakSet(), redraw: new WeakMap() };

Dash.colour = name => {
  if (name.startsWith("#")) return name;
  if (!Dash.palette.has(name))
    Dash.palette.set(name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim() || "#888");
  return Dash.palette.get(name);
};

// An element: el("p.note", "words", child, {title: "…"}); text is never markup.
Dash.el = (kind, ...inside) => {
  const [tag, ...styles] = kind.split("."), node = document.createElement(tag);
  if (styles.length) node.className = styles.join(" ");
  for (const item of inside) {
    if (item === null || item === undefined) continue;
    if (item instanceof Node) node.append(item);
    else if (typeof item === "object") for (const [key, value] of Object.entries(item)) node.setAttribute(key, value);
    else node.append(String(item));
  }
  return node;
};

Dash.swatch = colour => {
  const box = Dash.el("i");
  box.style.background = colour.startsWith("#") ? colour : `var(--${colour})`;
  return box;
};

// Only what is in sight is drawn; the rest when it comes there.
Dash.watcher = new IntersectionObserver(entries => {
  for (const entry of entries) {
    if (entry.isIntersecting) { Dash.visible.add(entry.target); Dash.ask(entry.target); }
    else Dash.visible.delete(entry.target);
  }
}, { rootMargin: "150px" });
Dash.sizes = new ResizeObserver(entries => { for (const entry of entries) Dash.ask(entry.target); });
Dash.asked = new Set();
Dash.ask = canvas => {
  if (!Dash.visible.has(canvas)) return;
  if (!Dash.asked.size) requestAnimationFrame(() => {
    const due = [...Dash.asked];
    Dash.asked.clear();
    for (const one of due) if (one.isConnected) Dash.redraw.get(one)?.();
  });
  Dash.asked.add(canvas);
};
Dash.canvas = (height, label, draw) => {
  const canvas = Dash.el("canvas", { role: "img", "aria-label": label });
  canvas.style.height = height + "px";
  Dash.redraw.set(canvas, () => draw(canvas));
  Dash.watcher.observe(canvas);
  Dash.sizes.observe(canvas);
  return canvas;
};
Dash.all = () => { Dash.palette.clear(); for (const c of document.querySelectorAll("canvas")) Dash.ask(c); };

// A pen on a canvas of so many CSS pixels.
Dash.pen = canvas => {
  const wide = canvas.clientWidth, tall = canvas.clientHeight, ratio = Math.min(2, devicePixelRatio || 1);
  if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(tall * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, wide, tall);
  pen.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  pen.textBaseline = "middle";
  return { pen, wide, tall };
};
Dash.fitted = (pen, words, room) => {
  if (pen.measureText(words).width <= room) return words;
  let n = words.length;
  while (n > 1 && pen.measureText(words.slice(0, n) + "…").width > room) n--;
  return words.slice(0, n) + "…";
};

Dash.place = (chart, box) => ({
  x: at => box.left + box.wide * (at - chart.x[0]) / ((chart.x[1] - chart.x[0]) || 1),
  y: at => box.top + box.tall * (1 - (at - chart.y[0]) / ((chart.y[1] - chart.y[0]) || 1)),
});

Dash.lines = (canvas, chart, cursor) => {
  const { pen, wide, tall } = Dash.pen(canvas);
  if (!wide) return null;
  const left = 8 + Math.max(20, ...chart.y_ticks.map(([, said]) => pen.measureText(said).width));
  const box = { left, top: 8, wide: wide - left - 10, tall: tall - 46 }, at = Dash.place(chart, box);
  pen.lineWidth = 1;
  pen.strokeStyle = Dash.colour("rule");
  pen.fillStyle = Dash.colour("soft");
  pen.textAlign = "right";
  for (const [value, said] of chart.y_ticks) {
    const y = Math.round(at.y(value)) + .5;
    pen.beginPath(); pen.moveTo(box.left, y); pen.lineTo(box.left + box.wide, y); pen.stroke();
    pen.fillText(said, box.left - 7, y);
  }
  pen.textAlign = "center";
  let free = -Infinity;
  for (const [value, said] of chart.x_ticks) {
    const half = pen.measureText(said).width / 2, x = Math.min(at.x(value), wide - half - 1);
    if (x - half < free) continue;
    pen.fillText(said, x, box.top + box.tall + 13);
    free = x + half + 12;
  }
  pen.fillText(chart.axis.name, box.left + box.wide / 2, tall - 8);
  pen.lineJoin = "round";
  for (const line of chart.lines) {
    pen.strokeStyle = pen.fillStyle = Dash.colour(line.colour);
    pen.lineWidth = line.thick;
    pen.beginPath();
    line.points.forEach(([x, y], i) => i ? pen.lineTo(at.x(x), at.y(y)) : pen.moveTo(at.x(x), at.y(y)));
    pen.stroke();
    if (line.dots || line.points.length === 1)
      for (const [x, y] of line.points) { pen.beginPath(); pen.arc(at.x(x), at.y(y), 3, 0, 7); pen.fill(); }
  }
  if (cursor !== null) {
    pen.strokeStyle = Dash.colour("soft");
    pen.lineWidth = 1;
    const x = Math.round(at.x(cursor)) + .5;
    pen.beginPath(); pen.moveTo(x, box.top); pen.lineTo(x, box.top + box.tall); pen.stroke();
  }
  return box;
};

Dash.nearest = (points, x) => {
  let low = 0, high = points.length - 1;
  while (low < high) { const mid = (low + high) >> 1; if (points[mid][0] < x) low = mid + 1; else high = mid; }
  return low && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
};

// A figure of curves: legend, canvas, a readout under the pointer or the arrow keys.
Dash.curves = title => {
  const legend = Dash.el("div.legend"), out = Dash.el("output"), figure = Dash.el("div");
  let chart = null, box = null, cursor = null;
  const canvas = Dash.canvas(250, title, () => { if (chart) box = Dash.lines(canvas, chart, cursor); });
  canvas.tabIndex = 0;
  const show = x => {
    cursor = x;
    if (x === null) out.textContent = "";
    else {
      const said = [], lines = chart.lines.filter(line => line.points.length);
      for (const line of lines) said.push(`${line.name || "value"} ${+Dash.nearest(line.points, x)[1].toPrecision(5)}`);
      const step = Dash.nearest(lines[0].points, x)[0], shown = chart.axis.log ? 10 ** step : step;
      cursor = step;
      out.textContent = `${chart.axis.name} ${chart.axis.whole ? Math.round(shown) : +shown.toPrecision(4)}: ${said.join(", ")}`;
    }
    Dash.ask(canvas);
  };
  const point = event => {
    if (!chart || !box || !chart.lines.length) return;
    const at = (event.clientX - canvas.getBoundingClientRect().left - box.left) / box.wide;
    show(chart.x[0] + (chart.x[1] - chart.x[0]) * Math.max(0, Math.min(1, at)));
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", () => show(null));
  canvas.addEventListener("blur", () => show(null));
  canvas.addEventListener("keydown", event => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !chart?.lines.length) return;
    event.preventDefault();
    const points = chart.lines[0].points, near = cursor === null ? points.length - 1 : points.indexOf(Dash.nearest(points, cursor));
    show(points[Math.max(0, Math.min(points.length - 1, near + move))][0]);
  });
  figure.append(legend, canvas);
  figure.update = (next, height) => {
    chart = next;
    canvas.style.height = height + "px";
    legend.replaceChildren(...chart.lines.filter(l => l.name).map(l => Dash.el("span", Dash.swatch(l.colour), l.name)), out);
    Dash.ask(canvas);
  };
  return figure;
};

Dash.bars = (canvas, chart) => {
  const { pen, wide } = Dash.pen(canvas);
  if (!wide) return null;
  const phone = wide < 520, size = Math.min(13, chart.tall), font = px => `${px}px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif`;
  pen.font = font(phone ? Math.min(12, size) : size);
  const name = ([said, small]) => phone || !small ? said : `${said}  ${small}`;
  const most = (phone ? .42 : .28) * wide, values = Math.max(0, ...chart.rows.map(r => r[2] ? pen.measureText(r[2]).width + 12 : 0));
  const gutter = Math.min(most, Math.max(0, ...chart.rows.map(r => pen.measureText(name(r)).width))) + 12;
  const box = { left: gutter, wide: wide - gutter - values, row: chart.row_height }, gap = chart.tall >= 12 ? 2 : .5;
  const scale = box.wide / ((chart.end - chart.begin) || 1);
  chart.rows.forEach((row, i) => {
    const y = i * box.row;
    pen.fillStyle = Dash.colour("idle");
    pen.fillRect(box.left, y + gap, box.wide, chart.tall - 2 * gap);
    pen.fillStyle = Dash.colour("ink");
    pen.textAlign = "left";
    pen.fillText(Dash.fitted(pen, name(row), gutter - 10), 0, y + chart.tall / 2);
    pen.textAlign = "right";
    if (row[2]) pen.fillText(row[2], wide, y + chart.tall / 2);
  });
  pen.font = font(12);
  pen.textAlign = "center";
  for (const [row, begin, end, colour, label, , thin] of chart.bars) {
    const start = Math.max(begin, chart.begin), stop = Math.min(end, chart.end), long = (stop - start) * scale;
    const x = box.left + (start - chart.begin) * scale, y = row * box.row + (thin ? chart.tall - 1 : gap), tall = thin ? 6 : chart.tall - 2 * gap;
    pen.fillStyle = Dash.colour(colour);
    pen.fillRect(x, y, long > 3 ? long - .6 : long, tall);
    if (label && long > 14 && pen.measureText(label).width + 6 < long) {
      pen.fillStyle = Dash.colour({ data: "black", wait: "ink" }[colour] || "on_bar");
      pen.fillText(label, x + long / 2, y + tall / 2);
    }
  }
  pen.fillStyle = Dash.colour("soft");
  let free = -Infinity;
  for (const [value, said] of chart.ticks) {
    const half = pen.measureText(said).width / 2, x = Math.max(box.left + half, box.left + (value - chart.begin) * scale);
    if (x - half < free) continue;
    pen.fillText(said, x, chart.rows.length * box.row + 11);
    free = x + half + 10;
  }
  return box;
};

Dash.rows = title => {
  const legend = Dash.el("div.legend"), figure = Dash.el("div");
  let chart = null, box = null;
  const canvas = Dash.canvas(40, title, () => { if (chart) box = Dash.bars(canvas, chart); });
  canvas.addEventListener("pointermove", event => {
    const at = canvas.getBoundingClientRect(), x = event.clientX - at.left, row = Math.floor((event.clientY - at.top) / (box?.row || 1));
    const value = box ? chart.begin + (x - box.left) / box.wide * (chart.end - chart.begin) : NaN;
    const hit = box && chart.bars.findLast(bar => bar[0] === row && value >= bar[1] && value <= bar[2] && bar[5]);
    Dash.tip(hit ? hit[5] : "", event);
  });
  canvas.addEventListener("pointerleave", () => Dash.tip(""));
  figure.append(legend, canvas);
  figure.update = next => {
    chart = next;
    canvas.style.height = chart.rows.length * chart.row_height + (chart.ticks.length ? 20 : 2) + "px";
    const keys = Object.entries(chart.legend);
    legend.hidden = !keys.length;
    legend.replaceChildren(...keys.map(([colour, word]) => Dash.el("span", Dash.swatch(colour), word)));
    Dash.ask(canvas);
  };
  return figure;
};

Dash.tip = (said, event) => {
  const tip = document.getElementById("tip");
  tip.style.display = said ? "block" : "none";
  if (!said) return;
  tip.textContent = said;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 6)) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16) + "px";
};
addEventListener("scroll", () => Dash.tip(""), { passive: true });

Dash.table = ({ heads, rows, numeric }) => {
  const line = (tag, cells) => Dash.el("tr", ...cells.map((cell, i) =>
    Dash.el(tag + (i >= cells.length - numeric ? ".n" : ""), cell, tag === "th" ? { scope: "col" } : null)));
  return Dash.el("div.scroll", { tabindex: "0", role: "region", "aria-label": "Table" },
    Dash.el("table", Dash.el("thead", line("th", heads)), Dash.el("tbody", ...rows.map(row => line("td", row)))));
};
Dash.seconds = s => {
  const a = Math.abs(s);
  return a < 1e-3 ? `${(s * 1e6).toFixed(0)} µs` : a < 1 ? `${+(s * 1e3).toPrecision(3)} ms` : `${+s.toPrecision(3)} s`;
};
