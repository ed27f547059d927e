"""Encoder-decoders: models that read one sequence and generate another. `model.py` is their interface. `recurrent.py` is a model whose
encoder is a bidirectional GRU and whose decoder is the cell of `modified_gru.py`. `transformer.py` is a Transformer. `config.py` has
their hyperparameters, `search.py` generates outputs (greedy and beam search), `checkpoint.py` saves and loads the models."""
