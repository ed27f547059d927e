"""Parts of models other than attention: `positions.py`, `rotary.py`, `xpos.py`, `feedforward.py`, `scale_norm.py`, `modules.py`,
`checks.py`.
"""
