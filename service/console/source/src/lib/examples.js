// A request for each kind of model, that works as it is.

export function exampleOf(model) {
  const { id } = model;
  if (model.pictures) return { method: 'POST', path: '/v1/images/generations', body: { model: id, prompt: model.pictures.prompts[7] ?? model.pictures.prompts[0] } };
  switch (model.kind) {
    case 'encoder':
      return { method: 'POST', path: '/v1/embeddings', body: { model: id, input: ['Attention is all you need', 'Paris is in France'] } };
    case 'reranker':
      return { method: 'POST', path: '/v1/rerank', body: { model: id, query: 'What is the capital of France?', documents: ['Paris is in France.', 'Fish swim.'] } };
    case 'classifier':
      return { method: 'POST', path: `/predict?model=${encodeURIComponent(id)}`, body: { inputs: 'I like this.' } };
    case 'token_classifier':
      return { method: 'POST', path: `/v2/models/${encodeURIComponent(id)}/infer`, body: { inputs: [{ name: 'text', datatype: 'BYTES', shape: [1], data: ['I like Paris.'] }] } };
    case 'encoder_decoder':
      return { method: 'POST', path: '/v1/completions', body: { model: id, prompt: 'forty-two', max_tokens: 64 } };
    case 'decoder':
    default:
      return { method: 'POST', path: '/v1/completions', body: { model: id, prompt: 'def mean(values):\n', max_tokens: 64 } };
  }
}
