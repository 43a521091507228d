// What stands around the canvas of a timeline, in words: the op pointed at, the table of the slowest, the image to keep.
// Every text goes in as text, never as markup.
(function () {
  "use strict";

  function time(seconds) {
    const size = Math.abs(seconds);
    if (size >= 1) return `${seconds.toFixed(3)} s`;
    return size >= 1e-3 ? `${(seconds * 1e3).toFixed(3)} ms` : `${(seconds * 1e6).toFixed(1)} us`;
  }

  // One line about a span.
  function summary(mark, spans, names) {
    const ratio = spans.ratio[mark.at], wait = spans.wait[mark.at], number = spans.microbatch[mark.at];
    const against = ratio < 1000 ? `${ratio.toFixed(2)} x its peers` : "its peers do without";
    const waiting = wait > 0 ? `, ${time(wait)} of it waiting` : "", microbatch = number >= 0 ? ` microbatch ${number}` : "";
    const many = spans.covers[mark.at] > mark.duration * 1.001 ? ". Stands for several: zoom in" : "";
    if (names) return `${names[spans.name[mark.at]]}: at ${time(mark.start)} for ${time(mark.duration)}${many}`;
    return `${mark.kind}${microbatch}: at ${time(mark.start)} for ${time(mark.duration)}${waiting}; ${against}${many}`;
  }

  const make = (...element) => window.tracekit.make(...element);

  // Sums by kind, as the server words them.
  function sums(place, { title, heads, rows }) {
    place.replaceChildren(make("h3", { textContent: title }), table(heads, rows.map((cells) => ({ cells })), null, 1));
  }

  function details(place, { title, rows }) {
    const facts = rows.flatMap(([term, value]) => [make("dt", { textContent: term }), make("dd", { textContent: value })]);
    place.replaceChildren(make("h3", { textContent: title }), make("dl", {}, ...facts));
  }

  // Nothing is asked for: the panel goes.
  function clear() {
    const place = document.getElementById("timeline-details");
    if (!place) return;
    place.replaceChildren();
    for (const name of ["op", "kept", "sums"]) delete place.dataset[name];
  }

  // Rows with cells from column `numbers` on as figures; `choose`, if any, gets the name of the op whose row is chosen.
  function table(heads, rows, choose, numbers) {
    const style = (at) => (at >= numbers ? "number" : "");
    const head = heads.map((text, at) => make("th", { scope: "col", textContent: text, className: style(at) }));
    const body = rows.map(({ name, cells }) => make("tr", {}, ...cells.map((text, at) => {
      const cell = make("td", { className: style(at) }, at || !choose ? text : opener(text, () => choose(name)));
      cell.dataset.head = heads[at];
      return cell;
    })));
    return make("table", { className: "plain" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
  }

  const opener = (text, open) => make("button", { className: "link", textContent: text, title: "Show this op", onclick: open });

  // What the canvas shows as a PNG, with a line that says of what.
  function save(canvas, title, colours, file) {
    const ratio = window.devicePixelRatio || 1, head = Math.round(34 * ratio), image = make("canvas", { width: canvas.width, height: canvas.height + head });
    const context = image.getContext("2d");
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, image.width, head);
    context.fillStyle = colours.text;
    context.font = `600 ${14 * ratio}px system-ui, "DejaVu Sans", sans-serif`;
    context.fillText(title, 8 * ratio, 22 * ratio);
    context.drawImage(canvas, 0, head);
    image.toBlob((blob) => window.tracekit.save(blob, file));
  }

  window.tracekitTimelinePanel = { summary, details, sums, clear, table, save };
})();
