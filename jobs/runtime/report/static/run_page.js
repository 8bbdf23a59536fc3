// What a run's page shows, in the dashboard and in report.html. What a run says is put into text nodes only.

const ACTIVE = ["starting", "running", "saving", "joined", "stepping"];
const COLOURS = { done: "good", failed: "bad", hung: "bad", lost: "bad", stopped: "warn", preempted: "warn" };
const state = name => el("span", { className: `badge ${COLOURS[name] ?? (ACTIVE.includes(name) ? "active" : "plain")}` }, name);
const section = (text, ...children) => el("section", {}, el("h2", {}, text), ...children);
const table = (label, head, rows) => el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": label },
  el("table", {}, head && el("thead", {}, el("tr", {}, head.map(text => el("th", { scope: "col" }, text)))),
    el("tbody", {}, rows.map(cells => el("tr", {}, cells.map((cell, index) =>
      el(index ? "td" : "th", index ? {} : { scope: "row" }, cell)))))));

/** A text, or a list of texts and [text, style] pairs. */
const rich = value => Array.isArray(value) ? value.map(part => !Array.isArray(part) ? part
  : el(part[1] === "mark" ? "mark" : "b", { className: part[1] }, part[0])) : value ?? "–";
const facts = items => el("dl", { className: "settings" }, items.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
const tiles = items => el("dl", { className: "tiles" }, items.map(([name, text, more]) =>
  el("div", {}, el("dt", {}, name), el("dd", {}, text, more && el("small", {}, ` ${more}`)))));

function matrix({ title, labels, counts }) {
  const cell = (count, isRight, sum) => {
    const made = el("td", { className: isRight ? "right" : "wrong" }, count ? number(count) : "");
    made.style.setProperty("--share", sum ? count / sum : 0);
    return made;
  };
  return el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": title }, el("table", { className: "matrix" },
    el("thead", {}, el("tr", {}, el("td"), labels.map(label => el("th", { scope: "col" }, el("span", {}, label))), el("th", { scope: "col" }, "right"))),
    el("tbody", {}, counts.map((row, index) => {
      const sum = row.reduce((a, b) => a + b, 0);
      return el("tr", {}, el("th", { scope: "row" }, labels[index]), row.map((count, column) => cell(count, column === index, sum)),
        el("td", {}, sum ? `${Math.round(100 * row[index] / sum)}%` : "–"));
    }))));
}

const KINDS = {
  list: part => el("ul", {}, part.items.map(text => el("li", {}, text))),
  table: part => el("div", { className: "texts" }, table(part.title, part.head, part.rows.map(row => row.map(rich)))),
  facts: part => facts(part.items),
  log: part => el("pre", { tabIndex: 0 }, part.text),
  failure: part => el("pre", { className: "failure" }, part.text),
  matrix,
  pictures: part => el("div", { className: "pictures" }, part.items.map(each => el("figure", {},
    el("img", { src: `data:image/png;base64,${each.png}`, alt: `a picture of ${each.truth}` }), el("figcaption", {}, rich(each.caption))))),
};

/** A section as jobs.runtime.report.render makes it. */
const draw = part => section(part.title, part.note && el("p", { className: "faint" }, part.note), KINDS[part.kind](part));

/** Replace what `parent` holds; whatever had the focus has it again. */
function fill(parent, ...children) {
  const key = parent.contains(document.activeElement) && document.activeElement.dataset.key;
  parent.replaceChildren(...children.flat().filter(Boolean));
  if (key) parent.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}

function unread(problems) {
  if (!problems.length) return null;
  return el("details", { className: "unread", open: problems.length <= 5 },
    el("summary", { "data-key": "unread" }, `${problems.length} thing${problems.length > 1 ? "s" : ""} could not be read`),
    el("ul", {}, problems.map(text => el("li", {}, text))));
}
