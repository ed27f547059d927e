"""Weights in blocks: 32 weights of a row share one scale, and each weight has 4 or 8 bits.

- `blocks.py`: the blocks of one matrix, made by rounding its weights.
- `stored.py`: the blocks of a GGUF file, taken over without rounding where that is possible.
- `graph.py`: a graph whose products and tables read blocks.
- `integers.py`: a graph whose products have one scale for each token instead, and whose tables read blocks.
"""
