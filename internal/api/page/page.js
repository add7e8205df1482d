// The page: it asks for the token, follows the feed, and hands each snapshot to the sections.

import { Fault, get, parts, token } from "./api.js";
import { $, age, setText } from "./dom.js";
import { Board } from "./board.js";
import { Routing } from "./routing.js";
import { Logs } from "./logs.js";

const silence = 5000; // ms without a snapshot after which the feed is opened again
const board = new Board(), routing = new Routing(board), logs = new Logs(board);
let lastAt = 0; // of the last snapshot, on the steady clock

const seconds = () => performance.now() / 1000;
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

function live(cls, text) {
  $("live").className = `state ${cls}`;
  setText($("live"), text);
}

// open begins with the version, which tells whether the token is right.
async function open() {
  try {
    const version = await get("/api/v1/version");
    setText($("node"), [version.node, version.version].filter(Boolean).join(" · "));
  } catch (fault) {
    if (fault instanceof Fault && fault.status === 401) return askToken(token.get() ? fault.message : "");
    live("bad", "the node does not answer");
    await pause(2000);
    return open();
  }
  for (const id of ["board", "nav"]) $(id).hidden = false;
  $("login").hidden = true;
  follow();
}

function askToken(fault) {
  token.forget();
  live("", "");
  for (const id of ["board", "nav"]) $(id).hidden = true;
  setText($("token-file"), `~/.local/state/dpserve/admin/${location.host}`);
  $("login").hidden = false;
  setText($("login-fault"), fault);
  $("token").focus();
}

$("login-form").addEventListener("submit", (e) => {
  e.preventDefault();
  token.set($("token").value.trim());
  $("token").value = "";
  open();
});

// follow reads the feed, and opens it again when it ends or is silent.
async function follow() {
  for (let wait = 500; ; wait = Math.min(2 * wait, 5000)) {
    const stop = new AbortController();
    let heard = performance.now();
    const watch = setInterval(() => {
      if (performance.now() - heard > silence) stop.abort();
    }, 1000);
    try {
      await parts("/api/v1/feed", "\n\n", stop.signal, (events) => {
        if (!events.length) return;
        heard = performance.now();
        wait = 500;
        show(JSON.parse(events.at(-1).replace(/^data: /, "")));
      });
    } catch (fault) {
      if (fault instanceof Fault) {
        if (fault.status === 401) {
          clearInterval(watch);
          return askToken(fault.message);
        }
        board.notice("feed", "bad", String(fault));
      }
    }
    clearInterval(watch);
    $("board").classList.add("stale");
    live("bad", lastAt ? `no answer for ${age(seconds() - lastAt)}` : "the node does not answer");
    await pause(wait);
  }
}

function show(snapshot) {
  lastAt = seconds();
  board.notice("feed");
  const fault = snapshot.apps.error ?? snapshot.nodes.error;
  $("board").classList.toggle("stale", Boolean(fault));
  live(fault ? "warn" : "ok", fault ? "no leader" : "live");
  board.show(snapshot, lastAt);
  routing.show();
  logs.show();
}

open();
