"""The keyboard: what a person types on, over what the federation learnt.

- `context`: keys and constants; the text left of the cursor as tokens and the word being typed; how a word is written.
- `lexicon`: the words that can be suggested; what typed letters and a swipe cost against them.
- `personal`: words and pairs learnt on this device, the user's dictionary, words never to suggest.
- `predict`: all of that and the model's scores give the strip and the correction.
- `session`: a keyboard (predictor and model, one model step a word); a line of text on it, also in a terminal.
- `measure`: a simulated person types held-out messages; language models are compared by it.
- `graph`: one model step as an ONNX graph, compared with the network.
- `bundle`: the exported folder. `export` writes it, `serve` shows it as a page.
- `site`: page and export as files for any host over HTTPS. `lan` serves them to a phone in the same network.

The same exists in JavaScript (`web/`); numbers and tables are in `web/data` and read by both.
"""
