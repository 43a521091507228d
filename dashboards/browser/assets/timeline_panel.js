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

  // Sums by kind, as the server words them.
  function sums(place, found) {
    const title = document.createElement("h3");
    title.textContent = found.title;
    place.replaceChildren(title, table(found.heads, found.rows.map((cells) => ({ cells: cells })), null, 1));
  }

  function details(place, op) {
    const title = document.createElement("h3"), list = document.createElement("dl");
    title.textContent = op.title;
    for (const [term, value] of op.rows) {
      const left = document.createElement("dt"), right = document.createElement("dd");
      left.textContent = term;
      right.textContent = value;
      list.append(left, right);
    }
    place.replaceChildren(title, list);
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
    const drawn = document.createElement("table"), head = drawn.createTHead().insertRow(), body = drawn.createTBody();
    const style = (at) => (at >= numbers ? "number" : "");
    drawn.className = "plain";
    heads.forEach((text, at) => {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = text;
      cell.className = style(at);
      head.append(cell);
    });
    for (const { name, cells } of rows) {
      const row = body.insertRow(), button = document.createElement("button");
      cells.forEach((text, at) => {
        const cell = row.insertCell();
        cell.className = style(at);
        cell.dataset.head = heads[at];
        if (at || !choose) cell.textContent = text;
        else cell.append(button);
      });
      button.className = "link";
      button.textContent = cells[0];
      button.title = "Show this op";
      button.addEventListener("click", () => choose(name));
    }
    return drawn;
  }

  // What the canvas shows as a PNG, with a line that says of what.
  function save(canvas, title, colours, file) {
    const ratio = window.devicePixelRatio || 1, head = Math.round(34 * ratio), image = document.createElement("canvas");
    image.width = canvas.width;
    image.height = canvas.height + head;
    const context = image.getContext("2d");
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, image.width, head);
    context.fillStyle = colours.text;
    context.font = `600 ${14 * ratio}px system-ui, "DejaVu Sans", sans-serif`;
    context.fillText(title, 8 * ratio, 22 * ratio);
    context.drawImage(canvas, 0, head);
    image.toBlob((blob) => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = file;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }

  window.tracekitTimelinePanel = { summary, details, sums, clear, table, save };
})();
