"""Encoder-decoders: models that read one sequence and generate another. `model.py` is their interface. `recurrent.py` has a GRU
as encoder and `modified_gru.py` as decoder, `transformer.py` has attention only. `config.py` contains their hyperparameters,
`search.py` generates outputs (greedy and beam search), `checkpoint.py` saves and loads them."""
