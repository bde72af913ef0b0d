"use strict";
// Each picture gives way to its interactive chart shortly before it comes into view; if that fails, the picture stays.
const options = {
  mode: "vega-lite",
  renderer: "svg",
  actions: { export: true, source: false, compiled: false, editor: false },
};

async function enliven(figure) {
  const live = figure.querySelector(".live");
  const spec = JSON.parse(figure.querySelector("script").textContent);
  try {
    live.hidden = false;
    await vegaEmbed(live, spec, { ...options, downloadFileName: live.dataset.name });
    figure.querySelector("img").hidden = true;
    figure.dataset.state = "live";
  } catch (problem) {
    live.hidden = true;
    figure.dataset.state = "still";
    console.error(figure.id, problem);
  }
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) {
      seen.unobserve(entry.target);
      enliven(entry.target);
    }
  }
}, { rootMargin: "800px" });
for (const figure of document.querySelectorAll("figure")) seen.observe(figure);

window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("main details:not(figure details)")) details.open = true;
});
