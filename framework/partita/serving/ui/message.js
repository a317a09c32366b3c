// A message of the chat on the page.

import { renderMarkdown } from "./markdown.js";
import { tokenWriter } from "./tokens.js";

const TITLES = { user: "You", assistant: "Model", tool: "Tool", system: "System" };

export class MessageView {
  // `weight` is that of the message in training; undefined if it has none.
  constructor(role, content = "", weight = undefined) {
    this.role = role;
    this.content = content;
    this.weight = weight;
    this.tokens = [];
    this.showsTokens = false;
    this.node = document.createElement("article");
    this.node.className = role;
    this.node.setAttribute("aria-label", `${TITLES[role]}, message`);
    const head = document.createElement("div");
    head.className = "head";
    const title = document.createElement("h2");
    title.textContent = TITLES[role];
    const copy = document.createElement("button");
    copy.type = "button";
    copy.className = "small";
    copy.textContent = "Copy";
    copy.addEventListener("click", () => this.copy(copy));
    head.append(title, copy);
    this.text = document.createElement("div");
    this.text.dir = "auto"; // from right to left if the text begins so
    this.meta = document.createElement("p");
    this.meta.className = "meta";
    this.meta.hidden = true;
    this.node.append(head, this.text, this.meta);
    this.draw();
  }

  // Add new text; it is drawn before the next frame of the screen, and not for every piece.
  addText(text) {
    this.node.setAttribute("aria-busy", "true"); // read aloud when it is complete
    this.content += text;
    this.waits ??= requestAnimationFrame(() => this.draw());
  }

  addTokens(tokens) {
    this.tokens.push(...tokens);
    this.writeTokens?.(tokens);
  }

  // Show tokens with their probabilities instead of Markdown, where the answer has them.
  showTokens(wanted) {
    this.showsTokens = wanted;
    this.writeTokens = null;
    this.draw();
  }

  // Show what is known of an answer that has ended. An answer that was stopped or reached the limit is not complete: it
  // has the weight 0, so that training does not learn its end.
  end(meta, isComplete) {
    this.weight = isComplete ? undefined : 0;
    this.meta.textContent = meta;
    this.meta.hidden = !meta;
    this.node.removeAttribute("aria-busy");
    this.draw();
  }

  draw() {
    this.waits = undefined;
    if (!this.writeTokens) this.drawText(); // tokens are added as they arrive
    this.node.dispatchEvent(new Event("drawn", { bubbles: true }));
  }

  drawText() {
    const isTokens = this.showsTokens && this.tokens.length > 0;
    for (const name of ["tabindex", "role", "aria-label"]) this.text.removeAttribute(name);
    const isMarkdown = this.role === "assistant" && !isTokens;
    this.text.className = isMarkdown ? "text" : "text plain";
    if (isTokens) {
      this.text.tabIndex = 0;
      this.text.setAttribute("role", "group");
      this.text.setAttribute("aria-label", "Tokens of the answer; the arrow keys show their probabilities");
      this.text.replaceChildren();
      this.writeTokens = tokenWriter(this.text);
      this.writeTokens(this.tokens);
    } else if (isMarkdown) {
      this.text.replaceChildren(renderMarkdown(this.content));
    } else {
      this.text.textContent = this.content;
    }
  }

  async copy(button) {
    try {
      await navigator.clipboard.writeText(this.content);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(this.text); // clipboard.writeText needs HTTPS or localhost
      button.textContent = "Selected: press Ctrl C";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }
}
