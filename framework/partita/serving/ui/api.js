// Requests to the server of this page.

const BROKEN = "The connection to the server broke before the answer was complete.";

export class ServerError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function request(path, { token, ...options }) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers: { "Content-Type": "application/json", ...headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Check that partita serve is still running.");
  }
  if (!response.ok) throw await errorOf(response, token);
  return response;
}

async function errorOf(response, token) {
  if (response.status === 401) {
    const message = token ? "The server does not accept this token." : "This server needs its token.";
    return new ServerError(message, { status: 401 });
  }
  const text = await response.text();
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // the answer of a proxy, which is not JSON
  }
  const message = error.message ?? `The server answered with status ${response.status} ${response.statusText}.`;
  return new ServerError(message, { status: response.status, code: error.code });
}

// Return the model that the server runs: its `id`, `chat`, whether it answers messages, `max_model_len`, most tokens of
// a prompt and its answer, and `default_max_tokens`, most tokens of an answer that asks for no limit.
export async function servedModel(token) {
  const response = await request("v1/models", { token });
  return (await response.json()).data[0];
}

// Stream an answer: call `onText` with each new piece of text and `onTokens` with new tokens and their probabilities.
// Return the reason why the answer ended and the number of its tokens.
export async function streamAnswer(body, { token, signal, onText, onTokens }) {
  const response = await request("v1/chat/completions", {
    token,
    signal,
    method: "POST",
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  let finishReason = null;
  let numTokens = null;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return { finishReason, numTokens };
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, { code: chunk.error.code });
    numTokens = chunk.usage?.completion_tokens ?? numTokens;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    finishReason = choice.finish_reason ?? finishReason;
    if (choice.logprobs?.content?.length) onTokens(choice.logprobs.content);
    if (choice.delta?.content) onText(choice.delta.content);
  }
  throw new ServerError(BROKEN);
}

// Yield the data of each server-sent event of a stream of bytes.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError(BROKEN);
  } finally {
    reader.cancel().catch(() => {});
  }
}
