// Conversations in the browser: IndexedDB, or this page's memory where there is none. Nothing is sent anywhere.

import { summaryOf } from "./conversation.js";

export const MAX_CONVERSATIONS = 500;
export const MAX_CHARACTERS = 50_000_000; // of all conversations together
const VERSION = 1;

/** Each server below a prefix has conversations of its own. */
const NAME = `tessera${new URL(".", document.baseURI).pathname}`;

export class Database {
  /** `database`: null keeps everything in memory. */
  constructor(database) {
    this.database = database;
    this.summaries = new Map();
    this.memory = new Map();
    this.channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(NAME) : null;
    this.onChange = () => {};
    if (this.channel) {
      this.channel.onmessage = async () => {
        await this.readSummaries();
        this.onChange();
      };
    }
  }

  static async open() {
    let database = null;
    try {
      database = await openDatabase();
    } catch {
      // In some private windows there is none.
    }
    const found = new Database(database);
    await found.readSummaries();
    return found;
  }

  get isKept() {
    return this.database !== null;
  }

  async readSummaries() {
    if (this.database === null) return;
    const all = await this.ask("summaries", "readonly", (store) => store.getAll());
    this.summaries = new Map(all.map((summary) => [summary.id, summary]));
  }

  /** Summaries, the last changed first. */
  list() {
    return [...this.summaries.values()].sort((a, b) => b.updated - a.updated);
  }

  /** A conversation by its id; undefined if it is not there. */
  async read(id) {
    if (this.database === null) return structuredClone(this.memory.get(id));
    return this.ask("conversations", "readonly", (store) => store.get(id));
  }

  /** Keep a conversation as it is now. Returns how many old ones had to go. */
  async write(conversation) {
    const copy = structuredClone(conversation);
    const summary = summaryOf(copy);
    this.summaries.set(copy.id, summary);
    if (this.database === null) {
      this.memory.set(copy.id, copy);
    } else {
      await this.change((conversations, summaries) => {
        conversations.put(copy);
        summaries.put(summary);
      });
    }
    const surplus = this.surplus(copy.id);
    for (const id of surplus) await this.remove(id);
    this.channel?.postMessage("changed");
    return surplus.length;
  }

  async remove(id) {
    this.summaries.delete(id);
    this.memory.delete(id);
    if (this.database === null) return;
    await this.change((conversations, summaries) => {
      conversations.delete(id);
      summaries.delete(id);
    });
    this.channel?.postMessage("changed");
  }

  async removeAll() {
    this.summaries.clear();
    this.memory.clear();
    if (this.database === null) return;
    await this.change((conversations, summaries) => {
      conversations.clear();
      summaries.clear();
    });
    this.channel?.postMessage("changed");
  }

  /** Summaries of conversations that have all words of a query, in their title or their messages. */
  async search(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [];
    for (const summary of this.list()) {
      const title = summary.title.toLowerCase();
      let missing = words.filter((word) => !title.includes(word));
      if (missing.length) {
        const conversation = await this.read(summary.id);
        const text = (conversation?.messages ?? []).map((message) => message.content).join("\n").toLowerCase();
        missing = missing.filter((word) => !text.includes(word));
      }
      if (!missing.length) found.push(summary);
    }
    return found;
  }

  /** Ids of the oldest conversations beyond the bounds. */
  surplus(kept) {
    const found = [];
    let characters = 0;
    this.list().forEach((summary, index) => {
      characters += summary.size;
      if (summary.id !== kept && (index >= MAX_CONVERSATIONS || characters > MAX_CHARACTERS)) found.push(summary.id);
    });
    return found;
  }

  change(action) {
    const transaction = this.database.transaction(["conversations", "summaries"], "readwrite");
    action(transaction.objectStore("conversations"), transaction.objectStore("summaries"));
    return new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
    });
  }

  ask(store, mode, action) {
    return promised(action(this.database.transaction(store, mode).objectStore(store)));
  }
}

function openDatabase() {
  const request = indexedDB.open(NAME, VERSION);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    request.result.createObjectStore("summaries", { keyPath: "id" });
  };
  return promised(request);
}

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("the database is in use"));
  });
}
