"use strict";
(() => {
  const STORE = "granikv-api-key";
  const STATE = location.pathname.replace(/\/$/, "") + "/state";
  const EVERY_MS = 1000;
  const WINDOW_S = 120;
  const CHANCE_TOKENS = 8;
  const REGIMES = [
    ["uniform", "each request alone (stock)"],
    ["cascade", "shared, few readers (cascade)"],
    ["batched_gemm", "shared, many readers (batched)"],
  ];
  const COLOUR = { uniform: "--uniform", cascade: "--cascade", batched_gemm: "--batched" };
  const at = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (n) => n.toLocaleString("en");
  let last = null;
  let drawn = {};

  function bytes(n) {
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let i = 0;
    while (n >= 1000 && i < units.length - 1) { n /= 1000; i += 1; }
    return (i === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)) + " " + units[i];
  }

  function count(n, one, many) { return number(n) + " " + (n === 1 ? one : many || one + "s"); }

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function swatch(name) {
    const box = make("i");
    box.style.background = `var(${name})`;
    return box;
  }

  // Rebuilds a part only when what it shows has changed, so that a selection or a hover in it survives.
  function part(name, value, build) {
    const text = JSON.stringify(value);
    if (drawn[name] === text) return;
    drawn[name] = text;
    build(value);
  }

  function tiles(state) {
    const recent = state.seconds.filter((s) => s.second > state.now - 6);
    const rate = recent.reduce((sum, s) => sum + s.bytes_not_reread, 0) / 5;
    at("saved").textContent = bytes(state.counters.bytes_not_reread);
    at("saved-rate").textContent = rate > 0 ? bytes(rate) + " a second now" : "none just now";
    const alone = state.forest.private_requests;
    at("requests").textContent = number(state.requests);
    at("sharing").textContent = state.requests === 0 ? "idle" : number(state.requests - alone) + " share a prefix";
    let passes = 0;
    let shared = 0;
    for (const second of state.seconds.filter((s) => s.second > state.now - 61)) {
      for (const [regime, n] of Object.entries(second.passes)) {
        passes += n;
        if (regime !== "uniform") shared += n;
      }
    }
    at("share").textContent = passes === 0 ? "–" : Math.round((100 * shared) / passes) + " %";
    at("share-of").textContent = passes === 0 ? "no steps in the last minute" : `${number(shared)} of ${number(passes)}, last minute`;
    const hot = flat(pieces(state.forest.nodes)).filter((piece) => piece.hot).length;
    at("hot").textContent = number(hot);
    at("hot-of").textContent = `${count(state.pool.hot, "token")}, ${percent(state.pool.hot, state.pool.slots)} of memory`;
  }

  function percent(n, of) {
    const value = (100 * n) / of;
    return (value > 0 && value < 1 ? "below 1" : Math.round(value)) + " %";
  }

  // What a person takes for one piece of prompt may be several nodes: a long prompt is read in chunks, and a request
  // that left may have split it. Nodes one below the other with the same requests are shown as one. A COLD node of a few
  // tokens is chance ("What ..."): its requests count as going on alone.
  function pieces(nodes) {
    const byNode = new Map(nodes.map((n) => [n.node, { ...n, runs: n.hot ? [[n.start, n.start + n.tokens]] : [], below: [] }]));
    const top = [];
    for (const piece of byNode.values()) (byNode.get(piece.parent) || { below: top }).below.push(piece);
    for (const piece of [...byNode.values()].reverse()) {
      for (const small of piece.below.filter((b) => !b.hot && b.tokens < CHANCE_TOKENS && b.below.length === 0)) {
        piece.below.splice(piece.below.indexOf(small), 1);
        piece.private_requests += small.private_requests;
        piece.private_tokens += small.private_tokens + small.members * small.tokens;
      }
      const only = piece.below[0];
      if (piece.below.length === 1 && only.members === piece.members && only.hot === piece.hot && piece.private_requests === 0) {
        const { tokens, private_requests, private_tokens, runs, below } = only;
        Object.assign(piece, { tokens: piece.tokens + tokens, private_requests, private_tokens, below });
        for (const [start, stop] of runs) {
          const end = piece.runs[piece.runs.length - 1];
          if (end && end[1] === start) end[1] = stop;
          else piece.runs.push([start, stop]);
        }
      }
    }
    return top.filter((p) => p.hot || p.tokens >= CHANCE_TOKENS || p.below.length > 0);
  }

  function flat(list) { return list.flatMap((piece) => [piece, ...flat(piece.below)]); }

  function forest(value) {
    const root = at("forest");
    root.replaceChildren();
    const top = pieces(value.nodes);
    const longest = Math.max(1, ...flat(top).map((piece) => piece.tokens));
    const hang = (piece, place) => {
      const element = row(piece, longest);
      const below = make("div", "children");
      element.append(below);
      place.append(element);
      for (const next of piece.below) hang(next, below);
    };
    for (const piece of top) hang(piece, root);
    if (top.length === 0) root.append(make("p", "empty", "Nothing is shared at this moment. Send two requests whose prompts begin alike."));
    if (value.omitted > 0) root.append(make("p", "alone", `and ${number(value.omitted)} more`));
    if (value.private_requests > 0) {
      root.append(make("p", "alone", `${count(value.private_requests, "request shares", "requests share")} nothing (${count(value.private_tokens, "token")})`));
    }
  }

  function row(node, longest) {
    const element = make("div", "node" + (node.hot ? " hot" : ""));
    element.dataset.node = node.node;
    const head = make("div", "head");
    head.append(make("span", "badge", node.hot ? "HOT" : "not HOT"));
    head.append(make("strong", "", count(node.tokens, "token")));
    head.append(make("span", "", node.members === 0 ? "kept, nobody uses it now" : "used by " + count(node.members, "request")));
    if (node.hot) head.append(make("span", "sub", "slots " + node.runs.map(([from, to]) => `${number(from)} to ${number(to - 1)}`).join(", ")));
    const bar = make("div", "bar");
    bar.style.width = (100 * node.tokens) / longest + "%";
    element.append(head, bar);
    if (node.text) element.append(make("p", "words", `“${node.text.trim()} …”`));
    if (node.private_requests > 0) {
      const [goes, own] = node.private_requests === 1 ? ["request goes", "its"] : ["requests go", "their"];
      element.append(make("p", "alone", `${number(node.private_requests)} ${goes} on alone from here, with ${count(node.private_tokens, "token")} of ${own} own`));
    }
    return element;
  }

  // -- the map of the slots -------------------------------------------------------------------------------------------

  function fit(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = Math.max(1, Math.round(width * ratio));
    canvas.height = Math.max(1, Math.round(height * ratio));
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    return [pen, width];
  }

  function grid() {
    const width = at("map").clientWidth;
    const columns = width < 500 ? 30 : 60;
    const rows = Math.ceil(last.slot_map.hot.length / columns);
    const side = width / columns;
    return { columns, rows, side, tall: Math.min(side, 20) };
  }

  function map(state) {
    const { columns, rows, side, tall } = grid();
    const [pen] = fit(at("map"), rows * tall);
    const cells = state.slot_map;
    for (let i = 0; i < cells.hot.length; i += 1) {
      const size = Math.min(cells.cell_slots, state.pool.slots - i * cells.cell_slots);
      const parts = [["--hot", cells.hot[i]], ["--cold", size - cells.hot[i] - cells.free[i]], ["--free", cells.free[i]]];
      const left = (i % columns) * side;
      const top = Math.floor(i / columns) * tall;
      let x = left;
      for (const [name, n] of parts) {
        // A single slot in use must be seen, however long its stretch.
        const wide = n === 0 ? 0 : Math.max(1.5, ((side - 1) * n) / size);
        pen.fillStyle = colour(name);
        pen.fillRect(x, top, Math.min(wide, left + side - 1 - x), tall - 1);
        x += wide;
      }
    }
    const pool = state.pool;
    const cold = pool.slots - pool.hot - pool.free;
    legend("map-legend", [
      ["--hot", `HOT: shared, in one run (${number(pool.hot)})`],
      ["--cold", `COLD: everything else kept (${number(cold)})`],
      ["--free", `free (${number(pool.free)})`],
    ]);
    at("map").setAttribute("aria-label", `${number(pool.hot)} slots HOT, ${number(cold)} COLD, ${number(pool.free)} free`);
    at("map-text").textContent = `${number(pool.slots)} slots; longest free run ${number(pool.largest_free_run)}. One box is ${count(cells.cell_slots, "slot")}.`;
  }

  function legend(id, entries) {
    part(id, entries, () => at(id).replaceChildren(...entries.map(([name, text]) => {
      const item = make("li");
      item.append(swatch(name), text);
      return item;
    })));
  }

  at("map").addEventListener("pointermove", (event) => {
    if (!last) return;
    const { columns, side, tall } = grid();
    const box = at("map").getBoundingClientRect();
    const i = Math.floor((event.clientY - box.top) / tall) * columns + Math.floor((event.clientX - box.left) / side);
    const cells = last.slot_map;
    if (i < 0 || i >= cells.hot.length) return;
    const first = i * cells.cell_slots + 1;
    const size = Math.min(cells.cell_slots, last.pool.slots - first + 1);
    at("map").title = `slots ${number(first)} to ${number(first + size - 1)}: ${number(cells.hot[i])} HOT, `
      + `${number(size - cells.hot[i] - cells.free[i])} COLD, ${number(cells.free[i])} free`;
  });

  // -- steps ----------------------------------------------------------------------------------------------------------

  function chart(state) {
    const height = window.innerWidth <= 760 ? 100 : 120;
    const [pen, width] = fit(at("chart"), height);
    const total = (s) => Object.values(s.passes).reduce((a, b) => a + b, 0);
    const most = Math.max(1, ...state.seconds.map(total));
    const step = width / WINDOW_S;
    for (const second of state.seconds) {
      const x = (second.second - (Math.floor(state.now) - WINDOW_S + 1)) * step;
      let y = height;
      for (const [regime] of REGIMES) {
        const tall = (height * (second.passes[regime] || 0)) / most;
        pen.fillStyle = colour(COLOUR[regime]);
        pen.fillRect(x, y - tall, Math.max(1, step - 1), tall);
        y -= tall;
      }
    }
    at("chart-max").textContent = state.seconds.length ? `highest bar: ${count(most, "step")} a second` : "no steps yet";
    at("chart").setAttribute("aria-label", `forward passes per second, at most ${most}`);
    legend("chart-legend", REGIMES.map(([regime, text]) => [COLOUR[regime], text]));
  }

  function decisions(state) {
    at("decisions").tBodies[0].replaceChildren(...state.decisions.slice(0, 12).map((run) => {
      const line = make("tr");
      const how = make("td", "how");
      const name = REGIMES.find(([regime]) => regime === run.regime);
      how.append(swatch(COLOUR[run.regime] || "--uniform"), name ? name[1].replace(/ \(.*/, "") : run.regime);
      const why = make("td", "why", plain(state.words[run.reason] || run.reason));
      why.title = run.reason;
      line.append(make("td", "when", ago(state.now - run.last)), how, why);
      line.append(make("td", "n", number(run.passes)), make("td", "n req", number(run.requests)));
      return line;
    }));
  }

  const plain = (text) => text.replaceAll("`", "");

  function ago(seconds) {
    if (seconds < 2) return "now";
    if (seconds < 90) return Math.round(seconds) + " s ago";
    if (seconds < 5400) return Math.round(seconds / 60) + " min ago";
    return Math.round(seconds / 3600) + " h ago";
  }

  function declines(state) {
    const rows = Object.entries(state.declines).filter(([, n]) => n > 0);
    part("declines", rows, () => at("declines").replaceChildren(...(rows.length ? rows.map(([reason, n]) => {
      const item = make("li");
      item.title = reason;
      item.append(make("strong", "", number(n) + " × "), plain(state.words[reason] || reason));
      return item;
    }) : [make("li", "empty", "None so far.")])));
  }

  function counters(state) {
    const rows = Object.entries(state.counters);
    for (const [regime, reasons] of Object.entries(state.passes)) {
      for (const [reason, n] of Object.entries(reasons)) rows.push([`steps ${regime}, ${reason}`, n]);
    }
    part("counters", rows, () => at("counters").tBodies[0].replaceChildren(...rows.map(([name, n]) => {
      const line = make("tr");
      line.append(make("td", "", name.replaceAll("_", " ")), make("td", "n", number(n)));
      return line;
    })));
  }

  // -- the loop -------------------------------------------------------------------------------------------------------

  function status(name, text) {
    document.body.classList.toggle("stale", name === "away");
    if (at("status").dataset.state !== name) at("status").dataset.state = name;
    const label = at("status").querySelector(".text");
    if (label.textContent !== text) label.textContent = text;
  }

  function show(state) {
    at("model").textContent = state.model.split("/").pop();
    at("model").title = state.model;
    at("version").textContent = `GraniKV ${state.version} on ${state.stock_backend}, up since ${new Date(state.started * 1000).toLocaleString()}`;
    at("json").href = STATE;
    at("json").hidden = sessionStorage.getItem(STORE) !== null; // a link cannot carry the key
    last = state;
    tiles(state);
    part("forest", state.forest, forest);
    map(state);
    chart(state);
    decisions(state);
    declines(state);
    counters(state);
    if (state.age_s > 3) status("busy", `scheduler busy, ${Math.round(state.age_s)} s old`);
    else status("live", "live");
  }

  async function look() {
    const key = sessionStorage.getItem(STORE);
    try {
      const reply = await fetch(STATE, { cache: "no-store", headers: key ? { Authorization: "Bearer " + key } : {} });
      if (reply.status === 401) { location.reload(); return; }
      if (!reply.ok) throw new Error(String(reply.status));
      show(await reply.json());
    } catch {
      status("away", "server away, trying again");
    }
    setTimeout(look, document.hidden ? 5 * EVERY_MS : EVERY_MS);
  }

  window.addEventListener("resize", () => { if (last) { map(last); chart(last); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (last) { map(last); chart(last); } });
  look();
})();
