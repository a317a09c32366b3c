// Markdown as DOM nodes. The text of a model is untrusted: it becomes text nodes and elements from a fixed list,
// never HTML.
// Images and raw HTML are shown as they are written. Links open only http, https and mailto.

const MAX_DEPTH = 12; // of nested blocks and of nested emphasis; deeper ones are shown as text
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6}) +(\S.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(?=\S)|$)/;
const LINK = /\[([^[\]\n]{1,1000})\]\(([^()\s]{1,2000}(?:\([^()\s]{0,500}\)[^()\s]{0,500})?)\)/y;
const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const READERS = { "`": code, "[": link, "*": emphasis, "_": emphasis, "~": emphasis };
const ESCAPED = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;

// Return a document fragment of Markdown text. Each block is written from right to left if its text begins so.
export function renderMarkdown(text) {
  const result = blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
  for (const block of result.children) block.dir = "auto";
  return result;
}

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

function blocks(lines, depth) {
  const result = document.createDocumentFragment();
  if (depth > MAX_DEPTH) {
    result.append(element("p", lines.join("\n")));
    return result;
  }
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const read = [fence, heading, rule, quote, list, table].find(one => one.starts(lines, at)) ?? paragraph;
    at = read.read(lines, at, result, depth);
  }
  return result;
}

const fence = {
  starts: (lines, at) => FENCE.test(lines[at]),
  read(lines, at, result) {
    const [, mark] = FENCE.exec(lines[at]);
    let end = at + 1;
    const closes = line => line.trim().length >= mark.length && line.trim() === mark[0].repeat(line.trim().length);
    while (end < lines.length && !closes(lines[end])) end += 1;
    result.append(element("pre", element("code", lines.slice(at + 1, end).join("\n"))));
    return end + 1;
  },
};

const heading = {
  starts: (lines, at) => HEADING.test(lines[at]),
  read(lines, at, result) {
    const [, marks, text] = HEADING.exec(lines[at]);
    result.append(element(`h${Math.min(marks.length + 2, 6)}`, ...inline(text.trim())));
    return at + 1;
  },
};

const rule = {
  starts: (lines, at) => RULE.test(lines[at]),
  read(lines, at, result) {
    result.append(element("hr"));
    return at + 1;
  },
};

const quote = {
  starts: (lines, at) => QUOTE.test(lines[at]),
  read(lines, at, result, depth) {
    const inner = [];
    for (; at < lines.length && QUOTE.test(lines[at]); at += 1) inner.push(lines[at].replace(QUOTE, ""));
    result.append(element("blockquote", blocks(inner, depth + 1)));
    return at;
  },
};

const list = {
  starts: (lines, at) => ITEM.test(lines[at]) && !RULE.test(lines[at]),
  read(lines, at, result, depth) {
    const [, indent, mark] = ITEM.exec(lines[at]);
    const isOrdered = /\d/.test(mark);
    const made = element(isOrdered ? "ol" : "ul");
    if (isOrdered) made.start = parseInt(mark, 10);
    while (at < lines.length && list.starts(lines, at)) {
      const [before, ownIndent, ownMark] = ITEM.exec(lines[at]);
      if (ownIndent.length < indent.length || /\d/.test(ownMark) !== isOrdered) break;
      const inner = [lines[at].slice(before.length)];
      at = itemEnd(lines, at + 1, ownIndent.length, inner, before.length);
      made.append(element("li", blocks(inner, depth + 1)));
    }
    result.append(made);
    return at;
  },
};

// Push the further lines of an item, without their indentation, to `inner`; return the index of the line after them.
function itemEnd(lines, at, indent, inner, width) {
  for (; at < lines.length; at += 1) {
    const spaces = lines[at].length - lines[at].trimStart().length;
    const isBlank = !lines[at].trim();
    const continuesParagraph = () => lines[at - 1].trim() && !startsBlock(lines, at);
    if (!isBlank && spaces < indent + 2 && !continuesParagraph()) return at;
    inner.push(lines[at].slice(Math.min(width, spaces)));
  }
  return at;
}

const table = {
  starts(lines, at) {
    if (!lines[at].includes("|") || !(lines[at + 1] ?? "").includes("-")) return false;
    const rules = cells(lines[at + 1]);
    return rules.every(cell => /^:?-+:?$/.test(cell)) && rules.length === cells(lines[at]).length;
  },
  read(lines, at, result) {
    const row = (line, tag) => element("tr", ...cells(line).map(cell => element(tag, ...inline(cell))));
    const body = element("tbody");
    const made = element("table", element("thead", row(lines[at], "th")), body);
    for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) body.append(row(lines[at], "td"));
    result.append(made);
    return at;
  },
};

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inner.split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
}

const paragraph = {
  read(lines, at, result) {
    const start = at;
    do at += 1; while (at < lines.length && lines[at].trim() && !startsBlock(lines, at));
    result.append(element("p", ...inline(lines.slice(start, at).join("\n"))));
    return at;
  },
};

function startsBlock(lines, at) {
  return [fence, heading, rule, quote, list, table].some(one => one.starts(lines, at));
}

// Return the nodes of a text with emphasis, code and links. `missing` holds marks that do not occur again, so that a
// text of marks without an end is read in linear time.
function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set();
  let plain = "";
  const add = node => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(node);
  };
  const closing = (mark, from) => {
    const end = missing.has(mark) ? -1 : text.indexOf(mark, from);
    if (end < 0) missing.add(mark);
    return end;
  };
  for (let at = 0; at < text.length;) {
    if (text[at] === "\\" && ESCAPED.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    const read = depth < MAX_DEPTH ? READERS[text[at]] : undefined;
    const found = read?.(text, at, closing, depth);
    if (found) add(found.node);
    else plain += text[at];
    at = found?.end ?? at + 1;
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

function code(text, at, closing) {
  if (text[at - 1] === "`") return null;
  let start = at;
  while (text[start] === "`") start += 1;
  const mark = text.slice(at, start);
  const end = closing(mark, start);
  if (end < 0 || text[end + mark.length] === "`") return null;
  return { node: element("code", text.slice(start, end).trim()), end: end + mark.length };
}

function link(text, at, closing, depth) {
  if (text[at - 1] === "!") return null;
  LINK.lastIndex = at;
  const match = LINK.exec(text);
  if (!match || !URL.canParse(match[2]) || !PROTOCOLS.has(new URL(match[2]).protocol)) return null;
  const node = element("a", ...inline(match[1], depth + 1));
  node.href = match[2];
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return { node, end: at + match[0].length };
}

function emphasis(text, at, closing, depth) {
  const isDouble = text[at + 1] === text[at];
  const mark = isDouble ? text[at] + text[at] : text[at];
  const tag = mark === "~~" ? "del" : isDouble ? "strong" : "em";
  const start = at + mark.length;
  if (mark === "~" || !/\S/.test(text[start] ?? "")) return null;
  let end = closing(mark, start + 1);
  if (isDouble && end >= 0 && text[end + 2] === text[at]) end += 1; // ***both*** ends with the outer mark
  if (end < 0 || /\s/.test(text[end - 1])) return null;
  const isInWord = WORD.test(text[at - 1] ?? "") || WORD.test(text[end + mark.length] ?? "");
  if (mark[0] === "_" && isInWord) return null;
  return { node: element(tag, ...inline(text.slice(start, end), depth + 1)), end: end + mark.length };
}
