// Dialogues in files. They are written as JSON lines: one object with `messages` per line, the format that
// `partita train` reads. A JSON list of such objects, and one object over several lines, are read too.

const ROLES = ["system", "user", "assistant", "tool"];
const FORM = "write an object with messages in each line, or a JSON list of such objects";

// Return messages as a line of a file. Those without a weight are written without one.
export function toLine(messages) {
  return `${JSON.stringify({ messages: messages.map(({ role, content, weight }) => ({ role, content, weight })) })}\n`;
}

// Return the messages of the last dialogue in a file, and the number of its dialogues. Throw an Error if there is none.
export function fromFile(text) {
  const { row, place, count } = lastRow(text);
  if (!Array.isArray(row?.messages)) throw new Error(`${place} has no list of messages; ${FORM}.`);
  const others = Object.keys(row).filter(key => key !== "messages");
  if (others.length) {
    const what = `${others.join(", ")} beside messages`;
    throw new Error(`${place} has ${what}; this page reads only messages, and Save would lose the rest. Remove it.`);
  }
  row.messages.forEach((message, index) => check(message, `${place}, message ${index + 1}`));
  const messages = row.messages.map(({ role, content, weight }) => ({ role, content, weight: weight ?? undefined }));
  return { messages, count };
}

// Return the last dialogue of a file, its place for errors, and the number of dialogues.
function lastRow(text) {
  const lines = text.split("\n").map((line, index) => [line.trim(), index + 1]).filter(([line]) => line);
  if (lines.length > 1 && isJson(lines[0][0])) {
    const [last, number] = lines.at(-1);
    return { row: parsed(last, `Line ${number}`), place: `Line ${number}`, count: lines.length };
  }
  const whole = lines.length ? parsed(text, "The file") : [];
  if (!Array.isArray(whole)) return { row: whole, place: "The file", count: 1 };
  if (!whole.length) throw new Error(`The file is empty; ${FORM}.`);
  return { row: whole.at(-1), place: `Dialogue ${whole.length}`, count: whole.length };
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

// Return the value of a JSON text. Throw an Error with its place if it is none.
function parsed(text, place) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${place} is not JSON (${error.message}); ${FORM}.`);
  }
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
  if (typeof (message.weight ?? 0) !== "number") {
    throw new Error(`${place}: the weight is ${JSON.stringify(message.weight)}; it must be a number, such as 0 or 1.`);
  }
}
