// The page: panels as they come, of the run that is chosen; drawn anew when one of them has changed.
"use strict";
(() => {
  const { el } = Dash, byId = id => document.getElementById(id), read = id => JSON.parse(byId(`${id}-data`).textContent);
  const facts = read("facts"), isLive = !facts.alone, drawn = new Map(), known = new Map();
  let chosen = 0, last = `${facts.boot}-${facts.number}`;
  const ORDER = ["beside-head", "beside-runs", "beside-loss", "beside-bits", "beside-target", "beside-", "tiles", "loss", "speed", "heat", "times", "pipeline", "collectives", "bytes", "memory", "expected", "peak", "replicas", "staleness", "members", "checkpoints", "faults", "logs", "whatif"];
  const rank = id => { const at = ORDER.findIndex(name => id.startsWith(name)); return at < 0 ? ORDER.length : at; };
  const asked = async (path, words, options) => {
    const answer = await fetch(`${path}?${new URLSearchParams(words)}`, options);
    if (!answer.ok) throw new Error(answer.status);
    return answer;
  };

  const makers = {
    tiles: () => {
      const list = el("dl");
      list.update = panel => list.replaceChildren(...panel.tiles.map(([name, value, more]) => el("div", el("dt", name), el("dd", value, el("small", more)))));
      return list;
    },
    sentence: () => { const body = el("div"); body.update = p => body.replaceChildren(el("h2", p.sentence), el("p", p.said)); return body; },
    text: () => { const body = el("div.said"); body.update = panel => body.replaceChildren(...panel.said.map(line => el("p", line))); return body; },
    lines: panel => charts(panel, Dash.curves),
    bars: panel => charts(panel, Dash.rows),
    heat: panel => {
      if (panel.tile) return Dash.heat(panel, async () => Uint8Array.from(atob(panel.tile), letter => letter.charCodeAt(0)).buffer);
      const source = (view, signal) => asked("/tile", { run: panel.run, ...rounded(view) }, { signal }).then(answer => answer.arrayBuffer());
      source.chain = (at, step) => asked("/chain", { run: panel.run, rank: at, step }).then(answer => answer.json());
      return Dash.heat(panel, source);
    },
    logs: panel => Dash.logs(words => asked("/logs", { run: panel.run, ...words }).then(answer => answer.json())),
    whatif: panel => Dash.whatif(panel, wanted => fetch("/price", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ run: panel.run, ...wanted }),
    }).then(answer => answer.json())),
  };
  const rounded = view => Object.fromEntries(Object.entries(view).map(([key, value]) => [key, typeof value === "number" ? Math.max(0, Math.round(value)) : value]));

  const charts = (panel, figure) => {
    const body = el("div"), figures = [], heads = [], note = el("p.note"), more = el("details", el("summary", "As a table"));
    let table = null;
    const fill = () => { if (table && (more.open || table.open)) { more.lastChild.tagName === "DIV" && more.lastChild.remove(); more.append(Dash.table(table)); } };
    more.addEventListener("toggle", fill);
    body.update = next => {
      next.charts.forEach((chart, i) => {
        if (!figures[i]) {
          figures[i] = figure(chart.title || next.title);
          heads[i] = el("h3");
          body.insertBefore(heads[i], note.parentNode ? note : null);
          body.insertBefore(figures[i], note.parentNode ? note : null);
        }
        heads[i].textContent = next.charts.length > 1 ? chart.title : "";
        heads[i].hidden = next.charts.length < 2;
        figures[i].update(chart, innerWidth < 640 ? 200 : 250);
      });
      for (let i = next.charts.length; i < figures.length; i++) { figures[i]?.remove(); heads[i]?.remove(); }
      figures.length = Math.min(figures.length, next.charts.length);
      note.textContent = next.note || "";
      table = next.table?.rows.length ? next.table : null;
      if (!note.parentNode) body.append(note, more);
      more.hidden = !table;
      if (table?.open && !next.charts.length) { more.hidden = true; body.querySelector(":scope > .scroll")?.remove(); body.insertBefore(Dash.table(table), note); }
      else { if (table?.open && !more.dataset.met) { more.open = true; more.dataset.met = 1; } fill(); }
    };
    return body;
  };

  const show = panel => {
    if (panel.kind === "head") { if (panel.run === chosen) head(panel); return; }
    const key = `${panel.run}/${panel.id}`;
    let node = drawn.get(key);
    if (node && node.kind !== panel.kind) { node.remove(); node = null; } // "no step yet" becomes a curve
    if (!node) {
      const inside = makers[panel.kind](panel), titleId = `t-${key.replace("/", "-")}`;
      node = el(`section.panel.${panel.kind}`, { "data-testid": panel.id });
      node.classList.toggle("half", !!panel.half);
      if (panel.title) node.append(el("h2", { id: titleId }));
      if (panel.title) node.setAttribute("aria-labelledby", titleId); else node.setAttribute("aria-label", panel.id);
      node.append(inside);
      if (panel.kind === "heat") node.append(el("p.note"));
      node.inside = inside;
      node.run = panel.run;
      node.kind = panel.kind;
      node.order = rank(panel.id);
      drawn.set(key, node);
      const after = [...byId("panels").children].find(other => other.order > node.order || (other.order === node.order && other.run > node.run));
      byId("panels").insertBefore(node, after || null);
    }
    node.hidden = panel.run >= 0 && panel.run !== chosen;
    node.classList.toggle("bad", !!panel.bad);
    const title = node.querySelector(":scope > h2");
    if (title && title.textContent !== panel.title) title.textContent = panel.title;
    if (panel.kind === "heat") node.lastChild.textContent = panel.note;
    if (!node.hidden) node.inside.update(panel);
  };

  const STATES = { going: "training", ended: "ended", failed: "failed", silent: "silent for a minute", away: "reconnecting …" };
  const state = word => { const node = byId("state"); if (node.dataset.state !== word) { node.dataset.state = word; node.textContent = STATES[word]; } };
  const ago = at => { const s = Date.now() / 1e3 - at; return s < 90 ? "just now" : s < 5400 ? `${Math.round(s / 60)} min ago` : s < 172800 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} days ago`; };
  const setText = (id, words) => { const node = byId(id); if (node.textContent !== words) node.textContent = words; };
  const head = panel => {
    setText("folder", [panel.title, panel.plan, panel.folder].filter(Boolean).join(" · "));
    setText("verdict", panel.sentence);
    setText("said", panel.said);
    if (isLive) document.title = `${panel.title}: step ${panel.step} · unisono dash`;
    if (byId("state").dataset.state !== "away") state(isLive ? panel.state : "ended");
    const proof = panel.proof, level = { same: "good", bounds: "good", wrong: "bad" }[proof.level] || "plain";
    const marks = [];
    if (panel.steps) marks.push(el("span.mark", el("b", `step ${panel.step.toLocaleString("en")} of ${panel.steps.toLocaleString("en")}`), el("progress", { max: panel.steps, value: panel.step, "aria-label": "Steps made" })));
    marks.push(el(`span.mark.${level}`, { "data-testid": "proof" }, el("i"), el("span", proof.said), proof.recipe ? el("code", `recipe ${proof.recipe}`) : null, proof.at ? el("span.soft", ago(proof.at)) : null));
    const [first, last] = panel.verdict.steps;
    if (last) marks.push(el("span.mark.plain", { "data-testid": "judged" }, el("span", `verdict of steps ${first.toLocaleString("en")} to ${last.toLocaleString("en")}`), panel.judged_at ? el("span.soft", ago(panel.judged_at)) : null));
    byId("marks").replaceChildren(...marks);
    why(panel.verdict);
  };
  const why = verdict => {
    const node = byId("why"), others = verdict.others.filter(other => other.cost_s > 0);
    node.hidden = !verdict.evidence.length && !others.length;
    const rows = others.map(other => [other.cause, Dash.seconds(other.cost_s), `${Math.round(100 * other.share)} %`, other.gain_s ? Dash.seconds(other.gain_s) : "–"]);
    node.lastChild.replaceChildren(
      el("ul", ...verdict.evidence.map(line => el("li", line))), verdict.change ? el("pre", verdict.change) : "",
      rows.length ? Dash.table({ heads: ["what else", "costs a step", "share", "would save"], rows, numeric: 3 }) : "");
  };

  const take = panels => { for (const panel of panels) known.set(`${panel.run}/${panel.id}`, panel); for (const panel of panels) show(panel); };
  const choose = run => {
    chosen = run;
    for (const button of byId("runs").children) button.setAttribute("aria-pressed", +button.dataset.run === run);
    for (const panel of known.values()) show(panel);
  };
  if (facts.runs.length > 1) facts.runs.forEach((name, run) => {
    const button = el("button", name, { type: "button", "data-run": run, "aria-pressed": run === 0 });
    button.addEventListener("click", () => choose(run));
    byId("runs").append(button);
  });

  const themes = ["light", "dark"], stored = (() => { try { return localStorage.getItem("theme"); } catch { return null; } })();
  const theme = word => {
    document.documentElement.dataset.theme = word;
    try { localStorage.setItem("theme", word); } catch { /* a file may keep nothing */ }
    Dash.all();
    for (const node of drawn.values()) node.inside.repaint?.();
  };
  if (themes.includes(stored)) document.documentElement.dataset.theme = stored;
  byId("theme").addEventListener("click", () => theme(Dash.isDark() ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { Dash.all(); for (const node of drawn.values()) node.inside.repaint?.(); });

  const listen = () => {
    const events = new EventSource(`/events?last=${last}`);
    events.addEventListener("panels", event => { last = event.lastEventId; Dash.last = last; take(JSON.parse(event.data)); });
    events.onopen = () => { if (byId("state").dataset.state === "away") { byId("state").dataset.state = ""; const panel = known.get(`${chosen}/head`); if (panel) head(panel); } };
    events.onerror = () => {
      state("away");
      if (events.readyState === EventSource.CLOSED) setTimeout(listen, 1000); // a browser gives up on a refusal
    };
  };
  take(read("panels"));
  if (isLive) listen();
})();
