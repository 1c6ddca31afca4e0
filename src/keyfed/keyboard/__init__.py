"""The keyboard: what a person types on, over what the federation learnt.

    context     text left of the cursor → tokens the model has read, and the part of a word being typed
    layout      where the keys are
    trie, typed   what the typed letters cost against every word at once
    gesture     what a swipe costs
    personal    words and pairs learnt on this device, the user's dictionary, words never to suggest
    casing      how a word is written, and the blanks around it
    predict     all of that and the model's scores → the strip, the correction
    session     a keyboard: predictor + model, one model step a word

The same exists in JavaScript (`web/`); numbers and tables are in `web/data` and read by both.
"""
