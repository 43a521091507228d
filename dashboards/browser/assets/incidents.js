// Acknowledging an incident: a dialog, from the button in its row or with the key a.
(function () {
  "use strict";

  const MUTES = [["", "keep messages as they are"], ["1", "for 1 hour"], ["4", "for 4 hours"], ["24", "for a day"], ["168", "for a week"], ["0", "no longer"]];
  const OWNER_KEY = "tracekit-owner"; // the name under which this person acknowledged last

  function open({ handle, job, owner }) {
    const { make, at, answer, redraw } = window.tracekit;
    const field = (name, label, control) => make("label", { className: "text-field" }, make("span", { className: "field-label", textContent: label }), Object.assign(control, { name }));
    const ownerField = make("input", { maxLength: 1000, value: owner || window.localStorage.getItem(OWNER_KEY) || "", autocomplete: "off" });
    const note = make("input", { maxLength: 1000, autocomplete: "off", placeholder: "what others should know" });
    const mute = make("select", { className: "field" }, ...MUTES.map(([value, text]) => make("option", { value, textContent: text })));
    const status = make("p", { className: "wrong" }), send = make("button", { textContent: "Acknowledge", className: "primary" });
    status.setAttribute("role", "alert");
    const form = make("form", {}, field("owner", "Owner", ownerField), field("note", "Note", note), field("mute", "Mute messages", mute), status, send);
    const dialog = window.tracekit_dialog("handle", "Acknowledge", make("h2", { textContent: `Incident ${handle} of ${job}` }), form);
    ownerField.select();
    form.addEventListener("submit", async function (event) {
      event.preventDefault();
      const change = { incident: Number(handle), owner: ownerField.value, note: note.value, mute_h: mute.value ? Number(mute.value) : null };
      try {
        await answer(at("/handle"), {
          method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(change),
        });
      } catch (error) {
        status.textContent = `Not stored: ${error.message}`; // what was typed stays
        return;
      }
      window.localStorage.setItem(OWNER_KEY, ownerField.value);
      dialog.close();
      redraw();
    });
  }

  document.addEventListener("click", function (event) {
    const button = event.target.closest("button[data-handle]");
    if (button) open(button.dataset);
  });

  window.tracekit_incidents = {
    // Opens the dialog of the row that has the focus.
    open() {
      const row = document.activeElement.closest("tr"), button = row && row.querySelector("button[data-handle]");
      if (button) button.click();
    },
  };
})();
