"use strict";
// Fetches the page with the key and puts it in place of this form. The key is kept for this tab only.
const STORE = "granikv-api-key";

async function open_with(key) {
  const reply = await fetch(location.href, { headers: { Authorization: "Bearer " + key, Accept: "application/xhtml+xml" } });
  if (!reply.ok) return false;
  const html = await reply.text();
  sessionStorage.setItem(STORE, key);
  document.open();
  document.write(html);
  document.close();
  return true;
}

function refuse(text) {
  sessionStorage.removeItem(STORE);
  document.getElementById("refused").textContent = text;
}

document.getElementById("sign-in").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    if (!(await open_with(document.getElementById("key").value))) refuse("The server refuses this key.");
  } catch {
    refuse("The server does not answer.");
  }
});

if (sessionStorage.getItem(STORE)) {
  open_with(sessionStorage.getItem(STORE)).then((ok) => ok || refuse("The server refuses the key of before."), () => {});
}
