"""The keyboard: what a person types on, over what the federation learnt.

    context     keys and constants; text left of the cursor → tokens the model has read and the word being typed,
                and back: how a chosen word is written, and the blanks around it
    lexicon     the words that can be suggested; what typed letters and a swipe cost against them
    personal    words and pairs learnt on this device, the user's dictionary, words never to suggest
    predict     all of that and the model's scores → the strip, the correction
    session     a keyboard: predictor + model, one model step a word; a line of text on it, also in a terminal
    measure     a simulated person types held-out messages; language models compared by it
    graph       one model step as an ONNX graph, compared with the network
    bundle      the exported folder; `export` writes it, `serve` shows it as a page with the runtime of `assets`

The same exists in JavaScript (`web/`); numbers and tables are in `web/data` and read by both.
"""
