// report.html: the page of a run that has its content in it.

const page = JSON.parse(document.querySelector("#content").textContent);

/** Answers what Curves asks, from the page. */
const inlined = answers => (url, show) => {
  const now = () => show(answers[new URLSearchParams(url().split("?")[1]).get("axis")]);
  queueMicrotask(now);
  return { now };
};

fill(document.querySelector("main"), el("p", { className: "faint" }, page.about),
  el("h1", {}, page.title, " ", state(page.outcome)), page.id && el("p", { className: "faint" }, page.id),
  el("p", { className: "lede" }, page.headline), page.meaning && el("p", {}, page.meaning), tiles(page.tiles),
  page.before.map(draw), new Curves("Curves", [{ label: page.title, url: "" }], inlined(page.curves)).element,
  page.samples.map(draw), new Curves("Hosts over time", [{ label: "", url: "" }], inlined({ time: page.hosts }), "time").element,
  page.after.map(draw));
