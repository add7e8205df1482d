// The official JavaScript clients, unmodified, against the endpoint: URL is its address; CHAT, VECTORS, SOUNDS are models.
import assert from "node:assert/strict";

import { createOpenAI } from "@ai-sdk/openai";
import { embed, generateText, streamText } from "ai";
import OpenAI from "openai";

const { URL: url, CHAT: chat, VECTORS: vectors, SOUNDS: sounds } = process.env;
const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];

const whole = await client.chat.completions.create({ model: chat, messages, max_tokens: 20 });
const text = whole.choices[0].message.content;
assert.equal(whole.usage.completion_tokens, 20);

const response = await client.responses.create({ model: chat, input: "hello", max_output_tokens: 20 });
assert.equal(response.output_text, text);
let streamed = "";
for await (const e of await client.responses.create({ model: chat, input: "hello", max_output_tokens: 20, stream: true })) {
  if (e.type === "response.output_text.delta") streamed += e.delta;
}
assert.equal(streamed, text);

const vector = await client.embeddings.create({ model: vectors, input: "hello" });
assert.ok(vector.data[0].embedding.length > 1);

const heard = await client.audio.transcriptions.create({ model: sounds, file: new File(["RIFF hello"], "hello.wav") });
assert.equal(heard.text, "RIFF hello");
const spoken = await client.audio.speech.create({ model: sounds, voice: "alloy", input: "hello" });
assert.equal(await spoken.text(), "RIFF hello");

// Vercel's SDK, whose default is responses
const openai = createOpenAI({ baseURL: url + "/v1", apiKey: "none" });
const generated = await generateText({ model: openai(chat), prompt: "hello", maxOutputTokens: 20, maxRetries: 0 });
assert.equal(generated.text, text);
assert.equal(generated.usage.outputTokens, 20);
const stream = streamText({ model: openai(chat), prompt: "hello", maxOutputTokens: 20, maxRetries: 0 });
assert.equal(await stream.text, text);
assert.equal(await stream.finishReason, "length");
const embedded = await embed({ model: openai.embedding(vectors), value: "hello", maxRetries: 0 });
assert.equal(embedded.embedding.length, vector.data[0].embedding.length);
console.log("ok");
