// The texts around the canvas of a timeline, and the image to save: the op pointed at, sums, the table of the slowest.
// Texts are never markup.
(function () {
  "use strict";

  function time(seconds) {
    const size = Math.abs(seconds);
    if (size >= 1) return `${seconds.toFixed(3)} s`;
    return size >= 1e-3 ? `${(seconds * 1e3).toFixed(3)} ms` : `${(seconds * 1e6).toFixed(1)} us`;
  }

  // One line about a span.
  function summary(mark, spans, names) {
    const ratio = spans.ratio[mark.index], wait = spans.wait[mark.index], microbatchNumber = spans.microbatch[mark.index];
    const against = ratio < 1000 ? `${ratio.toFixed(2)} x its peers` : "its peers do without";
    const waiting = wait > 0 ? `, ${time(wait)} of it waiting` : "", microbatch = microbatchNumber >= 0 ? ` microbatch ${microbatchNumber}` : "";
    const pooled = spans.covers[mark.index] > mark.duration * 1.001 ? ". Stands for several: zoom in" : "";
    if (names) return `${names[spans.name[mark.index]]}: at ${time(mark.start)} for ${time(mark.duration)}${pooled}`;
    return `${mark.kind}${microbatch}: at ${time(mark.start)} for ${time(mark.duration)}${waiting}; ${against}${pooled}`;
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

  // Empties the panel, which hides it.
  function clear() {
    const place = document.getElementById("timeline-details");
    if (!place) return;
    place.replaceChildren();
    for (const name of ["op", "kept", "sums"]) delete place.dataset[name];
  }

  // Rows with cells from column `numbers` on as figures; `choose`, if any, gets the name of the op whose row is chosen.
  function table(heads, rows, choose, numbers) {
    const cellClass = (column) => (column >= numbers ? "number" : "");
    const head = heads.map((text, column) => make("th", { scope: "col", textContent: text, className: cellClass(column) }));
    const body = rows.map(({ name, cells }) => make("tr", {}, ...cells.map((text, column) => {
      const cell = make("td", { className: cellClass(column) }, column || !choose ? text : opButton(text, () => choose(name)));
      cell.dataset.head = heads[column];
      return cell;
    })));
    return make("table", { className: "plain" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
  }

  const opButton = (text, open) => make("button", { className: "link", textContent: text, title: "Show this op", onclick: open });

  // Saves the canvas as a PNG with a title above it.
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
