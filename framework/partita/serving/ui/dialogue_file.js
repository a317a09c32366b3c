// Dialogues as JSON lines: one object with `messages` per line, the format that `partita train` reads.

const ROLES = ["system", "user", "assistant", "tool"];

// Return messages as a line of a file. An incomplete answer has `weight: 0`, so that training does not learn its end.
export function toLine(messages) {
  const written = messages.map(({ role, content, isComplete }) => ({
    role,
    content,
    ...(isComplete === false ? { weight: 0 } : {}),
  }));
  return `${JSON.stringify({ messages: written })}\n`;
}

// Return the messages of the last dialogue in a file, and the number of its dialogues. Throw an Error if there is none.
export function fromFile(text) {
  const lines = text.split("\n").map((line, index) => [line.trim(), index + 1]).filter(([line]) => line);
  if (!lines.length) throw new Error("The file is empty; it must have a line of JSON with messages.");
  const [last, number] = lines.at(-1);
  let row;
  try {
    row = JSON.parse(last);
  } catch (error) {
    throw new Error(`Line ${number} is not JSON (${error.message}); each line must be an object with messages.`);
  }
  if (!Array.isArray(row?.messages)) {
    throw new Error(`Line ${number} has no list of messages; each line must be an object with messages.`);
  }
  row.messages.forEach((message, index) => check(message, `Line ${number}, message ${index + 1}`));
  const messages = row.messages.map(({ role, content, weight }) => ({ role, content, isComplete: weight !== 0 }));
  return { messages, count: lines.length };
}

// Throw an Error if a message has anything besides a role, text and a weight, which this page would lose.
function check(message, place) {
  if (!ROLES.includes(message?.role)) {
    throw new Error(`${place}: the role is ${JSON.stringify(message?.role)}; it must be one of ${ROLES.join(", ")}.`);
  }
  const others = Object.keys(message).filter(key => !["role", "content", "weight"].includes(key));
  if (typeof message.content !== "string" || others.length) {
    const what = others.length ? `has ${others.join(", ")}` : "has content that is not text";
    throw new Error(`${place} ${what}; this page reads only a role, text as content, and a weight.`);
  }
}
