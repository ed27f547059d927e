"""Models that read one sequence and write another. `model.py` is their interface; `recurrent.py` with `modified_gru.py` is the
one with a GRU on both sides, `transformer.py` the one of attention alone; `config.py` has their shapes, `search.py` writes with them
(greedy and beam), `checkpoint.py` makes folders of them."""
