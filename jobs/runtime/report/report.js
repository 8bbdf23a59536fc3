// The values under the pointer are read back from the curves themselves: nothing is in the page twice.
for (const figure of document.querySelectorAll("figure[data-x]")) {
  const plot = figure.querySelector(".plot"), view = plot.querySelector("svg[viewBox]").viewBox.baseVal;
  const [x0, x1] = figure.dataset.x.split(" ").map(Number);
  const [y0, y1] = figure.dataset.y.split(" ").map(Number);
  const log = "log" in figure.dataset, step = x => x0 + (x1 - x0) * x / view.width;
  const value = y => { const part = 1 - y / view.height;
    return log ? y0 * (y1 / y0) ** part : y0 + (y1 - y0) * part };
  const curves = [...figure.querySelectorAll("path[data-label]")].map(path => [path.dataset.label,
    [...path.getAttribute("d").matchAll(/(\d+),(\d+)/g)].map(point => [+point[1], +point[2]])]);
  const tip = plot.appendChild(document.createElement("div"));
  const cursor = plot.appendChild(document.createElement("div"));
  tip.className = "tip"; cursor.className = "cursor"; tip.hidden = cursor.hidden = true;
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * view.width;
    const near = curves.filter(curve => curve[1].length).map(([label, points]) => [label,
      points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)]);
    if (!near.length) return;
    tip.textContent = near.map(([label, [x, y]]) => label + " " +
      value(y).toLocaleString("en", { maximumSignificantDigits: 4 }) + " at " + figure.dataset.across +
      " " + step(x).toLocaleString("en", { maximumFractionDigits: figure.dataset.across === "step" ? 0 : 1 })).join("\n");
    const part = Math.min(1, Math.max(0, at / view.width));
    cursor.style.left = 100 * part + "%"; tip.hidden = cursor.hidden = false;
    tip.style.left = part < .5 ? "calc(" + 100 * part + "% + 10px)" : "auto";
    tip.style.right = part < .5 ? "auto" : "calc(" + 100 * (1 - part) + "% + 10px)";
  });
  plot.addEventListener("pointerleave", () => { tip.hidden = cursor.hidden = true });
}
