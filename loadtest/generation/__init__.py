"""How fast text comes, and beside what. In reading order: `steps.py` the bare step loop, `engine.py` the engine on top of it, `streams.py`
the service on top of that, `latency.py` the time between tokens; `shapes.py` and `decoders.py` the random decoders that are built to be
measured, `twin.py` the softmax twin, `gpt2.py` the library that everybody knows, `batches.py` what fits into a memory, `long_sequences.py`
and `crossover.py` where a flat price beats a growing one; `plan.py`, `contestants.py` and `measuring.py` the rounds, `rows.py` their bars,
`plot.py` their pictures."""
