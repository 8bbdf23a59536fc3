// The pages: all runs, one run, several side by side. Each asks the server for JSON again and again, and shows it.
// charts.js and run_page.js, which index.html has loaded, draw what a run's report has too.

const EVERY_MS = 2000;
const main = document.querySelector("main"), notice = document.querySelector("#notice");
let clockAhead_s = 0;

/** Ask `url()` again and again while the page is seen, and hand what has changed to `show`. isHurried: ask at once. */
function follow(url, show, isHurried = () => false) {
  let timer, before, round = 0;
  async function ask(mine) {
    let wait_ms = EVERY_MS;
    if (!document.hidden) {
      try {
        const asked = url(), answer = await fetch(asked);
        const found = await answer.json();
        if (mine !== round) return;
        clockAhead_s = Date.parse(answer.headers.get("date")) / 1000 - Date.now() / 1000;
        notice.textContent = answer.ok ? "" : found.error;
        const mark = asked + answer.headers.get("etag");
        if (answer.ok && mark !== before) { before = mark; show(found); }
        if (answer.ok && isHurried(found)) wait_ms = 50;
      } catch (error) {
        if (mine !== round) return;
        if (!(error instanceof TypeError || error instanceof SyntaxError)) throw error;
        notice.textContent = "The dashboard does not answer; what is shown may be old. Is fab dashboard still running?";
      }
    }
    timer = setTimeout(ask, wait_ms, mine);
  }
  const now = () => { clearTimeout(timer); ask(++round); };
  document.addEventListener("visibilitychange", () => document.hidden || now());
  now();
  return { now };
}

const span = seconds => seconds === null || seconds === undefined ? "" : seconds < 100 ? `${Math.round(seconds)} s`
  : seconds < 6000 ? `${Math.round(seconds / 60)} min` : seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h`
    : `${(seconds / 86400).toFixed(1)} d`;
const elapsed = run => run.wall_s === null && ACTIVE.includes(run.state) ? since(Date.parse(run.started) / 1000).replace(" ago", "") : span(run.wall_s);
const usd = value => value === null || value === undefined ? "" : `$${value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;
const ago = at_s => el("time", { "data-at": at_s, title: new Date(at_s * 1000).toISOString() }, since(at_s));
const since = at_s => `${span(Math.max(0, Date.now() / 1000 + clockAhead_s - at_s))} ago`;
const of = run => `${encodeURIComponent(run.place)}/${encodeURIComponent(run.id)}`;
const title = run => run.name ?? run.id;
const progress = run => run.total_steps ? el("span", { className: "progress" }, el("progress", { max: run.total_steps,
  value: Math.min(run.step, run.total_steps), "aria-label": "progress" }), `${number(run.step)} / ${number(run.total_steps)}`)
  : `step ${number(run.step)}`;
setInterval(() => {
  for (const time of document.querySelectorAll("time[data-at]")) time.textContent = since(Number(time.dataset.at));
}, 1000);

function allRuns() {
  const chosen = new Set(new URLSearchParams(location.search).getAll("run"));
  const sort = { by: "started", up: false };
  let found = null;
  const columns = [
    ["run", run => title(run)], ["state", run => run.state], ["progress", run => run.step],
    ["measured", run => run.headline?.value], ["time", run => run.wall_s], ["cost", run => run.cost_usd],
    ["started", run => run.started],
  ];
  const filter = el("input", { type: "search", placeholder: "Filter: name, job, state …", "aria-label": "Filter the runs",
    input: () => draw() });
  const compare = el("a", { className: "button" }), count = el("span", { className: "faint", role: "status" });
  const places = el("div"), list = el("div");
  fill(main, el("h1", { className: "quiet" }, "Runs"), el("div", { className: "controls" }, filter, compare, count), places, list);
  document.addEventListener("keydown", event => {
    if (event.key === "/" && document.activeElement !== filter) { filter.focus(); event.preventDefault(); }
  });

  function row(run) {
    const key = `${run.place}/${run.id}`, about = [run.name && run.id, run.job, run.platform, found.places.length > 1 && run.place];
    const cells = [
      [el("a", { href: `/run/${of(run)}`, "data-key": `run ${key}` }, title(run)),
        el("small", {}, about.filter(Boolean).join(" · "), run.problems ? el("b", { className: "warn" }, " · partly unreadable") : null)],
      [state(run.state)], [progress(run)], [run.figure], [elapsed(run)], [run.billed_usd === 0 && run.cost_usd ? "grant" : usd(run.billed_usd ?? run.cost_usd)], [ago(Date.parse(run.started) / 1000)],
    ];
    const box = el("input", { type: "checkbox", checked: chosen.has(key), "data-key": `box ${key}`,
      "aria-label": `Compare ${title(run)}`, change: event => { chosen[event.target.checked ? "add" : "delete"](key); choose(); } });
    return el("tr", {}, el("td", { className: "box" }, box),
      cells.map((cell, index) => el("td", { className: columns[index][0], "data-label": columns[index][0] }, cell)));
  }

  function choose() {
    const asked = new URLSearchParams([...chosen].map(key => ["run", key]));
    compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare: choose two or more";
    if (chosen.size > 1) compare.href = `/compare?${asked}`;
    else compare.removeAttribute("href");
    compare.setAttribute("aria-disabled", String(chosen.size < 2));
  }

  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = found.runs.filter(run => {
      const text = [run.id, run.name, run.job, run.state, run.framework, run.platform, run.place].join(" ").toLowerCase();
      return words.every(word => text.includes(word));
    });
    const value = columns.find(column => column[0] === sort.by)[1], way = sort.up ? 1 : -1;
    const order = (a, b) => a === b ? 0 : a === null || a === undefined ? 1 : b === null || b === undefined ? -1 : way * (a < b ? -1 : 1);
    shown.sort((a, b) => order(value(a), value(b)));
    count.textContent = found.runs.length === shown.length ? `${shown.length} runs` : `${shown.length} of ${found.runs.length} runs`;
    fill(places, ...found.places.map(place => place.error ? el("p", { className: "failure" }, `${place.name}: ${place.error}`)
      : place.is_read ? null : el("p", { className: "faint" }, `${place.name}: reading ${place.url} …`)),
    unread(found.places.flatMap(place => [...place.problems.map(each => `${each.run}: ${each.says}`),
      ...place.others.map(name => `${name}: is no run`), ...(place.more_others ? [`${place.more_others} more names that are no run's`] : [])])));
    const hasCost = found.runs.some(run => run.cost_usd !== null);
    const head = columns.map(([name]) => el("th", { scope: "col", className: name, "aria-sort": sort.by === name ? sort.up ? "ascending" : "descending" : null },
      el("button", { type: "button", "data-key": `sort ${name}`, click: () => {
        sort.up = sort.by === name ? !sort.up : ["run", "state"].includes(name);
        sort.by = name;
        draw();
      } }, name)));
    fill(list, found.runs.length ? el("table", { className: `runs${hasCost ? "" : " free"}` }, el("thead", {}, el("tr", {}, el("th", { className: "box" }), head)),
      el("tbody", {}, shown.map(row))) : el("p", {}, "No runs yet; make train or fab train --job flax_mlm starts one."));
  }
  choose();
  follow(() => "/api/runs", answer => { found = answer; draw(); }, answer => answer.places.some(place => !place.is_read && !place.error));
}

function oneRun(path) {
  const api = `/api/run/${path}`;
  const head = el("div"), hosts = el("div", { className: "hosts" }), settings = el("div"), samples = el("div");
  let curves = null, log = null, hasSamples = false;
  follow(() => api, found => {
    const { run } = found;
    document.title = run ? `${title({ ...run, id: found.id })}: ${run.state}` : found.id;
    if (!run) return fill(main, el("h1", {}, found.id), unread(found.problems), el("p", {}, el("a", { href: "/" }, "All runs")));
    const measured = found.measured.map(([name, text]) => [name, .../^(\S+(?: \S{1,8}(?=,|$))?),? ?(.*)$/s.exec(text).slice(1)]);
    const totals = [["step", number(run.step), run.total_steps && `of ${number(run.total_steps)}`], ["time", elapsed(run) || "–"],
      ...(run.goodput?.share == null ? [] : [["goodput", `${Math.round(100 * run.goodput.share)}%`, run.goodput.text]]),
      ...(run.cost_usd === null ? [] : [["cost so far", run.billed_usd === 0 ? "grant" : usd(run.billed_usd ?? run.cost_usd), run.cost]])];
    fill(head, el("p", { className: "faint" }, [run.job, run.platform, run.target, `${run.hosts} host${run.hosts > 1 ? "s" : ""}`].filter(Boolean).join(" · ")),
      el("h1", {}, run.name ?? found.id, " ", state(run.state)), run.name && el("p", { className: "faint" }, found.id),
      el("p", { className: "links" }, el("a", { href: `/?run=${encodeURIComponent(`${found.place}/${found.id}`)}`, "data-key": "compare" }, "Compare with …")),
      run.error && el("pre", { className: "failure" }, run.error), unread([...found.problems]),
      found.warnings.length ? el("details", { className: "unread" }, el("summary", { "data-key": "warned" }, `${found.warnings.length} warning(s)`), el("ul", {}, found.warnings.map(text => el("li", {}, text)))) : null,
      tiles([...totals, ...measured]));
    const columns = [...new Set(found.hosts.flatMap(host => Object.keys(host.sampled ?? {})))];
    fill(hosts, found.findings.map(text => el("p", { className: "warn" }, text)),
      table("Hosts", ["host", "state", "step", "heartbeat", ...columns, "says"], found.hosts.map(({ index, name, beat, sampled }) =>
        [`${index}${name ? `  ${name}` : ""}`, beat ? state(beat.state) : "no word yet", beat ? number(beat.step) : "", beat ? ago(beat.time) : "",
          ...columns.map(column => sampled?.[column] ?? ""), beat?.message ?? ""])));
    fill(settings, section("Settings", facts(found.settings)), found.about.map(draw));
    if (!curves) {
      curves = new Curves("Curves", [{ label: title(run), url: api }], follow);
      log = logOf(api, found);
      const sampled = new Curves("Hosts over time", [{ label: "", url: `${api}/hosts` }], follow, "time");
      fill(main, head, curves.element, samples, section("Hosts", hosts), sampled.element, log.element, settings);
    }
    log.update(found);
    if (found.has_samples && !hasSamples) { hasSamples = true; showSamples(api, samples); }
    return undefined;
  });
}

async function showSamples(api, parent) { fill(parent, (await (await fetch(`${api}/samples`)).json()).map(draw)); }

/** The end of a log, which grows; earlier pieces on demand. */
function logOf(api, found) {
  const PIECE = 65536;
  let first = 0, next = -PIECE, asked = 0, reader = null;
  const pre = el("pre", { className: "log", tabIndex: 0, role: "log", "aria-label": "Log" });
  const host = el("select", { "aria-label": "Host", change: () => anew() }), attempt = el("select", { "aria-label": "Attempt", change: () => anew() });
  const earlier = el("button", { type: "button", hidden: true, click: () => before() }, "Earlier lines");
  const url = (offset, to) => `${api}/log?${new URLSearchParams({ host: host.value || 0, attempt: attempt.value || 0, offset, ...(to === undefined ? {} : { to }) })}`;
  const option = (value, text) => el("option", { value }, text);

  function update({ hosts, attempts }) {
    if (host.length !== hosts.length) { const was = host.value; host.replaceChildren(...hosts.map(each => option(each.index, `host ${each.index}`))); host.value = was || 0; }
    if (attempt.length === attempts.length) return;
    attempt.replaceChildren(...attempts.map(each => option(each.attempt, `attempt ${each.attempt}`)));
    attempt.value = attempts.at(-1).attempt;
    anew();
  }
  function anew() { next = -PIECE; asked += 1; pre.replaceChildren(); earlier.hidden = true; reader?.now(); }
  async function before() {
    const to = first, mine = asked, from = Math.max(0, to - PIECE), answer = await (await fetch(url(from, to))).json();
    if (mine !== asked || answer.error) return;
    const height = pre.scrollHeight;
    pre.prepend(answer.text);
    pre.scrollTop += pre.scrollHeight - height;
    first = answer.offset;
    earlier.hidden = first === 0;
  }
  function add(answer) {
    if (answer.error) { pre.replaceChildren(answer.error); next = -PIECE; return; }
    if (next > answer.size) { anew(); return; }
    const isAtEnd = pre.scrollTop + pre.clientHeight > pre.scrollHeight - 30;
    if (next < 0) { first = answer.offset; earlier.hidden = first === 0; pre.replaceChildren(); }
    pre.append(answer.text);
    next = answer.next_offset;
    if (isAtEnd) pre.scrollTop = pre.scrollHeight;
  }
  update(found);
  reader = follow(() => url(next), add, answer => !answer.error && answer.text && answer.next_offset < answer.size);
  return { update, element: section("Log", el("div", { className: "controls" }, attempt, host, earlier), pre) };
}

function compareRuns() {
  const wanted = new URLSearchParams(location.search).getAll("run");
  const api = `/api/compare?${new URLSearchParams(wanted.map(key => ["run", key]))}`;
  const head = el("div"), tables = el("div");
  let curves = null;
  document.title = "Compare runs";
  if (wanted.length < 2) return fill(main, el("h1", {}, "Compare runs"), el("p", {}, el("a", { href: "/" }, "Choose two or more")));
  return follow(() => api, found => {
    const others = key => new URLSearchParams(wanted.filter(each => each !== key).map(each => ["run", each]));
    fill(head, el("h1", {}, "Compare runs"), el("ul", { className: "compared" }, found.runs.map((run, index) =>
      el("li", { className: `line-${index % 8}` }, el("a", { href: `/run/${of(run)}`, "data-key": `run ${index}` }, title(run)), " ", state(run.state), " ", el("span", { className: "faint" }, run.figure), " ",
        wanted.length > 2 && el("a", { href: `/compare?${others(`${run.place}/${run.id}`)}`, "data-key": `drop ${index}`, "aria-label": `Leave out ${title(run)}` }, "leave out")))),
    el("p", { className: "links" }, el("a", { href: `/?${others()}`, "data-key": "more" }, "Choose others")));
    const names = ["", ...found.runs.map(title)];
    const rows = part => found[part].map(row => [row.name, ...row.texts.map((text, index) => index === row.best ? el("b", { className: "good", title: "the best" }, `${text} ★`) : text)]);
    fill(tables, section("Measured", table("Measured", names, rows("metrics"))),
      section("Settings that differ", found.settings.length ? table("Settings that differ", names, rows("settings")) : el("p", {}, "None.")),
      section("About", table("About", names, rows("about"))));
    if (!curves) {
      curves = new Curves("Curves", found.runs.map(run => ({ label: title(run), url: `/api/run/${of(run)}` })), follow);
      fill(main, head, curves.element, tables);
    }
  });
}

const [, page, ...rest] = location.pathname.split("/");
if (page === "run") oneRun(rest.join("/"));
else if (page === "compare") compareRuns();
else allRuns();
