// Curves of one run or several, drawn by uPlot. What a run says is put into text nodes only.

const LINES = 8;
const UNITS = [["s", 1, 180], ["min", 60, 10800], ["h", 3600, 259200], ["days", 86400, Infinity]];
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** An element; attributes that are functions are listeners, children that are no nodes become text. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (name in made && name !== "list") made[name] = value;
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return made;
}

const number = value => value === null || value === undefined ? "–"
  : Math.abs(value) >= 1e9 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : exact.format(value);

const tick = value => value && Math.abs(value) < 1e-3 ? Number(value.toPrecision(3)).toExponential() : compact.format(value);

/** The charts of `sources` ({label, url}), and what chooses their axes. `follow` asks again and again. */
class Curves {
  constructor(heading, sources, follow, axis = "step") {
    this.sources = sources;
    this.state = { axis, smooth: true, log: false, span: null };
    this.answers = sources.map(() => null);
    this.charts = new Map();
    this.axes = el("span", { className: "group" });
    this.whole = el("button", { type: "button", hidden: true, click: () => this.zoom(null) }, "Show all");
    this.said = el("span", { className: "faint" }, "reading …");
    this.grid = el("div", { className: "charts" });
    const box = (name, text) => el("label", {}, el("input", { type: "checkbox", checked: this.state[name],
      change: event => { this.state[name] = event.target.checked; this.draw(true); } }), text);
    this.element = el("section", { "aria-label": heading, hidden: true }, el("h2", {}, heading),
      el("div", { className: "controls" }, this.axes, box("smooth", "smooth"), box("log", "log scale"), this.whole,
        this.said), this.grid);
    this.follows = sources.map((source, index) => follow(() => `${source.url}/curves?${this.asked()}`,
      answer => { this.answers[index] = answer; this.draw(false); }, answer => !answer.is_complete));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(true));
    new ResizeObserver(() => { for (const chart of this.charts.values()) chart.resize(); }).observe(this.grid);
  }

  asked() {
    const { axis, span } = this.state, asked = new URLSearchParams({ axis });
    // A few points for each pixel of a chart: twice as many could not be told apart.
    asked.set("points", Math.min(1200, Math.max(200, 2 * Math.round(this.grid.clientWidth / this.sources.length ** 0.5))));
    if (span) { asked.set("from", span[0].toFixed(6)); asked.set("to", span[1].toFixed(6)); }
    return asked;
  }

  /** Show a part of the axis, finer than before; null: all of it. */
  zoom(span) {
    this.state.span = span;
    this.whole.hidden = span === null;
    for (const each of this.follows) each.now();
  }

  choose(axis) {
    this.state.axis = axis;
    this.zoom(null);
  }

  draw(isAnew) {
    const there = this.answers.filter(Boolean);
    if (!there.length) return;
    const axes = Object.fromEntries(there.flatMap(answer => Object.entries(answer.axes)));
    const wanted = Object.entries(axes).map(([name, text]) => el("button", { type: "button", "aria-pressed":
      String(name === this.state.axis), click: () => this.choose(name) }, text));
    if (wanted.map(each => each.textContent).join() !== [...this.axes.children].map(each => each.textContent).join())
      this.axes.replaceChildren(...wanted);
    for (const button of this.axes.children)
      button.setAttribute("aria-pressed", String(button.textContent === axes[this.state.axis]));
    const lines = there.reduce((sum, answer) => sum + answer.lines, 0);
    this.grid.dataset.lines = lines;
    this.element.hidden = !lines && there.every(answer => answer.is_complete && !answer.problems.length);
    this.said.textContent = [there.every(answer => answer.is_complete) ? `${compact.format(lines)} points a metric` :
      `reading: ${compact.format(lines)} points so far …`, ...new Set(there.flatMap(answer => answer.problems))].join("; ");
    const groups = new Map();
    this.answers.forEach((answer, index) => {
      if (!answer || answer.axis !== this.state.axis) return;
      for (const series of answer.series) {
        const key = this.sources.length > 1 ? series.name : series.chart;
        if (!groups.has(key)) groups.set(key, []);
        groups.get(key).push({ ...series, index, marks: answer.marks });
      }
    });
    const last = Math.max(0, ...[...groups.values()].flat().map(series => series.x.at(-1) ?? 0));
    const unit = this.state.axis === "time" ? UNITS.find(each => last <= each[2]) : [axes[this.state.axis], 1];
    for (const [key, chart] of this.charts)
      if (isAnew || !groups.has(key)) { chart.remove(); this.charts.delete(key); }
    for (const [key, group] of groups) {
      if (!this.charts.has(key)) this.charts.set(key, new Chart(this, this.charts.size === 0 && !group[0].heading));
      this.charts.get(key).show(group, unit);
    }
    this.grid.append(...[...groups.keys()].map(key => this.charts.get(key).element)
      .filter((element, index) => this.grid.children[index] !== element));
  }
}

class Chart {
  constructor(curves, isFirst) {
    this.curves = curves;
    this.height = isFirst ? 300 : 190;
    this.plot = el("div", { className: "plot", tabIndex: 0, role: "group", keydown: event => this.key(event) });
    this.title = el("figcaption");
    this.element = el("figure", { className: isFirst ? "first" : "" }, this.title, this.plot);
  }

  show(group, unit) {
    const { smooth, log } = this.curves.state, faint = css("--faint");
    const [axis, factor] = unit, several = this.curves.sources.length > 1;
    const main = several ? group[0] : group.find(series => series.name === series.chart) ?? group[0];
    const title = (main.heading ?? main.title) + (main.unit ? `, ${main.unit}` : "");
    this.title.textContent = title;
    this.plot.setAttribute("aria-label", `Chart of ${title} over ${axis}: arrow keys read it, + and - zoom, Escape shows all`);
    group.sort((a, b) => (b.name === b.chart) - (a.name === a.chart) || a.index - b.index);
    this.marks = several ? [] : group[0].marks.map(([x, text]) => [x / factor, text]);
    const tables = [], colours = [faint], series = [{ label: axis, value: (_, value) => value === null ? "–" : number(value) }];
    const positive = values => log ? values.map(value => value > 0 ? value : null) : values;
    for (const [order, each] of group.entries()) {
      const colour = css(`--line-${(several ? each.index : order) % LINES}`);
      const label = (several ? this.curves.sources[each.index].label : each.title) + (each.gaps ? ` (${each.gaps} not finite)` : "");
      const dash = several && each.index >= LINES ? [6, 4] : undefined;
      const isSmoothed = smooth && each.smooth !== null, x = each.x.map(value => value / factor);
      tables.push([x, positive(each.y)]);
      colours.push(colour);
      series.push({ label, stroke: isSmoothed ? `${colour}55` : colour, width: isSmoothed ? 1 : 1.8, dash, spanGaps: false,
        points: { show: x.length <= 60, size: isSmoothed ? 3 : 5, fill: colour }, value: (_, value) => number(value) });
      if (isSmoothed) {
        tables.push([x, positive(each.smooth)]);
        colours.push(colour);
        series.push({ label: `${label}, smoothed`, stroke: colour, width: 2, dash, class: "quiet", points: { show: false } });
      }
      if (each.level && !several) {
        tables.push([[x[0], x.at(-1)], positive([each.level.value, each.level.value])]);
        colours.push(faint);
        series.push({ label: each.level.title, stroke: faint, width: 1, dash: [6, 4], spanGaps: true, points: { show: false }, value: () => "" });
      }
    }
    const data = tables.length ? uPlot.join(tables) : [[]], shape = JSON.stringify([series.map(each => [each.label, each.stroke, each.points?.show]), log, axis]);
    this.factor = factor;
    if (this.uplot && this.shape === shape) { this.uplot.setData(data); return this.reach(); }
    this.uplot?.destroy();
    this.shape = shape;
    const rule = css("--rule"), font = "12px system-ui, sans-serif";
    const side = { stroke: faint, font, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1, size: 4 } };
    this.uplot = new uPlot({
      width: this.width(), height: this.height, series, cursor: { sync: { key: "curves" }, drag: { setScale: false }, y: false },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [{ ...side, size: 30, values: (_, ticks) => ticks.map(value => compact.format(value)) },
        { ...side, size: 56, values: (_, ticks) => ticks.map(value => value === null ? "" : tick(value)) }],
      legend: { markers: { width: 0, fill: (_, index) => colours[index] } },
      hooks: { setSelect: [plot => this.select(plot)], draw: [plot => this.mark(plot, faint)] },
    }, data, this.plot);
    return this.reach();
  }

  /** Draw the part of the axis that was chosen. */
  reach() {
    const [min, max] = this.curves.state.span?.map(value => value / this.factor) ?? [];
    if (max > min) this.uplot.setScale("x", { min, max });
  }

  /** A line where an attempt went on. */
  mark(plot, colour) {
    const { ctx, bbox } = plot, isFew = this.marks.length <= 4;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    for (const [x, text] of this.marks) {
      const at = plot.valToPos(x, "x", true);
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke();
      ctx.textAlign = at > bbox.left + 0.75 * bbox.width ? "right" : "left";
      if (isFew) ctx.fillText(` ${text} `, at, bbox.top + 12 * devicePixelRatio);
    }
    ctx.restore();
  }

  width() { return Math.max(200, this.plot.clientWidth || this.curves.grid.clientWidth || 600); }

  resize() { if (this.uplot && this.uplot.width !== this.width()) this.uplot.setSize({ width: this.width(), height: this.height }); }

  select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.curves.zoom([left, left + width].map(at => plot.posToVal(at, "x") * this.factor));
  }

  key(event) {
    const plot = this.uplot, xs = plot?.data[0] ?? [];
    const at = plot?.cursor.idx ?? xs.length - 1;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: xs.length - 1 }[event.key];
    if (to !== undefined && xs.length) {
      const x = xs[Math.min(xs.length - 1, Math.max(0, to))];
      plot.setCursor({ left: plot.valToPos(x, "x"), top: this.height / 3 });
    } else if (event.key === "Escape") this.curves.zoom(null);
    else if ("+-".includes(event.key) && xs.length) {
      const { min, max } = plot.scales.x, reach = (max - min) * (event.key === "+" ? 0.25 : 1);
      this.curves.zoom([Math.max(0, xs[at] - reach), xs[at] + reach].map(value => value * this.factor));
    } else return;
    event.preventDefault();
  }

  remove() { this.uplot?.destroy(); this.element.remove(); }
}
