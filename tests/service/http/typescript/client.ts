// Calls the service at the address of the first argument, with the key of the second, through types that openapi-typescript made of its
// document. Prints what came as JSON. That this compiles is half of the test: examples are bodies as a user writes them, without defaults.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

declare const process: { argv: string[] };
const [baseUrl, key] = process.argv.slice(2);
// Routes that can stream have two kinds of answers; without the kind, `data` is one or the other.
const client = createClient<paths, "application/json">({ baseUrl, headers: { authorization: `Bearer ${key}` } });

const embedded = await client.POST("/v1/embeddings", { body: { input: ["the cat", "a dog"], model: "all-MiniLM-L6-v2" } });
const vectors: components["schemas"]["EmbeddingResponse"] | undefined = embedded.data;
const ranked = await client.POST("/v1/rerank", { body: { query: "where", documents: ["here", { text: "there" }], top_n: 1 } });
const cohere = await client.POST("/v2/rerank", { body: { query: "where", documents: ["here", "there"] } });
const tei = await client.POST("/embed", { body: { inputs: "the cat", truncation_direction: "Left" } });
const written = await client.POST("/v1/completions", { body: { prompt: "def", max_tokens: 3 } });
const said = await client.POST("/v1/chat/completions", {
  body: { messages: [{ role: "user", content: "hello" }], max_tokens: 3 },
});
const answered = await client.POST("/v1/responses", { body: { input: "hello", max_output_tokens: 3 } });
const more = await client.POST("/v1/responses", {
  body: { input: "more", max_output_tokens: 3, previous_response_id: answered.data?.id },
});
const talk = await client.POST("/v1/conversations", { body: { items: [{ type: "message", role: "system", content: "Be brief." }] } });
const conversation = { conversation_id: talk.data?.id ?? "" };
await client.POST("/v1/responses", { body: { input: "hello", max_output_tokens: 3, conversation: conversation.conversation_id } });
const items = await client.GET("/v1/conversations/{conversation_id}/items", { params: { path: conversation, query: { order: "asc" } } });
const state = await client.POST("/v1/states", { body: { prompt: "def mean", name: "ts" }, params: { header: { "Idempotency-Key": "ts" } } });
const forks = await client.POST("/v1/states/{state}/fork", { params: { path: { state: "ts" } }, body: { n: 2 } });
const back = await client.POST("/v1/states/{state}/rewind", { params: { path: { state: "ts" } }, body: { tokens: 1 } });
const next = await client.POST("/v1/completions", { body: { prompt: "(", state: "ts", store_state: true, max_tokens: 3 } });
const line = await client.GET("/v1/states/{state}/lineage", { params: { path: { state: next.data?.state?.id ?? "" } } });
const deleted = await client.DELETE("/v1/states/{state}", { params: { path: { state: "ts" } } });
const gone = await client.GET("/v1/states/{state}", { params: { path: { state: "ts" } } });
const models = await client.GET("/v1/models");
const model = await client.GET("/v1/models/{model}", { params: { path: { model: "all-MiniLM-L6-v2" } } });
const tensors = await client.POST("/v2/models/{model}/infer", {
  params: { path: { model: "all-MiniLM-L6-v2" } },
  body: { inputs: [{ name: "text", datatype: "BYTES", shape: [1], data: ["the cat"] }], outputs: [{ name: "sentence_embedding" }] },
});
const refused = await client.POST("/v1/embeddings", { body: { input: "x", model: "nobody" } });

console.log(
  JSON.stringify({
    embeddings: vectors?.data.map((entry) => (Array.isArray(entry.embedding) ? entry.embedding.length : 0)),
    rerank: ranked.data?.results.length,
    cohere: cohere.data?.results.map((result) => result.relevance_score).length,
    tei: tei.data?.map((row) => row?.length),
    completion: written.data?.choices[0]?.finish_reason,
    chat: said.data?.choices[0]?.message.role,
    response: answered.data?.output.flatMap((item) => ("content" in item ? item.content : []))[0]?.type,
    more: more.data?.previous_response_id === answered.data?.id && (more.data?.usage?.input_tokens_details.cached_tokens ?? 0) > 0,
    items: items.data?.data.map((item) => item.role),
    forks: forks.data && "data" in forks.data ? forks.data.data.map((fork) => ("origin" in fork ? fork.origin : fork.status)) : [],
    back: (state.data?.position ?? 0) - (back.data?.position ?? 0),
    lineage: line.data?.data.map((ancestor) => ancestor.id).indexOf(state.data?.id ?? ""),
    cached: next.data?.usage.prompt_tokens_details.cached_tokens === state.data?.position,
    deleted: deleted.data?.deleted,
    gone: gone.error?.error.code,
    models: models.data?.data.map((each) => each.id)[0],
    model: model.data?.id,
    tensors: tensors.data?.outputs[0]?.shape,
    refused: refused.error?.error.code,
  }),
);
