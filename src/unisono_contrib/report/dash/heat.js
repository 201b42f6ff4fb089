// The heat map rank x step: a window of it comes as a tile of the server, at the size at which it is drawn.
"use strict";
Dash.tileOf = buffer => {
  const head = new DataView(buffer), u = at => head.getUint32(4 + 4 * at, true);
  const rows = u(0), columns = u(1), tile = { rows, columns, top: u(2), bottom: u(3), first: u(4), last: u(5) };
  tile.scale = head.getFloat32(28, true);
  tile.mean = head.getFloat32(32, true);
  tile.order = new Uint16Array(buffer.slice(36, 36 + 2 * (tile.bottom - tile.top + 1)));
  tile.cells = new Uint8Array(buffer, 36 + 2 * tile.order.length, rows * columns);
  return tile;
};

Dash.ramp = (stops, dark) => {
  const ends = dark ? [[25, 32, 52], ...stops.slice(0, -1).reverse()] : stops, table = new Uint8ClampedArray(4 * 256);
  for (let i = 0; i < 255; i++) {
    const at = i / 254 * (ends.length - 1), low = Math.min(Math.floor(at), ends.length - 2);
    for (let c = 0; c < 3; c++) table[4 * i + c] = ends[low][c] + (ends[low + 1][c] - ends[low][c]) * (at - low);
    table[4 * i + 3] = 255;
  }
  return table; // the last entry stays transparent: nothing is known there
};
Dash.isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";

Dash.heat = (panel, source) => {
  const { el } = Dash, body = el("div"), picture = document.createElement("canvas");
  let facts = panel, tile = null, view = null, byCost = true, follows = true, cell = null, asked = null, timer = 0, box = null, drag = null;
  const button = (words, act, pressed) => {
    const node = el("button", words, { type: "button" });
    if (pressed !== undefined) node.setAttribute("aria-pressed", pressed);
    node.addEventListener("click", () => act(node));
    return node;
  };
  const sort = button("Latest ranks on top", node => {
    byCost = !byCost;
    node.setAttribute("aria-pressed", byCost);
    fetchTile(0);
  }, true);
  const live = button("Follow the newest", () => { follows = true; whole(); }, true);
  const ramp = document.createElement("canvas"), scale = el("span"), readout = el("p.readout", { "aria-live": "polite" }), chain = el("div");
  ramp.className = "ramp";
  ramp.setAttribute("aria-hidden", "true");
  const canvas = Dash.canvas(120, "", () => draw());
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", "Heat map of lateness, ranks by steps. Arrow keys move, plus and minus zoom, Enter explains a cell, Home shows all.");
  body.append(el("div.tools", sort, live, button("−", () => zoom(2), undefined), button("+", () => zoom(.5)),
    button("All", () => { follows = true; whole(); }), el("span.keys", "in time", ramp, scale)), canvas, readout, chain);
  live.hidden = !source.chain; // a file has no newest
  body.querySelectorAll("button")[2].setAttribute("aria-label", "Zoom out");
  body.querySelectorAll("button")[3].setAttribute("aria-label", "Zoom in");

  let left = 52;
  const rows = () => view.bottom - view.top + 1, columns = () => view.last - view.first + 1;
  const whole = () => { view = { top: 0, bottom: Math.max(0, facts.ranks - 1), first: Math.min(1, facts.steps), last: facts.steps }; live.setAttribute("aria-pressed", true); fetchTile(0); };
  const fetchTile = (wait, fine = "") => { // fine: somebody moved the window, so steps that were passed over are read
    clearTimeout(timer);
    timer = setTimeout(async () => {
      asked?.abort();
      asked = new AbortController();
      const wide = Math.max(50, Math.round((canvas.clientWidth || 900) - left)), tall = Math.max(1, Math.round(canvas.clientHeight - 22));
      try {
        tile = Dash.tileOf(await source({ ...view, width: Math.min(wide, 1600), height: tall, sort: byCost ? "cost" : "rank", fine }, asked.signal));
      } catch { return; } // another window was asked for, or the server is away
      paint();
      Dash.ask(canvas);
    }, wait);
  };
  const paint = () => {
    const colours = Dash.ramp(facts.ramp, Dash.isDark()), words = new Uint32Array(colours.buffer);
    picture.width = Math.max(1, tile.columns);
    picture.height = Math.max(1, tile.rows);
    if (tile.cells.length) {
      const image = new ImageData(tile.columns, tile.rows), into = new Uint32Array(image.data.buffer);
      for (let i = 0; i < tile.cells.length; i++) into[i] = words[tile.cells[i]];
      picture.getContext("2d").putImageData(image, 0, 0);
    }
    ramp.width = 255;
    ramp.height = 1;
    ramp.getContext("2d").putImageData(new ImageData(colours.slice(0, 1020), 255, 1), 0, 0);
    scale.textContent = `${Dash.seconds(tile.scale)} late`;
  };
  const draw = () => {
    const { pen, wide, tall } = Dash.pen(canvas);
    left = Math.ceil(pen.measureText(`rank ${Math.max(facts.ranks - 1, 0)}`).width) + 9;
    box = { left, top: 0, wide: wide - left, tall: tall - 22 };
    pen.fillStyle = Dash.colour("idle");
    pen.fillRect(box.left, box.top, box.wide, box.tall);
    if (!tile || !view) return;
    const perRow = box.tall / rows(), perStep = box.wide / columns();
    pen.save();
    pen.beginPath();
    pen.rect(box.left, box.top, box.wide, box.tall);
    pen.clip();
    pen.imageSmoothingEnabled = false;
    pen.drawImage(picture, box.left + (tile.first - view.first) * perStep, box.top + (tile.top - view.top) * perRow,
      (tile.last - tile.first + 1) * perStep, (tile.bottom - tile.top + 1) * perRow);
    if (cell) {
      pen.strokeStyle = Dash.colour("accent_b");
      pen.lineWidth = 2;
      const tallness = Math.max(8, perRow), wideness = Math.max(8, perStep);
      pen.strokeRect(box.left + (cell.step - view.first + .5) * perStep - wideness / 2, box.top + (cell.row - view.top + .5) * perRow - tallness / 2, wideness, tallness);
    }
    pen.restore();
    pen.fillStyle = Dash.colour("soft");
    pen.textAlign = "right";
    const every = Math.max(1, Math.ceil(16 / perRow));
    const begin = Math.ceil(view.top) + (perRow < 13 ? Math.ceil((6.5 - perRow / 2) / perRow) : 0);
    for (let row = begin; row <= view.bottom; row += every)
      if (row >= tile.top && row - tile.top < tile.order.length) pen.fillText(`rank ${tile.order[row - tile.top]}`, box.left - 6, box.top + (row - view.top + .5) * perRow);
    pen.textAlign = "left";
    pen.fillText(`step ${Math.max(0, Math.round(view.first))}`, box.left, tall - 9);
    pen.textAlign = "right";
    pen.fillText(`${Math.round(view.last)}`, wide, tall - 9);
  };
  const under = event => {
    const at = canvas.getBoundingClientRect();
    return { row: Math.floor(view.top + (event.clientY - at.top - box.top) / box.tall * rows()), step: Math.floor(view.first + (event.clientX - at.left - box.left) / box.wide * columns()) };
  };
  const lateAt = ({ row, step }) => {
    const y = Math.floor((row - tile.top) * tile.rows / (tile.bottom - tile.top + 1)), x = Math.floor((step - tile.first) * tile.columns / (tile.last - tile.first + 1));
    if (y < 0 || x < 0 || y >= tile.rows || x >= tile.columns) return null;
    const shade = tile.cells[y * tile.columns + x];
    return shade === 255 ? null : (shade / 254) ** 2 * tile.scale;
  };
  const say = at => {
    const rank = tile?.order[at.row - tile.top];
    if (rank === undefined || at.step < 0) { readout.textContent = ""; return; }
    const late = lateAt(at), about = tile.columns < tile.last - tile.first + 1 ? "up to " : "";
    readout.textContent = `rank ${rank}, step ${at.step}: ${late === null ? "nothing known" : late < 5e-5 ? "in time" : `${about}${Dash.seconds(late)} late`}`;
  };
  const explain = async at => {
    const rank = tile?.order[at.row - tile.top];
    if (rank === undefined || !source.chain) return;
    cell = at;
    Dash.ask(canvas);
    chain.replaceChildren(el("p.note", "Reading what all ranks wrote of this step …"));
    try { chain.replaceChildren(Dash.chain(await source.chain(rank, at.step))); }
    catch { chain.replaceChildren(el("p.note", "The server does not answer.")); }
  };
  const clamp = () => {
    const r = Math.min(facts.ranks, Math.max(4, rows())), c = Math.min(facts.steps + 1, Math.max(8, columns()));
    view.top = Math.max(0, Math.min(facts.ranks - r, view.top));
    view.first = Math.max(0, Math.min(facts.steps + 1 - c, view.first));
    view.bottom = view.top + r - 1;
    view.last = view.first + c - 1;
    follows = view.last >= facts.steps - 1 && follows;
    live.setAttribute("aria-pressed", follows);
    Dash.ask(canvas);
    fetchTile(90, "1");
  };
  const zoom = (by, x = follows ? 1 : .5, y = byCost ? 0 : .5) => {
    const r = rows() * (facts.ranks > 24 ? by : 1), c = columns() * by;
    view.top = Math.round(view.top + (rows() - r) * y);
    view.first = Math.round(view.first + (columns() - c) * x);
    view.bottom = view.top + Math.round(r) - 1;
    view.last = view.first + Math.round(c) - 1;
    clamp();
  };
  canvas.addEventListener("wheel", event => {
    if (!view || !(event.ctrlKey || event.shiftKey)) return; // a plain wheel scrolls the page
    event.preventDefault();
    if (event.ctrlKey) {
      const at = canvas.getBoundingClientRect();
      zoom(event.deltaY > 0 ? 1.25 : .8, (event.clientX - at.left - box.left) / box.wide, (event.clientY - at.top) / box.tall);
    } else pan(Math.sign(event.deltaY || event.deltaX) * Math.ceil(columns() / 12), 0);
  }, { passive: false });
  const pan = (steps, ranks) => { view.first += steps; view.last += steps; view.top += ranks; view.bottom += ranks; clamp(); };
  canvas.addEventListener("pointerdown", event => { if (view && event.pointerType === "mouse") { drag = { x: event.clientX, y: event.clientY, view: { ...view }, moved: false }; canvas.setPointerCapture(event.pointerId); } });
  canvas.addEventListener("pointermove", event => {
    if (!view || !tile || !box) return;
    if (drag && Math.abs(event.clientX - drag.x) + Math.abs(event.clientY - drag.y) > 4) {
      drag.moved = true;
      const steps = Math.round((drag.x - event.clientX) / box.wide * columns()), ranks = Math.round((drag.y - event.clientY) / box.tall * rows());
      view = { top: drag.view.top + ranks, bottom: drag.view.bottom + ranks, first: drag.view.first + steps, last: drag.view.last + steps };
      clamp();
    } else say(under(event));
  });
  canvas.addEventListener("pointerup", () => { if (drag?.moved) canvas.addEventListener("click", e => e.stopImmediatePropagation(), { once: true, capture: true }); drag = null; });
  canvas.addEventListener("click", event => { if (view && box) explain(under(event)); });
  canvas.addEventListener("keydown", event => {
    if (!view || !tile) return;
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }, move = moves[event.key];
    if (move) {
      const by = event.shiftKey ? 10 : 1, at = cell || { row: view.top, step: view.last };
      cell = { row: Math.max(0, Math.min(facts.ranks - 1, at.row + by * move[0])), step: Math.max(0, Math.min(facts.steps, at.step + by * move[1])) };
      if (cell.row < view.top || cell.row > view.bottom) pan(0, cell.row < view.top ? cell.row - view.top : cell.row - view.bottom);
      if (cell.step < view.first || cell.step > view.last) pan(cell.step < view.first ? cell.step - view.first : cell.step - view.last, 0);
      say(cell);
      Dash.ask(canvas);
    } else if (event.key === "Enter" && cell) explain(cell);
    else if (event.key === "+" || event.key === "=") zoom(.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "Home") { follows = true; whole(); }
    else return;
    event.preventDefault();
  });
  body.repaint = () => { if (tile) { paint(); Dash.ask(canvas); } };
  body.update = next => {
    const grown = !view || next.ranks !== facts.ranks, steps = facts.steps;
    facts = next;
    canvas.style.height = Math.max(4 * 14, Math.min(420, facts.ranks * 26)) + 22 + "px";
    if (grown) whole();
    else if (follows) {
      if (view.first > 1) { view.first += next.steps - steps; view.last = next.steps; } else view.last = next.steps;
      fetchTile(0);
    } else fetchTile(0);
  };
  return body;
};

Dash.chain = facts => {
  const { el } = Dash, links = facts.links.map(link => el("li", el("b", Dash.seconds(link.seconds)), ` ${link.said}`));
  const rows = facts.ranks.map(([rank, at, waited]) => [`rank ${rank}`, Dash.seconds(at), Dash.seconds(waited)]);
  return el("div.chain", el("h3", facts.place ? `${facts.said} (${facts.place})` : facts.said),
    links.length ? el("ol", ...links) : el("p.note", "Nothing took this rank longer than the others."),
    rows.length ? Dash.table({ heads: ["at that call", "came after the first", "waited"], rows, numeric: 2 }) : null);
};
