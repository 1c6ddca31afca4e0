/** The keyboard's worker where the model may change while the page is open: the strip of the next key is of the new one. */

import { WordSource } from "../decoder/model.mjs";
import { Mixture } from "../decoder/ngram.mjs";
import { Network, shapesOf } from "../decoder/network.mjs";
import { rebuild } from "../worker.mjs";

const keys = self.onmessage;

self.onmessage = (event) => {
  const { kind, model } = event.data;
  if (kind === "adopt") rebuild((made) => (model ? adopted(made, model) : made));
  else keys(event);
};

/** What an engine is made of whose network is another one. Counts go with it where the vocabulary is that of the export. */
function adopted(made, { model, reading, vocab, weights }) {
  const shapes = shapesOf(model), tensors = new Map(Object.entries(weights).map(([name, data]) => [name, { shape: shapes[name], data }]));
  const network = new WordSource(new Network({ model, reading }, tensors)), { ngram } = made.sources, { counts } = made.manifest;
  const isAlike = vocab.words.length === made.vocab.words.length && vocab.words.every((word, n) => word === made.vocab.words[n]);
  if (!isAlike) return { ...made, vocab: { ...vocab, tokenised: false }, sources: { federated: network, network } };
  const federated = ngram && counts?.mixture ? new Mixture(network, ngram, counts.mixture) : network;
  return { ...made, sources: { federated, network, ...(ngram && { ngram }) } };
}
