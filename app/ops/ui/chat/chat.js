// The chat: conversations, the answers that run, and what the reader does with them.

import { make } from "../dom/element.js";
import { announce } from "../shell/announcer.js";
import { copyText } from "../shell/clipboard.js";
import { fileName, saveFile } from "../shell/files.js";
import { showToast } from "../shell/toast.js";
import { Composer } from "./composer.js";
import { ConversationList } from "./conversation_list.js";
import { newAnswer, newConversation, openCalls, titleOf } from "./conversation.js";
import { Database, MAX_CONVERSATIONS } from "./database.js";
import { Run } from "./run.js";
import { editSettings, storedSettings, storeSettings } from "./settings_dialog.js";
import { fromJson, toJson, toMarkdown } from "./transfer.js";
import { Transcript } from "./transcript.js";

const SAVE_INTERVAL = 2000; // milliseconds between two savings of an answer that runs
const at = (id) => document.getElementById(id);

export class Chat {
  constructor(database) {
    this.database = database;
    this.served = { models: [], takesConversations: true };
    this.runs = new Map(); // by the conversation's id
    this.current = newConversation(storedSettings());
    this.transcript = new Transcript(at("scroller"), at("messages"), at("to-end"));
    this.composer = new Composer(at("ask"), (text) => this.send(text), () => this.stop());
    this.list = new ConversationList(database, {
      open: (id) => this.open(id),
      rename: (id) => this.rename(id),
      json: (id) => this.exportJson(id),
      markdown: (id) => this.exportMarkdown(id),
      remove: (id) => this.remove(id),
    });
    this.list.running = (id) => this.runs.has(id);
    database.onChange = () => this.list.show();
    if (!database.isKept) at("not-kept").hidden = false;
    this.listen();
    this.show(this.current);
  }

  listen() {
    at("messages").addEventListener("click", (event) => this.onMessageClick(event));
    at("model-choice").addEventListener("change", (event) => {
      this.current.settings.model = event.target.value;
      storeSettings(this.current.settings);
    });
    at("results").addEventListener("submit", (event) => {
      event.preventDefault();
      this.sendResults();
    });
    at("suggestions").addEventListener("click", (event) => {
      const text = event.target.closest("button")?.textContent;
      if (text) this.send(text);
    });
    at("import-file").addEventListener("change", (event) => this.importFile(event.target));
    for (const name of ["visibilitychange", "pagehide"]) {
      document.addEventListener(name, () => {
        for (const run of this.runs.values()) this.save(run.conversation);
      });
    }
  }

  /** What the server serves: names of models, and whether they take conversations or continue texts. */
  setServed(models, takesConversations) {
    const { served } = this;
    if (served.models.join("\n") === models.join("\n") && served.takesConversations === takesConversations) return;
    this.served = { models, takesConversations };
    at("model-choice").replaceChildren(...models.map((name) => make("option", { value: name }, name)));
    at("hint").textContent = takesConversations
      ? "What you write goes to this server and nowhere else."
      : "Write the beginning of a text. The model, which has no chat template, goes on with it.";
    at("suggestions").hidden = !takesConversations;
    this.showModel();
  }

  get model() {
    const { models } = this.served;
    const { model } = this.current.settings;
    return models.includes(model) ? model : models[0] ?? "";
  }

  showModel() {
    at("model-choice").value = this.model;
  }

  show(conversation) {
    this.current = conversation;
    this.list.current = conversation.id;
    this.composer.showDraftOf(conversation.id);
    this.transcript.show(conversation);
    this.showModel();
    this.showState();
    this.list.show();
    document.body.classList.remove("drawer-open");
  }

  /** What depends on whether the shown conversation has messages, runs, or waits for results of tools. */
  showState() {
    const { current } = this;
    at("welcome").hidden = current.messages.length > 0;
    at("conversation-title").textContent = titleOf(current);
    this.composer.setBusy(this.runs.has(current.id));
    const calls = this.runs.has(current.id) ? [] : openCalls(current);
    at("results").hidden = calls.length === 0;
    at("result-fields").replaceChildren(...calls.map((call, index) => {
      const id = `result-${index}`;
      const field = make("textarea", { id, rows: "2", placeholder: "What the tool returned" });
      return make("div", {}, make("label", { for: id }, `Result of ${call.name}`), field);
    }));
  }

  begin() {
    if (this.current.messages.length || this.composer.text) this.show(newConversation(storedSettings()));
    this.composer.focus();
  }

  async open(id) {
    if (id === this.current.id) {
      document.body.classList.remove("drawer-open");
      return;
    }
    const conversation = this.runs.get(id)?.conversation ?? (await this.database.read(id));
    if (!conversation) return;
    for (const message of conversation.messages) {
      if (message.state === "running" && !this.runs.has(id)) message.state = "stopped"; // the page was closed
    }
    this.show(conversation);
    this.composer.focus();
    announce(`Conversation ${titleOf(conversation)}`);
  }

  // -- asking

  /** Returns whether the text was taken. */
  send(text) {
    if (this.runs.has(this.current.id)) return false;
    if (!this.model) {
      showToast("The server has not answered yet: the text stays here.");
      return false;
    }
    this.current.messages.push({ role: "user", content: text });
    this.transcript.scrollToEnd();
    this.answer();
    return true;
  }

  sendResults() {
    const fields = [...at("result-fields").querySelectorAll("textarea")];
    openCalls(this.current).forEach((call, index) => {
      this.current.messages.push({ role: "tool", callId: call.id, name: call.name, content: fields[index].value });
    });
    this.answer();
  }

  stop() {
    this.runs.get(this.current.id)?.stop();
  }

  async answer() {
    const conversation = this.current;
    const answer = newAnswer(this.model);
    conversation.settings.model = this.model;
    conversation.messages.push(answer);
    const run = new Run(conversation, answer, this.served.takesConversations, () => {
      if (this.current === conversation) this.transcript.refresh();
    });
    this.runs.set(conversation.id, run);
    this.transcript.draw();
    this.showState();
    announce("Answering");
    await this.save(conversation);
    const timer = setInterval(() => this.save(conversation), SAVE_INTERVAL);
    await run.go();
    clearInterval(timer);
    this.runs.delete(conversation.id);
    if (this.current === conversation) {
      this.transcript.draw();
      this.showState();
      announce(answer.error || `${answer.state === "stopped" ? "Stopped. " : ""}${answer.content}`);
    }
    if (run.removed) return;
    await this.save(conversation);
  }

  async save(conversation) {
    if (!conversation.messages.length || this.runs.get(conversation.id)?.removed) return;
    conversation.updated = Date.now();
    try {
      const gone = await this.database.write(conversation);
      if (gone) showToast(`More than ${MAX_CONVERSATIONS} conversations, or too long ones: ${gone} of the oldest removed.`);
    } catch (error) {
      showToast(`The conversation could not be kept: ${error?.message ?? "no room"}.`);
    }
    await this.list.show();
  }

  // -- messages

  onMessageClick(event) {
    const copy = event.target.closest("[data-copy]");
    if (copy) {
      this.copy([...copy.closest("figure").querySelectorAll(".line")].map((line) => line.textContent).join("").trimEnd(), copy);
      return;
    }
    const button = event.target.closest("[data-action]");
    if (!button) return;
    const index = this.transcript.indexOf(button);
    const { action } = button.dataset;
    if (action === "copy") this.copy(this.current.messages[index].content, button);
    if (action === "edit") this.edit(index);
    if (action === "regenerate") this.regenerate(index);
  }

  async copy(text, button) {
    await copyText(text);
    button.classList.add("copied");
    setTimeout(() => button.classList.remove("copied"), 1500);
    announce("Copied");
  }

  copyLast() {
    const last = this.current.messages.findLast((message) => message.role === "assistant");
    if (last) this.copy(last.content, at("messages"));
  }

  edit(index) {
    if (this.runs.has(this.current.id)) return;
    const conversation = this.current;
    this.transcript.edit(index, (text) => {
      this.composer.focus();
      if (text === null || conversation !== this.current || this.runs.has(conversation.id)) return;
      const removed = conversation.messages.splice(index);
      this.send(text);
      this.offerUndo(conversation, index, removed);
    });
  }

  editLast() {
    const index = this.current.messages.findLastIndex((message) => message.role === "user");
    if (index >= 0) this.edit(index);
  }

  regenerate(index) {
    if (this.runs.has(this.current.id) || !this.model) return;
    const removed = this.current.messages.splice(index);
    this.answer();
    if (removed.some((message) => message.content)) this.offerUndo(this.current, index, removed);
  }

  /** Let the reader have the messages back that were replaced from an index on. */
  offerUndo(conversation, index, removed) {
    showToast(removed.length > 1 ? `${removed.length} messages were replaced.` : "The answer was replaced.", () => {
      this.runs.get(conversation.id)?.stop();
      conversation.messages.splice(index, Infinity, ...removed);
      if (this.current === conversation) this.transcript.draw();
      this.save(conversation);
    });
  }

  regenerateLast() {
    const index = this.current.messages.findLastIndex((message) => message.role === "assistant");
    if (index >= 0) this.regenerate(index);
  }

  // -- conversations

  settings() {
    const conversation = this.current;
    editSettings(conversation.settings, (changed) => {
      conversation.settings = changed;
      this.save(conversation);
    });
  }

  async with(id, action) {
    const conversation = id === this.current.id ? this.current : this.runs.get(id)?.conversation ?? (await this.database.read(id));
    if (conversation) await action(conversation);
  }

  rename(id) {
    return this.with(id, (conversation) => {
      const dialog = at("rename");
      const field = at("new-title");
      field.value = titleOf(conversation);
      at("rename-form").onsubmit = async (event) => {
        event.preventDefault();
        dialog.close();
        conversation.title = field.value.trim();
        await this.database.write(conversation);
        await this.list.show();
        if (conversation === this.current) this.showState();
      };
      dialog.showModal();
      field.select();
    });
  }

  exportJson(id) {
    return this.with(id, (found) => saveFile(fileName(titleOf(found), "json"), "application/json", toJson([found])));
  }

  exportMarkdown(id) {
    return this.with(id, (found) => saveFile(fileName(titleOf(found), "md"), "text/markdown", toMarkdown(found)));
  }

  async exportAll() {
    const all = [];
    for (const { id } of this.database.list()) all.push(await this.database.read(id));
    saveFile("conversations.json", "application/json", toJson(all));
  }

  async importFile(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      const found = fromJson(await file.text());
      for (const conversation of found) await this.database.write(conversation);
      showToast(found.length === 1 ? "One conversation imported." : `${found.length} conversations imported.`);
    } catch (error) {
      showToast(error.message);
    }
    await this.list.show();
  }

  remove(id) {
    return this.with(id, async (conversation) => {
      const run = this.runs.get(id);
      if (run) {
        run.removed = true;
        run.stop();
      }
      if (id === this.current.id) this.show(newConversation(storedSettings()));
      await this.database.remove(id);
      await this.list.show();
      showToast(`“${titleOf(conversation)}” deleted.`, async () => {
        for (const message of conversation.messages) if (message.state === "running") message.state = "stopped";
        await this.database.write(conversation);
        await this.list.show();
      });
    });
  }

  async removeAll() {
    for (const run of this.runs.values()) {
      run.removed = true;
      run.stop();
    }
    this.show(newConversation(storedSettings()));
    await this.database.removeAll();
    await this.list.show();
    showToast("All conversations deleted.");
  }
}

export async function startChat() {
  return new Chat(await Database.open());
}
