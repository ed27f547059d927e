"""`attnserve evaluate`: how well the vectors of a bundle find documents, or agree with people about pairs of texts.

`metrics.py` has nDCG, recall, MRR and Spearman's correlation. `tasks.py` reads tasks from files, and `made.py` makes two from what the
installed packages carry. `vectors.py` computes the vectors of a task in this process, and keeps them on disk. `ways.py` compares vectors in
every way that a bundle has, `run.py` evaluates one bundle, `report.py` makes the table, the picture and the files, and `command.py` is the
command. Bundles are opened by `loadtest/in_process/engine.py`.
"""
