// Panels that ask: logs with their filters, and the what-if of the planner.
"use strict";
Dash.logs = ask => {
  const { el } = Dash, body = el("div"), list = el("div.log", { tabindex: "0", role: "log", "aria-label": "Lines of logs" });
  const rank = el("input", { type: "number", min: "0", placeholder: "all", inputmode: "numeric" });
  const level = el("select", ...["output", "note", "warning", "error"].map(word => el("option", word === "output" ? "everything" : word === "error" ? "errors" : `${word}s and worse`, { value: word })));
  const text = el("input", { type: "search", placeholder: "words in the line" }), count = el("p.note", { role: "status" });
  rank.style.width = "6em";
  const form = el("form", el("label", "Rank", rank), el("label", "Level", level), el("label.wide", "Text", text));
  form.addEventListener("submit", event => event.preventDefault());
  let timer = 0;
  const load = () => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      let answer;
      try { answer = await ask({ rank: rank.value, level: level.value, text: text.value }); } catch { return; }
      const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      const line = one => el(`p.${one.level}`, el("time", one.at ? new Date(one.at * 1e3).toTimeString().slice(0, 8) : ""), el("em", one.rank < 0 ? "run" : `rank ${one.rank}`), el("span", one.text));
      list.replaceChildren(...(answer.lines.length ? answer.lines.map(line) : [el("p.empty", "No line of the log passes this filter.")]));
      count.textContent = answer.count > answer.lines.length ? `The latest ${answer.lines.length} of ${answer.count} lines.` : `${answer.count} line${answer.count === 1 ? "" : "s"}.`;
      if (atEnd) list.scrollTop = list.scrollHeight;
    }, 120);
  };
  for (const field of [rank, level, text]) field.addEventListener("input", load);
  body.append(form, list, count);
  body.update = load;
  return body;
};

Dash.whatif = (panel, ask) => {
  const { el } = Dash, body = el("div.ask"), form = el("form"), answer = el("div.answer", { "aria-live": "polite" });
  let timer = 0, start = null;
  const sliders = {}, add = (name, words, values, say) => {
    const shown = el("output"), input = el("input", { type: "range", min: 0, max: values.length - 1, step: 1, "aria-label": words });
    const show = () => { shown.textContent = say(values[+input.value]); input.setAttribute("aria-valuetext", shown.textContent); };
    input.addEventListener("input", () => { show(); load(); });
    sliders[name] = { values, set: value => { input.value = Math.max(0, values.indexOf(value)); show(); }, get: () => values[+input.value] };
    form.append(el("label", words, shown, input));
  };
  add("ranks", "Ranks", panel.ranks, n => `${n}`);
  add("link", "Link between ranks", panel.links, n => n === 1 ? "as it is" : n > 1 ? `${n} times as fast` : `${+(1 / n).toPrecision(2)} times slower`);
  add("batch", "Global batch, samples", panel.batches, n => `${n}`);
  const reset = el("button", "As the run is", { type: "button" });
  reset.addEventListener("click", () => { for (const [name, value] of Object.entries(start)) sliders[name].set(value); load(); });
  form.append(reset);
  form.addEventListener("submit", event => event.preventDefault());
  const load = () => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      const wanted = Object.fromEntries(Object.entries(sliders).map(([name, slider]) => [name, slider.get()]));
      let said;
      try { said = await ask(wanted); } catch { answer.replaceChildren(el("p.note", "The server does not answer.")); return; }
      if (said.error) { answer.replaceChildren(el("p", said.error), said.try ? el("p.note", `Try ${said.try}`) : null); return; }
      answer.replaceChildren(el("p.big", said.headline), ...said.lines.map(line => el("p", line)), el("p.note", said.note));
    }, 150);
  };
  start = panel.now;
  for (const [name, value] of Object.entries(start)) sliders[name].set(value);
  body.append(form, answer);
  body.update = () => { if (!answer.childNodes.length) load(); };
  return body;
};
