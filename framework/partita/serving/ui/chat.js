// The chat page: sends the messages to the server of this page and shows the answers as they are generated.

import { servedModel, streamAnswer } from "./api.js";
import { fromFile, toLine } from "./dialogue_file.js";
import { MessageView } from "./message.js";
import { watchTokens } from "./tokens.js";

const TOKEN_KEY = "partita-token";
const NO_CHAT = "This model does not answer messages. Send rows to /predict, or texts to /v1/completions.";
const TOP_LOGPROBS = 5;
const NUMBERS = { temperature: "temperature", "top-p": "top_p", "max-tokens": "max_tokens", seed: "seed" };

const at = id => document.getElementById(id);
const log = at("log");
let messages = []; // MessageView objects without the system prompt
let numLeftOut = 0; // messages at the beginning that no longer fit into the context of the model
let running = null; // AbortController of the answer that is being generated
let systemWeight; // weight of a system prompt that was loaded with one
let isSaved = true;
let model = null; // the model as /v1/models describes it, once it is known

function show(id, text) {
  at(id).textContent = text;
  at(id).hidden = !text;
}

function showError(error) {
  show("error", error.message);
  if (error.status === 401) {
    at("sign-in").hidden = false;
    at("token").focus();
  }
}

function setRunning(controller) {
  running = controller;
  at("stop").disabled = !running;
  for (const id of ["new", "load"]) at(id).disabled = Boolean(running);
  updateButtons();
}

// Return whether the next answer can be generated.
function canAnswer() {
  return !running && model?.chat !== false;
}

function updateButtons() {
  at("send").disabled = !canAnswer();
  at("regenerate").disabled = !canAnswer() || !messages.some(one => one.role === "user");
  at("save").disabled = Boolean(running) || !messages.length;
}

function add(role, content, weight) {
  const message = new MessageView(role, content, weight);
  messages.push(message);
  log.append(message.node);
  scroll();
  updateButtons();
  return message;
}

function scroll() {
  log.scrollTop = log.scrollHeight;
}

// Return the fields of a request that the settings fill. Throw an Error if a number cannot be read.
function settings() {
  const fields = {};
  for (const [id, name] of Object.entries(NUMBERS)) {
    if (!at(id).checkValidity()) {
      at("settings").open = true;
      throw new Error(`${at(id).labels[0].textContent.trim()}: ${at(id).validationMessage}`);
    }
    if (at(id).value !== "") fields[name] = Number(at(id).value);
  }
  if (at("probabilities").checked) Object.assign(fields, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  return fields;
}

// Return the messages of the chat with the system prompt first.
function dialogue(from = 0) {
  const system = at("system").value.trim();
  const asked = messages.slice(from);
  return system ? [{ role: "system", content: system, weight: systemWeight }, ...asked] : asked;
}

// Leave out the oldest question and its answer. Return whether a question is left.
function leaveOutOldest() {
  const next = messages.findIndex((one, index) => index > numLeftOut && one.role === "user");
  if (next < 0) return false;
  numLeftOut = next;
  return true;
}

// Generate the next answer. If nothing is generated, call `undo`, which restores what was there before.
async function answer(undo) {
  const leftOutBefore = numLeftOut;
  show("error", "");
  setRunning(new AbortController());
  try {
    await answerWithinContext({ ...settings(), ...(model && { model: model.id }) });
  } catch (error) {
    showError(error);
  }
  if (messages.at(-1)?.role !== "assistant") {
    numLeftOut = leftOutBefore;
    undo();
  }
  setRunning(null);
  showLeftOut();
  at("message").focus();
}

// Generate an answer to as many of the newest messages as fit into the context of the model together with the answer.
async function answerWithinContext(fields) {
  let tooLong = null;
  for (const limit of limitsToTry(fields)) {
    tooLong = await answerIfItFits({ ...fields, ...limit });
    if (!tooLong) return;
  }
  throw tooLong;
}

// Yield limits of the answer to ask for. After all of those that are worth a try, the oldest question is left out.
function* limitsToTry(fields) {
  do {
    const isLast = !messages.some((one, index) => index > numLeftOut && one.role === "user");
    if ("max_tokens" in fields || !model || isLast) {
      yield {}; // without a limit, the server gives the answer all that is free, up to the model's default
    } else {
      const half = Math.max(1, Math.floor(model.max_model_len / 2));
      yield { max_tokens: model.default_max_tokens };
      if (half < model.default_max_tokens) yield { max_tokens: half };
    }
  } while (leaveOutOldest());
}

// Generate an answer to the messages that are not left out. Return the error if they are too long, else null.
async function answerIfItFits(fields) {
  const asked = dialogue(numLeftOut).map(({ role, content }) => ({ role, content }));
  const message = add("assistant", "");
  message.showTokens(at("probabilities").checked);
  try {
    await stream(message, { ...fields, messages: asked });
  } catch (error) {
    message.end(error.name === "AbortError" ? "stopped" : "incomplete", false);
    const isEmpty = !message.content.trim();
    if (isEmpty) remove(message);
    if (error.name === "AbortError") return null;
    if (isEmpty && error.code === "context_length_exceeded") return error;
    throw error;
  }
  return null;
}

async function stream(message, body) {
  const started = performance.now();
  const { finishReason, numTokens } = await streamAnswer(body, {
    token: sessionStorage.getItem(TOKEN_KEY),
    signal: running.signal,
    onText: text => message.addText(text),
    onTokens: tokens => message.addTokens(tokens),
  });
  if (!message.content.trim()) throw new Error("The model answered without any text.");
  const seconds = (performance.now() - started) / 1000;
  const counts = numTokens === null ? "" : `${numTokens} ${numTokens === 1 ? "token" : "tokens"}, ${(numTokens / seconds).toFixed(1)} tokens/s`;
  const end = finishReason === "length" ? "the answer ended at the limit of tokens" : "";
  message.end([counts, end].filter(Boolean).join("; "), !end);
}

function showLeftOut() {
  const which = numLeftOut === 1 ? "message was" : `${numLeftOut} messages were`;
  const text = `The first ${which} left out: with them, prompt and answer do not fit into the context of the model.`;
  show("note", numLeftOut ? text : "");
}

function remove(message) {
  messages = messages.filter(one => one !== message);
  message.node.remove();
  updateButtons();
}

function send() {
  const text = at("message").value;
  if (!canAnswer() || !text.trim()) return;
  at("message").value = "";
  const question = add("user", text);
  isSaved = false;
  answer(() => {
    remove(question);
    at("message").value ||= text;
  });
}

function regenerate() {
  const last = messages.at(-1);
  const replaced = last.role === "assistant" ? last : null;
  if (replaced) remove(replaced);
  isSaved = false;
  answer(() => {
    if (!replaced) return;
    messages.push(replaced);
    log.append(replaced.node);
  });
}

// Replace the chat, after a question if it would be lost, and also the system prompt if one is given. Return whether
// the chat was replaced.
function replaceChat(withMessages = [], system = null) {
  if (!isSaved && messages.length && !confirm("This chat is not saved. Discard it?")) return false;
  messages = [];
  log.replaceChildren();
  numLeftOut = 0;
  if (system !== null) {
    at("system").value = system.content;
    systemWeight = system.weight;
  }
  for (const { role, content, weight } of withMessages) add(role, content, weight);
  isSaved = true;
  show("error", "");
  show("note", "");
  updateButtons();
  return true;
}

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([toLine(dialogue())], { type: "application/jsonl" }));
  link.download = `chat-${new Date().toISOString().slice(0, 19).replace(/[-:]/g, "")}.jsonl`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  isSaved = true;
}

async function load() {
  const [file] = at("file").files;
  at("file").value = "";
  if (!file) return;
  try {
    const { messages: all, count } = fromFile(await file.text());
    const system = all[0]?.role === "system" && all[0].content.trim() ? all[0] : null;
    const isLoaded = replaceChat(system ? all.slice(1) : all, system ?? { content: "" });
    if (isLoaded && count > 1) show("note", `The file has ${count} dialogues; this is the last one.`);
  } catch (error) {
    showError(error);
  }
}

async function connect() {
  try {
    model = await servedModel(sessionStorage.getItem(TOKEN_KEY));
    at("model").textContent = model.id;
    document.title = `${model.id} - partita chat`;
    at("sign-in").hidden = true;
    show("error", model.chat === false ? NO_CHAT : "");
    updateButtons();
  } catch (error) {
    showError(error);
  }
}

at("form").addEventListener("submit", event => {
  event.preventDefault();
  send();
});
at("sign-in").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, at("token").value.trim());
  at("token").value = "";
  connect();
});
at("message").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("regenerate").addEventListener("click", regenerate);
at("new").addEventListener("click", () => replaceChat() && at("message").focus());
at("save").addEventListener("click", save);
at("load").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", load);
at("probabilities").addEventListener("change", event => messages.forEach(one => one.showTokens(event.target.checked)));
addEventListener("beforeunload", event => {
  if (!isSaved && messages.length) event.preventDefault();
});
log.addEventListener("drawn", () => {
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 150) scroll();
});
watchTokens(log, at("tooltip"));
updateButtons();
connect();
